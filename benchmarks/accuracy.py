"""Train the demo's network on the demo's glyphs with several losses and data types, three seeds each.

    python demo/make_glyphs.py build/glyphs
    python benchmarks/accuracy.py build/glyphs build/accuracy               # about 50 minutes on two cores
    python benchmarks/accuracy.py build/glyphs build/accuracy --ways "arcface;cosface" --seeds 1

Network, batch size, learning rate and epochs are those of demo/train_glyphs.py. The margins are smaller than
in the papers and were tuned only for ArcFace. Verification uses pairs of classes that were not trained. Each
training is a torchrun job of two ranks with its own folder. Finished trainings are not repeated; --report
trains nothing. Writes results.md, results.json and curves.png.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

EPOCHS, GLOBAL_BATCH, RATE = 3, 128, 0.1
ARCFACE: dict[str, Any] = {"set_loss_type": "dist_arcface", "set_margin": 0.3, "set_scale": 32.0}
WAYS: dict[str, dict[str, Any]] = {
    "arcface": ARCFACE,
    "cosface": {"set_loss_type": "dist_cosface", "set_margin": 0.2, "set_scale": 32.0},
    "adaface": {"set_loss_type": "dist_adaface", "set_margin": 0.3, "set_scale": 32.0},
    "softmax": {"set_loss_type": "dist_softmax"},
    "arcface, sampled 0.1": {**ARCFACE, "set_sample_ratio": 0.1},
    "arcface, bf16 products": {**ARCFACE, "set_head_execution": {"products": "bfloat16"}},
    "arcface, bf16 rows": {**ARCFACE, "set_row_dtype": "bfloat16"},
    "arcface, bf16 rows, int8 momentum": {
        **ARCFACE,
        "set_row_dtype": "bfloat16",
        "set_row_state_dtype": "int8",
    },
}
LOW_PRECISION = [way for way in WAYS if way == "arcface" or "bf16" in way]
COLUMNS = ("accuracy", "TAR at FAR 1e-2")


def train(way: str, seed: int, data: Path, run: Path) -> None:
    """Train one network. Called by every rank of the job."""
    from plsc import Entry

    with (data / "label.txt").open() as file:
        images = sum(1 for _ in file)
    steps = EPOCHS * math.ceil(images / GLOBAL_BATCH)
    ins = Entry()
    ins.set_dataset_dir(str(data))
    ins.set_val_targets("glyphs_unseen")
    ins.set_flip(False)
    ins.set_num_workers(0)
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((1, 32, 32))
    ins.set_emb_size(128)
    ins.set_dropout(0.0)
    for setter, value in WAYS[way].items():
        getattr(ins, setter)(**value) if isinstance(value, dict) else getattr(ins, setter)(value)
    ins.set_global_batch_size(GLOBAL_BATCH)
    ins.set_train_epochs(EPOCHS)
    ins.set_lr(RATE)
    ins.set_warmup_epochs(1)
    ins.set_step_boundaries((steps // 2, steps * 3 // 4, steps * 9 // 10))
    ins.set_lr_decay_factor(0.3)
    ins.set_seed(seed)
    ins.set_log_period(max(1, steps // 100))
    ins.set_test_batch_size(500)
    ins.set_model_save_dir(str(run))
    ins.set_max_last_checkpoint_num(1)
    result = ins.train()
    verification = result.evaluation["glyphs_unseen"]
    if ins.is_main:
        tar = verification.tar_at_far[0.01]
        found = dict(zip(COLUMNS, (verification.accuracy, tar), strict=True))
        (run / "verification.json").write_text(json.dumps(found))


def folder_of(out: Path, way: str, seed: int) -> Path:
    """Return the folder of one training."""
    return out / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"


def launch(way: str, seed: int, data: Path, out: Path) -> None:
    """Run one training on two ranks, unless it is finished already."""
    run = folder_of(out, way, seed)
    if (run / "verification.json").exists():
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    this = [__file__, str(data), str(run), "--one", way, "--seeds", str(seed)]
    subprocess.run([*launcher, *this], check=True)


def trained(out: Path, way: str, seeds: int) -> list[int]:
    """Return the seeds with which a way was trained to the end."""
    all_seeds = range(1, seeds + 1)
    return [s for s in all_seeds if (folder_of(out, way, s) / "verification.json").exists()]


def table(out: Path, ways: list[str], seeds: int) -> str:
    """Return mean and standard deviation of each way as a Markdown table, and write results.json."""
    lines = [f"| | seeds | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    numbers: dict[str, list[dict[str, float]]] = {}
    for way in ways:
        found = [
            json.loads((folder_of(out, way, seed) / "verification.json").read_text())
            for seed in trained(out, way, seeds)
        ]
        if not found:
            continue
        numbers[way] = found
        cells = []
        for column in COLUMNS:
            values = [one[column] for one in found]
            spread = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
        lines.append(f"| {way} | {len(found)} | {' | '.join(cells)} |")
    (out / "results.json").write_text(json.dumps(numbers, indent=1))
    return "\n".join(lines) + "\n"


def draw_curves(out: Path, ways: list[str], seeds: int) -> None:
    """Plot the loss of the low-precision ways and of float32, all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for number, way in enumerate(ways):
        for seed in trained(out, way, seeds):
            lines = (folder_of(out, way, seed) / "metrics.jsonl").read_text().splitlines()
            metrics = [json.loads(line) for line in lines]
            points = [(m["step"], m["mean_loss"]) for m in metrics if "mean_loss" in m]
            axes.plot(
                *zip(*points, strict=True),
                "0.7" if way == "arcface" else f"C{number}",  # the spread of float32, in grey
                lw=1,
                label=way if seed == 1 else None,
            )
    axes.set(xlabel="step", ylabel="mean loss since the last point")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "curves.png", dpi=110)


def main() -> None:
    """Train the chosen ways, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, help="folder that demo/make_glyphs.py made")
    parser.add_argument("out", type=Path, help="folder for trainings and results")
    parser.add_argument("--ways", default="all", help="names separated by semicolons, or 'all'")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="report finished trainings; train nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train(options.one, options.seeds, options.data, options.out)
        return
    ways = list(WAYS) if options.ways == "all" else options.ways.split(";")
    unknown = set(ways) - set(WAYS)
    if unknown:
        parser.error(f"unknown ways: {sorted(unknown)}; there are {'; '.join(WAYS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in range(1, 1 if options.report else options.seeds + 1):
        for way in ways:
            launch(way, seed, options.data, options.out)
    text = table(options.out, ways, options.seeds)
    (options.out / "results.md").write_text(text)
    print(text)
    shown = [way for way in ways if way in LOW_PRECISION]
    if shown:
        draw_curves(options.out, shown, options.seeds)


if __name__ == "__main__":
    main()
