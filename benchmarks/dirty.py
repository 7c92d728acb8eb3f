"""Find planted faults in glyphs: recall at precision 0.95, against two baselines; and train after applying.

    python demo/make_glyphs.py build/dirty/glyphs --images-per-class 30 --classes 1700
    python benchmarks/dirty_data.py build/dirty/glyphs build/dirty/2 --seed 2
    python benchmarks/dirty.py build/dirty/2

`plsc data split --halves`, a network for each half (SmallResNet, 4 epochs, otherwise as in the demo), and
`plsc data clean --second`, for dirty/ and for clean/.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from plsc import Entry


def train(data: Path, images: Path, run: Path, seed: int, epochs: int = 4) -> Path:
    """Train unless it is done; return the checkpoint."""
    checkpoint = run / f"{epochs - 1}"
    if not checkpoint.exists():
        ins = Entry()
        ins.set_dataset_dir(str(data), image_folder=str(images))
        ins.set_flip(False)
        ins.set_num_workers(0)
        ins.set_model_name("SmallResNet")
        ins.set_image_shape((1, 32, 32))
        ins.set_emb_size(128)
        ins.set_dropout(0.0)
        ins.set_global_batch_size(128)
        ins.set_train_epochs(epochs)
        ins.set_lr(0.1)
        ins.set_seed(seed)
        ins.set_log_period(30)
        ins.set_test_batch_size(500)
        ins.set_max_last_checkpoint_num(1)
        ins.set_model_save_dir(str(run))
        ins.train()
    return checkpoint


def plsc(*words: object) -> None:
    """Run a command of plsc."""
    subprocess.run([sys.executable, "-m", "plsc.cli", *map(str, words)], check=True)


def recall_at(precision: float, scores: np.ndarray, right: np.ndarray, total: int) -> float:
    """Return the highest recall of a threshold with this precision."""
    order = np.argsort(-scores, kind="stable")
    found = np.cumsum(right[order])
    enough = np.flatnonzero(found >= precision * np.arange(1, len(order) + 1))
    return float(found[enough[-1]] / total) if len(enough) else 0.0


def judge(work: Path, truth: dict[str, Any]) -> None:
    """Print precision and recall of the proposals per kind."""
    with (work / "clean" / "changes.tsv").open(newline="") as file:
        changes = list(csv.DictReader(file, delimiter="\t"))
    alike = {frozenset(pair) for pair in truth["alike"]}

    def are_alike(one: str, other: str) -> bool:
        return frozenset((int(one) % 50_000, int(other) % 50_000)) in alike

    flipped, two = truth["flipped"], {frozenset(pair) for pair in truth["two_classes"]}
    doubled = {frozenset(pair) for pair in truth["duplicates"]}
    one_class = set(truth["one_class"])
    kinds: dict[str, tuple[list[float], list[bool], int]] = {
        "wrong labels": ([], [], len(flipped)),
        "duplicates": ([], [], len(doubled)),
        "two classes that are one": ([], [], len(two)),
        "classes that are two": ([], [], len(one_class)),
    }
    divided: set[str] = set()
    for change in changes:
        score, reason = float(change["score"]), change["reason"]
        if reason.startswith("wrong label"):
            likely = change["to"] or reason.split()[3]
            kind, right = "wrong labels", change["image"] in flipped
            ignored = not right and are_alike(change["class"], likely)
        elif "duplicate of" in reason:
            kind, right = "duplicates", frozenset((change["image"], reason.split()[-1])) in doubled
            ignored = not right and are_alike(change["class"], reason.split()[-1].split("/")[0])
        elif change["change"] == "merge":
            kind, right = "two classes that are one", frozenset((change["class"], change["to"])) in two
            ignored = not right and are_alike(change["class"], change["to"])
        else:
            kind, right = "classes that are two", change["class"] in one_class
            ignored = change["class"] in divided
            divided.add(change["class"])
        if not ignored:
            kinds[kind][0].append(score)
            kinds[kind][1].append(right)
    for kind, (scores, right, total) in kinds.items():
        hits = sum(right)
        print(
            f"{kind}: planted {total:,}, proposed {len(right):,}, precision {hits / max(len(right), 1):.3f}, "
            f"recall {hits / max(total, 1):.3f}, "
            f"at precision 0.95 {recall_at(0.95, np.array(scores), np.array(right), max(total, 1)):.3f}"
        )


def main() -> None:
    """Clean both datasets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of dirty_data.py")
    parser.add_argument("kinds", nargs="*", default=["dirty", "clean"])
    options = parser.parse_args()
    for kind in options.kinds:
        data, work = options.folder / kind, options.folder / f"{kind}-work"
        if not (work / "halves").exists():
            plsc("data", "split", data, work / "halves", "--halves")
        models = [
            train(work / "halves" / f"half{half}.tsv", data, work / f"half{half}", seed=half)
            for half in (1, 2)
        ]
        if not (work / "clean" / "changes.tsv").exists():
            plsc("data", "clean", models[0], data, work / "clean", "--second", models[1])
        judge(work, json.loads((options.folder / f"{kind}.json").read_text()))


if __name__ == "__main__":
    main()
