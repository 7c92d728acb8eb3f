"""Train a hundred million classes on one machine, with the class weights in a file.

    python benchmarks/many_classes.py build/many                        # 1e8 x 128: 13.6 GB of disk
    python benchmarks/many_classes.py build/many --dim 256              # 26.4 GB
    python benchmarks/many_classes.py build/many --classes 1e6          # a minute

A small MLP maps random vectors to embeddings; labels are random. A step uses --ratio of the classes, in 8
bits, with row-wise Adagrad. So this measures size and speed, and no accuracy. Each part is a process:

- warm: --steps steps with the page cache of the system as it is;
- cold: before each step all pages are written and dropped from the page cache;
- memory: the same steps with --smaller classes, whose weights are in memory, also drawn in pages;
- kill: SIGKILL during training, then resume; the losses must equal those of `warm`, bit for bit.

Prints a table and writes results.json. FOLDER must be on a local disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plsc import Callback, Entry
from plsc.heads import Sampling
from plsc.models import BaseModel
from plsc.train import build as build_heads
from plsc.train.callbacks import Context

INPUTS = 32


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

    def __init__(self, began: float, pages: Path | None, is_cold: bool) -> None:
        self.began, self.pages, self.is_cold = began, pages, is_cold
        self.steps: list[dict[str, float]] = []

    def run_start(self, context: Context) -> None:
        """Note how long the start took."""
        self.start_seconds = time.monotonic() - self.began
        self._begin()

    def after_step(self, context: Context) -> None:
        """Note the figures of the step, and drop the page cache if it is to be cold."""
        seconds = time.monotonic() - self.time
        moved = {name: value - self.moved[name] for name, value in counters().items()}
        self.steps.append({"seconds": seconds, "anonymous": anonymous_memory(), **moved})
        if self.is_cold and self.pages is not None:
            drop_cache(self.pages)
        self._begin()

    def _begin(self) -> None:
        self.time, self.moved = time.monotonic(), counters()


def counters() -> dict[str, int]:
    """Return the bytes that this process has read and written so far, from files and from the disk."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(lines[name]) for name in ("rchar", "wchar", "read_bytes")}


def anonymous_memory() -> int:
    """Return the bytes of this process that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def drop_cache(pages: Path) -> None:
    """Write a file's pages to the disk and drop them from the page cache."""
    with pages.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def train(options: argparse.Namespace, part: str) -> None:
    """Train; print the figures as a line of JSON."""
    classes = int(options.smaller if part == "memory" else options.classes)
    generator = torch.Generator().manual_seed(1)
    count = options.steps * options.batch
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
    ratio = options.ratio * options.classes / classes
    ins.set_sample_ratio(ratio)
    ins.set_train_batch_size(options.batch)
    ins.set_train_epochs(1)
    ins.set_precision("bfloat16")
    ins.set_log_period(1)
    ins.set_with_test(False)
    ins.set_cpu_threads(options.threads)
    ins.set_model_save_dir(str(options.folder / part))
    pages = None
    if part == "memory":  # drawn as in a file
        build_heads.Sampling = lambda *_, **__: Sampling(ratio, in_pages=True)  # type: ignore[misc, assignment]
    else:
        weights = options.folder / f"{'kill' if part == 'resume' else part}-weights"
        ins.set_weights_file(str(weights))
        pages = weights / "rank0" / "pages"
    if part in ("kill", "resume"):
        ins.set_model_save_dir(str(options.folder / "kill"))
        ins.set_checkpoint_dir("last")
        ins.set_save_every_n_steps(options.save_every)
    watch = Watch(time.monotonic(), pages, part == "cold")
    ins.add_callback(watch)
    ins.train()
    print(json.dumps({"start": watch.start_seconds, "steps": watch.steps}))


def run(part: str, until: int | None = None) -> dict[str, Any]:
    """Run a part in a process of its own; with `until`, kill it after so many steps."""
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if until is None:
            *_, last = process.stdout
            if process.wait():
                raise SystemExit(f"the part {part} failed")
            return json.loads(last)
        for line in process.stdout:
            if f" step {until}/" in line:
                process.send_signal(signal.SIGKILL)
                break
    return {}


def losses_of(folder: Path) -> dict[int, float]:
    """Return the loss of each step from the metrics of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def report(options: argparse.Namespace, found: dict[str, dict[str, Any]], is_equal: bool) -> None:
    """Print the table and write results.json."""
    print(f"{options.classes:g} classes x {options.dim}, {options.ratio:g} per step, batch {options.batch}")
    print("| part | classes | start, s | step, s: median, worst | anonymous | read, written per step, MB |")
    print("|---" * 6 + "|")
    for part, figures in found.items():
        steps = figures["steps"][2:]  # the first steps import and allocate
        seconds = [step["seconds"] for step in steps]
        moved = [statistics.median(step[name] for step in steps) / 1e6 for name in ("rchar", "wchar")]
        peak = max(step["anonymous"] for step in figures["steps"]) / 2**30
        classes = options.smaller if part == "memory" else options.classes
        print(
            f"| {part} | {classes:g} | {figures['start']:.1f} | {statistics.median(seconds):.3f}, "
            f"{max(seconds):.3f} | {peak:.2f} GiB | {moved[0]:.1f}, {moved[1]:.1f} |"
        )
    print(f"killed and resumed: losses {'equal' if is_equal else 'DIFFER'}, bit for bit")
    facts = {"classes": options.classes, "dim": options.dim, "is_equal": is_equal, **found}
    (options.folder / "results.json").write_text(json.dumps(facts))


def main() -> None:
    """Run all parts, or as a subprocess one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of files and results, on a local disk")
    parser.add_argument("--classes", type=float, default=1e8)
    parser.add_argument("--smaller", type=float, default=1e6, help="classes of the part `memory`")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ratio", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return train(options, options.part)
    options.folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for part in ("warm", "cold", "memory"):
        found[part] = run(part)
        if part != "memory":
            shutil.rmtree(options.folder / f"{part}-weights")
    run("kill", until=options.steps * 2 // 3)
    found["resume"] = run("resume")
    shutil.rmtree(options.folder / "kill-weights")
    warm, resumed = losses_of(options.folder / "warm"), losses_of(options.folder / "kill")
    report(options, found, warm == resumed and len(warm) == options.steps)
    return None


if __name__ == "__main__":
    main()
