"""Measure the first table of docs/benchmarks/measured.md on this machine, 20 minutes on two idle cores.

    python benchmarks/run.py build/run
    python benchmarks/run.py build/run --quick     # tiny sizes, to test the script: the figures mean nothing

Each part is a benchmark of its own, with more options. head.py, train.py and data.py take turns with their
rivals (plain PyTorch; a DataLoader with Pillow). many_classes.py needs 14 GB of local disk. kill.py writes
its class weights to files, without uploads. A part that fails is a row that says so; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data import RIVAL
from measuring import GIB, HERE, Report, Sample, read_lines, speed
from ways import BASELINE

AUTOCAST, OURS, OURS_BF16 = "plain PyTorch, bf16 autocast", "plsc, fp32", "plsc, bf16"


@dataclass(frozen=True)
class Part:
    """A row: the benchmark with its arguments, in which FOLDER stands for the folder of its results.

    full: arguments of the full size, instead of --quick. summarise: returns the cell of plsc.
    """

    name: str
    rival: str
    command: list[str]
    full: list[str]
    summarise: Callable[[list[Sample]], str]


def of_head(samples: list[Sample]) -> str:
    """Return how fast both precisions are, and the extra memory of plain PyTorch and of plsc."""
    over = {one["way"]: one["over"] / GIB for one in samples if one["kind"] == "memory"}
    return (
        f"{speed(samples, OURS, BASELINE):.1f} times as fast in float32, "
        f"{speed(samples, OURS_BF16, BASELINE):.1f} times in bfloat16; "
        f"extra memory {over[OURS]:.2f} GiB, of plain PyTorch {over[BASELINE]:.2f} GiB"
    )


def of_many_classes(samples: list[Sample]) -> str:
    """Return the time of a step and the memory."""
    steps = samples[0]["steps"]
    seconds = statistics.median(step["seconds"] for step in steps[2:])
    memory = max(step["anonymous"] for step in steps) / GIB
    return f"{seconds:.2f} s per step, {memory:.1f} GiB of memory"


def of_kills(samples: list[Sample]) -> str:
    """Return the number of kills and of problems."""
    kills = sum("phase" in one for one in samples)
    return f"{kills} kills, {sum(bool(one['problems']) for one in samples)} problems"


PARTS = (
    Part(
        "step of the head, 1,000,000 classes",
        BASELINE,
        ["head.py", "FOLDER", "--ways", f"{BASELINE}|{OURS}|{OURS_BF16}"],
        ["--classes", "1e6", "--rounds", "7"],
        of_head,
    ),
    Part(
        "step of ResNet18, 100,000 classes",
        AUTOCAST,
        ["train.py", "FOLDER", "--ways", f"{AUTOCAST}|{OURS_BF16}"],
        ["--networks", "ResNet18", "--classes", "1e5", "--rounds", "4"],
        lambda samples: f"{speed(samples, OURS_BF16, AUTOCAST):.1f} times as fast in bfloat16",
    ),
    Part(
        "loading JPEG files",
        "DataLoader with Pillow",
        ["data.py", "load", "FOLDER"],
        [],
        lambda samples: f"{speed(samples, 'plsc, jpeg, 2 threads', RIVAL):.1f} times as fast",
    ),
    Part(
        "100,000,000 classes, 100,000 per step",
        "-",
        ["many_classes.py", "FOLDER"],
        [],
        of_many_classes,
    ),
    Part("killed", "-", ["kill.py", "FOLDER", "--files", "--quick"], ["--kills", "5"], of_kills),
)


def main() -> None:
    """Run the parts in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="for results, on a local disk; former ones are removed")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rows, is_whole = [], True
    for part in PARTS:
        script, *words = [*part.command, *(["--quick"] if options.quick else part.full)]
        folder = options.folder / script.removesuffix(".py")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        arguments = [word.replace("FOLDER", str(folder)) for word in words]
        began = time.monotonic()
        done = subprocess.run([sys.executable, str(HERE / script), *arguments], check=False)
        samples = read_lines(folder / f"{folder.name}.jsonl")
        failed = [f"{one['way']}: {one['outcome']}" for one in samples if one.get("kind") == "failed"]
        failed += ["failed"] * (done.returncode != 0)
        cell = "; ".join(failed) or part.summarise(samples)
        is_whole &= not failed
        rows.append((part.name, part.rival, cell, f"{time.monotonic() - began:.0f} s"))
    report = Report(options.folder, "run")
    report.print("TINY SIZES, not those of the names: the figures mean nothing\n" if options.quick else "")
    report.header("", "compared with", "plsc", "took")
    for row in rows:
        report.row(*row)
    sys.exit(not is_whole)


if __name__ == "__main__":
    main()
