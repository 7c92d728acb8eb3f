"""Measure the first table of docs/benchmarks/measured.md on this machine, 20 minutes on two idle cores.

    python benchmarks/run.py build/run
    python benchmarks/run.py build/run --quick     # tiny sizes, to test the script: the figures mean nothing

Each part is a benchmark of its own, with more options: head.py, train.py and loader.py take turns with their
rivals (plain PyTorch; a DataLoader with Pillow), and the table has the median of each round's ratio.
many_classes.py needs 14 GB of local disk. kill.py writes its class weights to files, without uploads.
A part that fails is a row that says so, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PLAIN, AUTOCAST = "plain PyTorch, fp32", "plain PyTorch, bf16 autocast"
OURS, OURS_BF16 = "plsc, fp32", "plsc, bf16"
RIVAL = "Pillow, DataLoader, 2 processes"  # of loader.py
Sample = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A row: the benchmark with its arguments, in which FOLDER stands for the folder of its results.

    summarise: reads that folder and returns the cell of plsc.
    """

    name: str
    rival: str
    command: list[str]
    quick: list[str]
    summarise: Callable[[Path], str]


def ratio(samples: list[Sample], rival: str, ours: str) -> float:
    """Return the median over the rounds of how many times as fast as the rival ours is."""
    seconds = {(one["way"], one["round"]): one["seconds"] for one in samples if one["kind"] == "time"}
    return statistics.median(
        seconds[rival, turn] / seconds[ours, turn] for way, turn in seconds if way == rival
    )


def read_lines(path: Path) -> list[Sample]:
    """Return the objects of a file with a line of JSON each."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_head(folder: Path) -> str:
    """Return how fast both precisions are, and the extra memory of plain PyTorch and of plsc."""
    samples = read_lines(folder / "head.jsonl")
    over = {one["way"]: one["over"] / 2**30 for one in samples if one["kind"] == "memory"}
    return (
        f"{ratio(samples, PLAIN, OURS):.1f} times as fast in float32, "
        f"{ratio(samples, PLAIN, OURS_BF16):.1f} times in bfloat16; "
        f"extra memory {over[OURS]:.2f} GiB, of plain PyTorch {over[PLAIN]:.2f} GiB"
    )


def of_step(folder: Path) -> str:
    """Return how fast a whole step is in bfloat16."""
    return f"{ratio(read_lines(folder / 'train.jsonl'), AUTOCAST, OURS_BF16):.1f} times as fast in bfloat16"


def of_loader(folder: Path) -> str:
    """Return the ratio of the images per second, as loader.py has computed it."""
    rows = json.loads((folder / "loader.json").read_text())
    (ours,) = [row for row in rows if row["way"] == "plsc, jpeg, 2 threads"]
    return f"{ours[RIVAL]:.1f} times as fast"


def of_many_classes(folder: Path) -> str:
    """Return the time of a step, the memory, and whether a killed run went on as if nothing had happened."""
    found = json.loads((folder / "results.json").read_text())
    steps = found["warm"]["steps"]
    seconds = statistics.median(step["seconds"] for step in steps[2:])
    memory = max(step["anonymous"] for step in steps) / 2**30
    resumed = "equal" if found["is_equal"] else "DIFFERENT"
    return f"{seconds:.2f} s per step, {memory:.1f} GiB of memory; killed and resumed: {resumed} losses"


def of_kills(folder: Path) -> str:
    """Return the number of kills and of problems."""
    lines = read_lines(folder / "kill.jsonl")
    kills = sum("phase" in line for line in lines)
    return f"{kills} kills, {sum(bool(line['problems']) for line in lines)} problems"


PARTS = (
    Part(
        "step of the head, 1,000,000 classes",
        PLAIN,
        ["head.py", "--classes", "1e6", "--rounds", "7", "--ways", f"{PLAIN}|{OURS}|{OURS_BF16}", "FOLDER"],
        ["head.py", "--quick", "--ways", f"{PLAIN}|{OURS}|{OURS_BF16}", "FOLDER"],
        of_head,
    ),
    Part(
        "step of ResNet18, 100,000 classes",
        AUTOCAST,
        [
            *("train.py", "--networks", "ResNet18", "--classes", "1e5", "--rounds", "4"),
            *("--ways", f"{AUTOCAST}|{OURS_BF16}", "FOLDER"),
        ],
        ["train.py", "--quick", "--ways", f"{AUTOCAST}|{OURS_BF16}", "FOLDER"],
        of_step,
    ),
    Part(
        "loading JPEG files",
        "DataLoader with Pillow",
        ["loader.py", "--json", "FOLDER/loader.json"],
        ["loader.py", "--images", "128", "--rounds", "2", "--json", "FOLDER/loader.json"],
        of_loader,
    ),
    Part(
        "100,000,000 classes, 100,000 per step",
        "-",
        ["many_classes.py", "FOLDER"],
        [
            *("many_classes.py", "FOLDER", "--classes", "2e4", "--smaller", "1e4", "--ratio", "0.01"),
            *("--steps", "6", "--save-every", "2", "--batch", "16", "--dim", "16"),
        ],
        of_many_classes,
    ),
    Part(
        "killed",
        "-",
        ["kill.py", "FOLDER", "--files", "--quick", "--kills", "5"],
        ["kill.py", "FOLDER", "--files", "--quick", "--kills", "1"],
        of_kills,
    ),
)


def main() -> int:
    """Run the parts in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="for results, on a local disk; former ones are removed")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rows, is_whole = [], True
    for part in PARTS:
        command = part.quick if options.quick else part.command
        folder = options.folder / command[0].removesuffix(".py")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        arguments = [word.replace("FOLDER", str(folder)) for word in command[1:]]
        begin = time.monotonic()
        done = subprocess.run([sys.executable, str(HERE / command[0]), *arguments], check=False)
        is_whole &= done.returncode == 0
        cell = part.summarise(folder) if done.returncode == 0 else f"failed: {command[0]}"
        rows.append(f"| {part.name} | {part.rival} | {cell} | {time.monotonic() - begin:.0f} s |")
    if options.quick:
        print("\nTINY SIZES, not those of the names: the figures mean nothing")
    print("\n| | compared with | plsc | took |\n|---|---|---|---|", *rows, sep="\n")
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
