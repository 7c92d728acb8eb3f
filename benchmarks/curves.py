"""Plot the losses of several runs in one picture, and print their last evaluations.

python benchmarks/curves.py precision.png float32=runs/a bfloat16=runs/b     # folders with metrics.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from plsc.evaluate.plots import add_legend, line_look, new_figure, save_png, style_axes


def read(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the logged steps and the evaluations of a run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    steps = [entry for entry in entries if entry.get("mean_loss") is not None]
    return steps, [entry for entry in entries if "eval" in entry]


def main() -> None:
    """Plot and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    options = parser.parse_args()
    figure = new_figure(7.2, 3.2)
    losses, accuracies = figure.subplots(1, 2)
    for index, (name, _, folder) in enumerate(run.partition("=") for run in options.runs):
        steps, evaluations = read(Path(folder))
        look = {**line_look(index), "linewidth": 1.4, "label": name}
        losses.plot([s["step"] for s in steps], [s["mean_loss"] for s in steps], **look)
        accuracies.plot([s["step"] for s in steps], [s["accuracy"] for s in steps], **look)
        for target, result in evaluations[-1]["eval"].items() if evaluations else ():
            rates = ", ".join(f"TAR {v:.4f} at FAR {k}" for k, v in result["tar_at_far"].items())
            print(
                f"{name}: loss {steps[-1]['mean_loss']:.4f}, {target}: accuracy {result['accuracy']:.4f} "
                f"+- {result['accuracy_std']:.4f}, AUC {result['auc']:.4f}, {rates}"
            )
    for axes, label in ((losses, "loss"), (accuracies, "accuracy of the batch")):
        style_axes(axes)
        axes.set(xlabel="step", ylabel=label, ylim=(0, None))
        add_legend(axes, fontsize=9)
    figure.tight_layout()
    save_png(figure, options.picture, dpi=100)


if __name__ == "__main__":
    main()
