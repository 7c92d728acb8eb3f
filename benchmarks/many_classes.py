"""Train a hundred million classes on one machine, with the class weights in a file.

    python benchmarks/many_classes.py build/many                        # 1e8 x 128: 13.6 GB of disk
    python benchmarks/many_classes.py build/many --dim 256              # 26.4 GB
    python benchmarks/many_classes.py build/many --quick                # to test the script

A small MLP maps random vectors to embeddings; labels are random. A step uses a thousandth of the classes, in
8 bits, with row-wise Adagrad. So this measures size and speed, and no accuracy. Each part is a process:

- file: 40 steps with the class weights in a file;
- memory: the same steps with a million classes, whose weights are in memory, also drawn in pages.

Appends to many_classes.jsonl and many_classes.md in the folder, which must be on a local disk.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import GIB, Report, Sample, print_json, run_child, status
from torch import Tensor, nn

from plsc import Callback, Entry
from plsc.heads import Sampling
from plsc.models import BaseModel
from plsc.train import build as build_heads
from plsc.train.callbacks import Context

INPUTS, THREADS = 32, 2


@dataclass(frozen=True)
class Size:
    """The sizes. smaller: classes of the part `memory`. sampled: classes per step."""

    classes: int = 10**8
    smaller: int = 10**6
    sampled: int = 10**5
    batch: int = 128
    steps: int = 40


QUICK = Size(20_000, 10_000, 200, batch=16, steps=6)


class Mlp(BaseModel):
    """Two layers, followed by batch norm."""

    def __init__(self, emb_size: int) -> None:
        super().__init__()
        self.example_input = torch.zeros(2, INPUTS)
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, 256), nn.ReLU(), nn.Linear(256, emb_size), nn.BatchNorm1d(emb_size)
        )

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, D]."""
        return self.layers(input)


class Watch(Callback):
    """Measures each step: seconds, bytes that the process moved, and anonymous memory."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.steps: list[dict[str, float]] = []

    def run_start(self, context: Context) -> None:
        """Note how long the start took."""
        self.start_seconds = time.monotonic() - self.began
        self._begin()

    def after_step(self, context: Context) -> None:
        """Note the figures of the step."""
        seconds = time.monotonic() - self.time
        moved = {name: value - self.moved[name] for name, value in counters().items()}
        self.steps.append({"seconds": seconds, "anonymous": status("RssAnon"), **moved})
        self._begin()

    def _begin(self) -> None:
        self.time, self.moved = time.monotonic(), counters()


def counters() -> dict[str, int]:
    """Return the bytes that this process has read and written so far, from files and from the disk."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(lines[name]) for name in ("rchar", "wchar", "read_bytes")}


def train(options: argparse.Namespace, size: Size, part: str) -> None:
    """Train; print the figures as a line of JSON."""
    classes = size.smaller if part == "memory" else size.classes
    generator = torch.Generator().manual_seed(1)
    count = size.steps * size.batch
    vectors = torch.randn(count, INPUTS, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    ins = Entry()
    torch.manual_seed(1)
    ins.set_model(Mlp(options.dim))
    ins.train_reader = lambda: zip(vectors.split(1000), labels.split(1000), strict=True)
    ins.set_train_image_num(count)
    ins.set_num_workers(0)
    ins.set_class_num(classes)
    ins.set_emb_size(options.dim)
    ins.set_row_dtype("int8")
    ins.set_head_optimizer("adagrad")
    ratio = size.sampled / classes
    ins.set_sample_ratio(ratio)
    ins.set_train_batch_size(size.batch)
    ins.set_train_epochs(1)
    ins.set_precision("bfloat16")
    ins.set_log_period(1)
    ins.set_with_test(False)
    ins.set_cpu_threads(THREADS)
    ins.set_model_save_dir(str(options.folder / part))
    if part == "memory":  # drawn as in a file
        build_heads.Sampling = lambda *_, **__: Sampling(ratio, in_pages=True)  # type: ignore[misc, assignment]
    else:
        ins.set_weights_file(str(options.folder / "weights"))
    watch = Watch()
    ins.add_callback(watch)
    ins.train()
    print_json("part", part=part, classes=classes, start=watch.start_seconds, steps=watch.steps)


def show(report: Report, found: Sample) -> None:
    """Print the row of a part."""
    report.keep(**found)
    steps = found["steps"][2:]  # the first steps import and allocate
    seconds = [step["seconds"] for step in steps]
    moved = [statistics.median(step[name] for step in steps) / 1e6 for name in ("rchar", "wchar")]
    peak = max(step["anonymous"] for step in found["steps"]) / GIB
    report.row(
        *(found["part"], f"{found['classes']:,}", f"{found['start']:.1f}"),
        *(f"{statistics.median(seconds):.3f}, {max(seconds):.3f}", f"{peak:.2f} GiB"),
        f"{moved[0]:.1f}, {moved[1]:.1f}",
    )


def main() -> None:
    """Run all parts, or as a subprocess one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of files and results, on a local disk")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="few classes and steps")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = QUICK if options.quick else Size()
    if options.part:
        train(options, size, options.part)
        return
    report = Report(options.folder, "many_classes")
    report.print(f"{size.sampled:,} classes of {options.dim} values per step, batch {size.batch}\n")
    report.header(
        *("part", "classes", "start, s", "step, s: median, worst", "anonymous"),
        "read, written per step, MB",
    )
    for part in ("file", "memory"):
        found, trouble = run_child([__file__, *sys.argv[1:], "--part", part], None)
        shutil.rmtree(options.folder / "weights", ignore_errors=True)
        if trouble is not None:
            sys.exit(f"the part {part} {trouble}")
        show(report, found[0])


if __name__ == "__main__":
    main()
