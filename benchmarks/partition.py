"""Time and memory of shuffling and splitting lines of base64: plsc, cat, shuf and sort, in turn.

python benchmarks/partition.py results/           1.3 GB, 200,003 lines, 8 parts (needs 6 GB of disk)
python benchmarks/partition.py --quick results/   65 MB, to test the script

Writes samples.jsonl (every run) and results.md (medians, and medians of each round's ratio to `cat`, or to
`cat` and `sync`). Inputs are in the page cache; every way writes to the same disk. plsc and `cat` with `sync`
end when the output is on disk (fsync); the output of `cat` alone, shuf and sort may still be in memory. CPU
seconds depend less on other programs.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
TOOL = REPO / "tools/process_base64_files.py"
PARTS = 8


@dataclass(frozen=True)
class Way:
    """One way: a command with {data}, {files} and {out}. once: too slow to run in each round."""

    name: str
    command: str
    is_ours: bool = False
    once: bool = False


def ours(name: str, *arguments: object) -> Way:
    """Return a way that runs `plsc data partition`."""
    tool = f"{sys.executable} {TOOL} --data_dir {{data}} --nranks {PARTS} --output_dir {{out}}/parts"
    return Way(name, " ".join([tool, *map(str, arguments)]), is_ours=True)


BASELINES = (
    Way("cat in* > one", "cat {files} > {out}/one"),
    Way("cat in* > one; sync", "cat {files} > {out}/one && sync {out}/one"),
)
WAYS = (
    *BASELINES,
    ours("plsc, bound of 8 GB", "--memory 8G"),
    ours("plsc, bound of 8 GB, 1 worker", "--memory 8G --workers 1"),
    ours("plsc, bound of 256 MB", "--memory 256M"),
    ours("plsc, bound of 64 MB", "--memory 64M"),
    Way("cat in* | shuf | split -n r/8", f"cat {{files}} | shuf | split -n r/{PARTS} - {{out}}/part"),
    Way("sort -R", "sort -R {files} > {out}/one", once=True),
)


def main() -> int:
    """Run the ways in turn and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="a small dataset, two rounds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", type=Path, help="folder for the dataset and the outputs")
    parser.add_argument("--ways", help="names, separated by |; cat always runs")
    given = parser.parse_args()
    lines, rounds = (10_003, 2) if given.quick else (200_003, given.rounds)
    chosen = [way for way in WAYS if way in BASELINES or not given.ways or way.name in given.ways.split("|")]
    given.results.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=given.work or given.results))
    samples = []
    try:
        data = make_set(work / f"set-{lines}", lines)
        with (given.results / "samples.jsonl").open("w") as file:
            for sample in take_turns(chosen, data, work, rounds, given.quick):
                samples.append(sample)
                print(json.dumps(sample), flush=True)
                file.write(json.dumps(sample) + "\n")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    table = render(chosen, samples, lines)
    (given.results / "results.md").write_text(table)
    print(table)
    return 0


def make_set(folder: Path, lines: int, files: int = 4) -> Path:
    """Write random base64 lines of 4 to 5.6 kB, the size of 112x112 JPEG images, and read them once."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        with (folder / f"{index}.txt").open("wb") as file:
            for _ in range(lines * index // files, lines * (index + 1) // files):
                data = rng.bytes(int(rng.integers(4000, 5600)))
                file.write(base64.b64encode(data) + b"\t%d\n" % rng.integers(0, 85742))
    (folder / "file_list.txt").write_text("".join(f"{index}.txt\n" for index in range(files)))
    return folder


def take_turns(
    ways: list[Way], data: Path, work: Path, rounds: int, is_quick: bool
) -> Iterator[dict[str, Any]]:
    """Yield a sample per run; the order changes from round to round."""
    files = " ".join(str(path) for path in sorted(data.glob("[0-9]*.txt")))
    interpreter = measure(f"{sys.executable} {TOOL} --help > /dev/null")["peak"]
    yield {"way": "interpreter", "round": 0, "peak": interpreter}
    for turn in range(-1, rounds):  # the first run is a warm-up
        regular = [way for way in ways if not way.once or (turn == 0 and not is_quick)]
        first = turn % len(regular)
        for way in regular[first:] + regular[:first]:
            out = work / "out"
            out.mkdir()
            command = way.command.format(data=data, files=files, out=out)
            sample = {"way": way.name, "round": turn, **measure(command)}
            check(way, out, sample)
            shutil.rmtree(out)
            if turn >= 0:
                yield sample


def measure(command: str) -> dict[str, Any]:
    """Run a command; return seconds, CPU seconds and the peak resident memory of all its processes."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # compiled once, as an installed package is
    began, before = time.perf_counter(), os.times()
    process = subprocess.Popen(["bash", "-c", command], env=environment, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.01)
    seconds, after = time.perf_counter() - began, os.times()
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "cpu": cpu, "peak": peak}


def resident(root: int) -> int:
    """Return the resident bytes of a process and its descendants."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError, StopIteration):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return total


def check(way: Way, out: Path, sample: dict[str, Any]) -> None:
    """Check the output of plsc: a way that writes nothing is fast."""
    if way.is_ours:
        manifest = json.loads((out / "parts/manifest.json").read_text())
        sizes = [(out / "parts" / part["name"]).stat().st_size for part in manifest["parts"]]
        if sizes != [part["size"] for part in manifest["parts"]] or len(sizes) != PARTS:
            raise SystemExit(f"{way.name} wrote {sizes}")
        sample["bytes"] = sum(sizes)
    else:
        sample["bytes"] = sum(path.stat().st_size for path in out.iterdir())


def render(ways: list[Way], samples: list[dict[str, Any]], lines: int) -> str:
    """Return the table as Markdown."""
    by_way = {way.name: [s for s in samples if s["way"] == way.name] for way in ways}
    interpreter = next(s["peak"] for s in samples if s["way"] == "interpreter")
    size = by_way[BASELINES[0].name][0]["bytes"]
    rows = [
        f"{lines} lines, {size / 1e9:.2f} GB, into {PARTS} parts, warm; the interpreter alone: "
        f"{interpreter / 2**20:.0f} MB\n",
        "| way | seconds (median) | / `cat` | / `cat; sync` | CPU seconds | peak memory, MB |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in by_way.items():
        if not found:
            continue
        ratios = [ratio(found, by_way[baseline.name]) for baseline in BASELINES]
        rows.append(
            f"| {name} | {statistics.median(s['seconds'] for s in found):.2f} | "
            f"{ratios[0]:.2f} | {ratios[1]:.2f} | "
            f"{statistics.median(s['cpu'] for s in found):.2f} | "
            f"{max(s['peak'] for s in found) / 2**20:.0f} |"
        )
    return "\n".join(rows) + "\n"


def ratio(found: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> float:
    """Return the median of each round's ratio to the baseline."""
    times = {sample["round"]: sample["seconds"] for sample in baseline}
    return statistics.median(sample["seconds"] / times[sample["round"]] for sample in found)


if __name__ == "__main__":
    sys.exit(main())
