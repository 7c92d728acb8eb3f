"""Speed of reading data: images into batches, and the partition of lines of base64.

    python benchmarks/data.py load build/load                  # JPEG files: plsc, Pillow in a DataLoader
    python benchmarks/data.py load build/load --sources jpeg rec          # other formats, only with plsc
    python benchmarks/data.py partition build/partition        # 1.3 GB, 200,003 lines; needs 6 GB of disk
    python benchmarks/data.py load build/load --quick          # to test the script; also partition --quick

load: JPEG images of 112 x 112 and about 5 kB, written by the script. Every way reads all of them once per
round.

partition: shuffle the lines and split them into 8 parts, with `plsc data partition`, or with cat, shuf and
split. The input is in the page cache. plsc and `cat` with `sync` end when the output is on disk (fsync); that
of shuf may still be in memory.

Appends to data.jsonl (every measurement) and data.md (the table) in the folder.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measuring import HERE, Report, machine, speed, status, times_of, turns
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from plsc.data.loader import Recipe, SourceLoader
from plsc.data.order import BatchPlan
from plsc.data.sources import open_source
from plsc.data.sources.base import Source
from plsc.data.writers import writer_of

BATCH = 128
SHAPE = (3, 112, 112)
RIVAL = "Pillow, DataLoader, 2 processes"
IMAGES, QUICK_IMAGES = 4096, 128
LINES, QUICK_LINES, FILES, PARTS = 200_003, 10_003, 4, 8
BASELINE = "cat in* > one; sync"


def compare_loaders(options: argparse.Namespace, folder: Path, report: Report) -> None:
    """Run all ways on image files, and plsc on the other sources."""
    pictures = make_pictures(QUICK_IMAGES if options.quick else IMAGES)
    ways: dict[str, Callable[[], int]] = {}
    sources = {name: SOURCES[name](folder / name, pictures) for name in options.sources}
    for name, source in sources.items():
        for threads in (1, 2):
            ways[f"plsc, {name}, {threads} thread{'s' * (threads > 1)}"] = read_with_plsc(source, threads)
    if "jpeg" in sources:
        loader = torch_loader(folder / "jpeg", 3, BATCH, 2, shuffle=True)
        ways[RIVAL] = lambda: sum(len(labels) for _, labels in loader)
    for run in ways.values():
        run()  # warms up
    for turn, name in turns(list(ways), options.rounds):
        began = time.perf_counter()
        ways[name]()
        report.keep(kind="time", way=name, round=turn, seconds=time.perf_counter() - began)
    report.header("way", "images per second", f"speed / {RIVAL}")
    for name in ways:
        rate = len(pictures) / statistics.median(times_of(report.samples, name).values())
        report.row(name, f"{rate:,.0f}", f"{speed(report.samples, name, RIVAL):.2f}")


def make_pictures(count: int, shape: tuple[int, int, int] = SHAPE) -> list[bytes]:
    """Return JPEG images that compress like photographs of faces: smooth, with some noise."""
    generator = np.random.default_rng(0)
    channels, height, width = shape
    pictures = []
    for _ in range(count):
        coarse = generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noise = generator.normal(0, 6, (height, width, 3))
        noisy = np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).convert("RGB" if channels == 3 else "L").save(file, "JPEG", quality=88)
        pictures.append(file.getvalue())
    return pictures


def write_files(folder: Path, pictures: list[bytes], copies: int = 1) -> Source:
    """Write JPEG files in one folder per class, each image under several names, and open them."""
    for index, data in enumerate(pictures):
        place = folder / f"{index % 100:03d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{index}.jpg").write_bytes(data)
        for copy in range(1, copies):
            os.link(place / f"{index}.jpg", place / f"{index}-{copy}.jpg")
    return open_source(folder)


def write_parquet(location: Path, pictures: list[bytes]) -> Source:
    """Write images and labels to a Parquet file."""
    labels = [index % 100 for index in range(len(pictures))]
    pq.write_table(pa.table({"image": pictures, "label": labels}), f"{location}.parquet", row_group_size=1000)
    return open_source(f"{location}.parquet")


def write_as(suffix: str) -> Callable[[Path, list[bytes]], Source]:
    """Return a function that writes a dataset in the format of a suffix."""

    def write(location: Path, pictures: list[bytes]) -> Source:
        samples = ((data, index % 100) for index, data in enumerate(pictures))
        path = f"{location}{suffix}"
        writer_of(path)(path, samples)
        return open_source(path)

    return write


# By format, a function that writes the images to a folder and opens them.
SOURCES: dict[str, Callable[[Path, list[bytes]], Source]] = {
    "jpeg": write_files,
    "base64": write_as(""),
    "rec": write_as(".rec"),
    "parquet": write_parquet,
}


def torch_loader(
    folder: Path, channels: int, batch: int, workers: int, **how: Any
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return torch's DataLoader of torchvision's ImageFolder, normalised. how: more of its arguments."""
    from torchvision import datasets, transforms

    steps = [transforms.ToTensor(), transforms.Normalize([0.5] * channels, [0.5] * channels)]
    if channels == 1:
        steps.insert(0, transforms.Grayscale())
    dataset = datasets.ImageFolder(
        str(folder), transforms.Compose([transforms.RandomHorizontalFlip(), *steps])
    )
    return DataLoader(dataset, batch, num_workers=workers, persistent_workers=workers > 0, **how)


def read_with_plsc(source: Source, threads: int) -> Callable[[], int]:
    """Return a way: an epoch of the loader of plsc, with its default settings."""
    plan = BatchPlan(len(source), BATCH, 1, seed=0, last_batch="keep")
    recipe = Recipe(SHAPE, seed=0, flip=True)
    loader = SourceLoader(source, plan, 0, recipe, num_workers=threads)
    epochs = iter(range(10**6))
    return lambda: sum(len(batch) for batch in loader.epoch(next(epochs)))


def compare_partitions(options: argparse.Namespace, folder: Path, report: Report) -> None:
    """Run the commands in turn, each into an empty folder."""
    data = make_lines(folder / "set", QUICK_LINES if options.quick else LINES)
    tool = f"{sys.executable} {HERE.parent}/tools/process_base64_files.py --data_dir {data} --nranks {PARTS}"
    files, out = " ".join(str(path) for path in sorted(data.glob("[0-9]*.txt"))), folder / "out"
    commands = {
        BASELINE: f"cat {files} > {out}/one && sync {out}/one",
        "plsc, bound of 256 MB": f"{tool} --output_dir {out}/parts --memory 256M",
        "plsc, bound of 64 MB": f"{tool} --output_dir {out}/parts --memory 64M",
        "cat in* | shuf | split -n r/8": f"cat {files} | shuf | split -n r/{PARTS} - {out}/part",
    }

    def run(way: str) -> dict[str, Any]:
        out.mkdir()
        found = run_command(commands[way])
        if "plsc" in way:
            check(out / "parts")
        shutil.rmtree(out)
        return found

    for way in commands:
        run(way)  # warms up
    for turn, way in turns(list(commands), options.rounds):
        report.keep(kind="time", way=way, round=turn, **run(way))
    report.header("way", "seconds", f"speed / {BASELINE}", "CPU seconds", "peak memory, MB")
    for way in commands:
        found = [one for one in report.samples if one.get("way") == way]
        seconds, cpu = (statistics.median(one[key] for one in found) for key in ("seconds", "cpu"))
        peak = max(one["peak"] for one in found) / 2**20
        report.row(
            way, f"{seconds:.2f}", f"{speed(report.samples, way, BASELINE):.2f}", f"{cpu:.2f}", f"{peak:.0f}"
        )


def make_lines(folder: Path, lines: int) -> Path:
    """Write random base64 lines of 4 to 5.6 kB, the size of 112 x 112 JPEG images, and read them once."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for index in range(FILES):
        with (folder / f"{index}.txt").open("wb") as file:
            for _ in range(lines * index // FILES, lines * (index + 1) // FILES):
                data = rng.bytes(int(rng.integers(4000, 5600)))
                file.write(base64.b64encode(data) + b"\t%d\n" % rng.integers(0, 85742))
    (folder / "file_list.txt").write_text("".join(f"{index}.txt\n" for index in range(FILES)))
    return folder


def run_command(command: str) -> dict[str, Any]:
    """Run a command; return seconds, CPU seconds and the peak resident memory of all its processes."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "LC_ALL": "C"}
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
        with contextlib.suppress(OSError):
            total += status("VmRSS", pid)
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return total


def check(parts: Path) -> None:
    """Check the output of plsc: a way that writes nothing is fast."""
    manifest = json.loads((parts / "manifest.json").read_text())
    sizes = [(parts / part["name"]).stat().st_size for part in manifest["parts"]]
    if sizes != [part["size"] for part in manifest["parts"]] or len(sizes) != PARTS:
        raise SystemExit(f"plsc wrote {sizes}")


def main() -> None:
    """Run the chosen comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("load", "partition"))
    parser.add_argument("folder", type=Path, help="for results and temporary files")
    parser.add_argument("--sources", nargs="+", choices=list(SOURCES), default=["jpeg"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few images or lines")
    options = parser.parse_args()
    report = Report(options.folder, "data")
    report.keep(**machine(2, "cpu"))
    act = compare_loaders if options.what == "load" else compare_partitions
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        act(options, Path(folder), report)


if __name__ == "__main__":
    main()
