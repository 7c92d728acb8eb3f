"""Time to index and read the records of every format: one process, one thread, warm page cache.

python benchmarks/formats.py results/           100,000 records of 4 to 5.6 kB (needs 4 GB of disk)
python benchmarks/formats.py --quick results/   5,000 records, to test the script

Ways take turns. index: the first opening, which reads the whole file. again: the second one, which maps the
stored index. in order, shuffled: source[i]. in blocks: blocks of 1,000 consecutive records; records of 16
blocks are shuffled together. Writes samples.jsonl (every run) and results.md (medians).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pybase64

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from plsc.data.sources import Source, open_source  # noqa: E402
from plsc.data.writers import writer_of  # noqa: E402

JPEG = b"\xff\xd8\xff\xe0"  # by which base64 in a column is recognised
PLACES = ("set.rec", "set.parquet", "set.tar", "set_base64", "set.csv", "set.jsonl", "paths.csv")


def main() -> int:
    """Write the dataset in every format, read each in turn, and print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="a small dataset, two rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="folder for the set")
    given = parser.parse_args()
    records, rounds = (5_000, 2) if given.quick else (100_000, given.rounds)
    given.results.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=given.work or given.results))
    os.environ["PLSC_CACHE_DIR"] = str(work / "cache")
    try:
        samples = []
        write_sets(work, records)
        with (given.results / "samples.jsonl").open("w") as file:
            for sample in take_turns(work, records, rounds):
                samples.append(sample)
                file.write(json.dumps(sample) + "\n")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    table = render(samples, records)
    (given.results / "results.md").write_text(table)
    print(table)
    return 0


def images(records: int) -> Iterator[tuple[bytes, int]]:
    """Yield random bytes of the size of 112x112 JPEGs."""
    rng = np.random.default_rng(0)
    noise = rng.bytes(2**24)
    for index in range(records):
        start, length = int(rng.integers(2**24 - 6000)), int(rng.integers(4000, 5600))
        yield JPEG + noise[start : start + length - 4], index % 5749


def write_sets(work: Path, records: int) -> None:
    """Write the same records in every format."""
    for name in ("set.rec", "set.parquet", "set.tar", "set_base64"):
        writer_of(name)(str(work / name), images(records))
    with (work / "set.csv").open("w") as table, (work / "set.jsonl").open("w") as objects:
        table.write("image,label\n")
        for image, label in images(records):
            text = pybase64.b64encode(image).decode()
            table.write(f"{text},{label}\n")
            objects.write(f'{{"image": "{text}", "label": {label}}}\n')
    with (work / "paths.csv").open("w") as table:
        table.write("path,label\n")
        table.writelines(f"images/{i:08d}.jpg,{i % 5749}\n" for i in range(10 * records))


def take_turns(work: Path, records: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield (way, what, records per second, GB per second) of each run; the order changes per round."""
    ways: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        name: functools.partial(ours, work / name, records) for name in PLACES
    }
    ways["tarfile"] = lambda: tarfile_index(work / "set.tar")
    ways["webdataset"] = lambda: webdataset_in_order(work / "set.tar")
    ways["wc -l"] = lambda: count_lines(work / "set.csv", records)
    names = list(ways)
    for turn in range(-1, rounds):  # the first round is a warm-up
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            for sample in ways[name]():
                if turn >= 0:
                    yield {"way": name, "round": turn, **sample}


def ours(path: Path, records: int) -> Iterator[dict[str, Any]]:
    """Open a dataset twice, first without an index, and read it in several orders."""
    folder = path if path.is_dir() else path.parent
    for index in folder.glob(f".{'' if path.is_dir() else path.name}*.plsc-index"):
        index.unlink()
    size = sum(p.stat().st_size for p in path.iterdir()) if path.is_dir() else path.stat().st_size
    seconds, source = timed(lambda: open_source(path))
    yield told("index", len(source), seconds, size)
    seconds, source = timed(lambda: open_source(path))
    yield told("again", len(source), seconds, size)
    if path.name == "paths.csv":
        return
    rng = np.random.default_rng(1)
    yield told("in order", *read(source, np.arange(records)), size)
    yield told("in blocks", *read(source, in_blocks(records, rng)), size)
    # In random order, Parquet decodes a row group per image, so a few images are enough.
    few = records // 100 if path.suffix == ".parquet" else records
    yield told("shuffled", *read(source, rng.permutation(records)[:few]), size * few // records)


def in_blocks(records: int, rng: np.random.Generator) -> np.ndarray:
    """Return an order of blocks of 1,000; records of 16 blocks are shuffled together."""
    blocks = rng.permutation(-(-records // 1000))
    parts = []
    for start in range(0, len(blocks), 16):
        pool = np.concatenate([np.arange(b * 1000, b * 1000 + 1000) for b in blocks[start : start + 16]])
        parts.append(rng.permutation(pool[pool < records]))
    return np.concatenate(parts)


def read(source: Source, order: np.ndarray) -> tuple[int, float]:
    """Return the number of records that were read, and the seconds."""
    indices = order.tolist()
    began = time.perf_counter()
    for index in indices:
        source[index]
    return len(indices), time.perf_counter() - began


def tarfile_index(path: Path) -> Iterator[dict[str, Any]]:
    """Find all members with Python's tarfile."""
    with tarfile.open(path) as archive:
        seconds, members = timed(archive.getmembers)
    yield told("index", len(members) // 2, seconds, path.stat().st_size)


def webdataset_in_order(path: Path) -> Iterator[dict[str, Any]]:
    """Read a tar file in order with the webdataset package."""
    try:
        import webdataset
    except ImportError:
        return
    seconds, count = timed(lambda: sum(1 for _ in webdataset.WebDataset(str(path), shardshuffle=False)))
    yield told("in order", count, seconds, path.stat().st_size)


def count_lines(path: Path, records: int) -> Iterator[dict[str, Any]]:
    """Count lines with wc."""
    seconds, _ = timed(lambda: subprocess.run(["wc", "-l", path], check=True, capture_output=True))
    yield told("index", records, seconds, path.stat().st_size)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def told(what: str, records: int, seconds: float, size: int) -> dict[str, Any]:
    """Return the rates of a run."""
    return {"what": what, "a_second": records / seconds, "gb_a_second": size / seconds / 1e9}


def render(samples: list[dict[str, Any]], records: int) -> str:
    """Return the table as Markdown."""
    columns = ("index", "again", "in order", "in blocks", "shuffled")
    rows = [
        f"{records} records of 4 to 5.6 kB, warm, one thread; records per second (GB/s)\n",
        f"| way | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    for way in dict.fromkeys(sample["way"] for sample in samples):
        cells = []
        for what in columns:
            found = [s for s in samples if s["way"] == way and s["what"] == what]
            rate = statistics.median(s["a_second"] for s in found) if found else 0
            volume = statistics.median(s["gb_a_second"] for s in found) if found else 0
            cells.append(f"{rate:,.0f} ({volume:.2f})" if found else "")
        rows.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
