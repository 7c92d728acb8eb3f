"""Speed of loading images from disk into batches: plsc, and Pillow in a PyTorch DataLoader.

    python benchmarks/loader.py                     JPEG files: plsc, Pillow in a DataLoader, only decoding
    python benchmarks/loader.py --sources jpeg rec  other formats as well, only with plsc
    python benchmarks/loader.py --train             a training step with the loader and with data in memory

The script creates 112x112 JPEG images of about 5 kB. Each round runs every way once over all images; the
order changes from round to round. The table shows medians over the rounds, and medians of each round's ratio.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from plsc.data.augment import Augmentation
from plsc.data.batch import Batch
from plsc.data.loader import Recipe, SourceLoader
from plsc.data.order import BatchPlan
from plsc.data.sources import open_source
from plsc.data.sources.base import Source
from plsc.data.writers import writer_of

BATCH = 128
SIZE = 112
SHAPE = (3, SIZE, SIZE)
RIVAL = "Pillow, DataLoader, 2 processes"
RAW = "decoding alone, 2 threads"


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


def write_files(folder: Path, pictures: list[bytes]) -> Source:
    """Write a folder with label.txt, and open it."""
    (folder / "images").mkdir(parents=True)
    lines = []
    for index, data in enumerate(pictures):
        (folder / f"images/{index}.jpg").write_bytes(data)
        lines.append(f"images/{index}.jpg {index % 100}\n")
    (folder / "label.txt").write_text("".join(lines))
    return open_source(folder)


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
    "parquet": write_as(".parquet"),
    "tar": write_as(".tar"),
}


class PillowDataset(Dataset[Any]):
    """A typical Dataset: open a file with Pillow, flip it, and normalise it as a float tensor."""

    def __init__(self, folder: Path, count: int) -> None:
        from torchvision import transforms

        self.paths = [str(folder / f"images/{index}.jpg") for index in range(count)]
        self.transform = transforms.Compose(
            [
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize([0.5] * 3, [0.5] * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.paths[index]) as picture:
            return self.transform(picture.convert("RGB")), index % 100


def read_with_pillow(folder: Path, count: int, workers: int) -> Callable[[], int]:
    """Return a way: an epoch of the DataLoader, whose processes are already running."""
    loader = DataLoader(
        PillowDataset(folder, count),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda: sum(len(labels) for _, labels in loader)


def decode_alone(pictures: list[bytes], threads: int) -> Callable[[], int]:
    """Return a way: only simplejpeg, on bytes in memory."""
    from simplejpeg import decode_jpeg

    def decode(part: list[bytes]) -> None:
        for data in part:
            decode_jpeg(data)

    def run() -> int:
        workers = [
            threading.Thread(target=decode, args=(pictures[first::threads],)) for first in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return len(pictures)

    return run


def read_with_plsc(
    source: Source, threads: int, to_floats: bool = False, flip: bool = True
) -> Callable[[], int]:
    """Return a way: an epoch of the loader of plsc. to_floats: also convert batches to input on the CPU."""
    loader = make_loader(source, threads, flip)
    epochs = iter(range(10**6))

    def run() -> int:
        count = 0
        for batch in loader.epoch(next(epochs)):
            count += len(batch)
            if to_floats:
                batch.input("cpu")
        return count

    return run


def make_loader(source: Source, threads: int, flip: bool = True) -> SourceLoader:
    """Return the loader of plsc with its default settings."""
    plan = BatchPlan(len(source), BATCH, 1, seed=0, last_batch="keep")
    recipe = Recipe(SHAPE, seed=0, augmentation=Augmentation(flip=flip))
    return SourceLoader(source, plan, 0, recipe, num_workers=threads)


def take_turns(ways: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Return the images per second of each way in each round, after a warm-up round."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            count = ways[name]()
            if turn:
                rates[name].append(count / (time.perf_counter() - began))
    return rates


def show(rates: dict[str, list[float]], baselines: list[str]) -> list[dict[str, Any]]:
    """Print a table; return its rows."""
    rows = []
    print("| way | images/s |" + "".join(f" x {name} |" for name in baselines))
    print("|---|---|" + "---|" * len(baselines))
    for name, found in rates.items():
        ratios = [
            statistics.median(a / b for a, b in zip(found, rates[base], strict=True)) for base in baselines
        ]
        rate = statistics.median(found)
        print(f"| {name} | {rate:,.0f} |" + "".join(f" {ratio:.2f} |" for ratio in ratios))
        rows.append({"way": name, "images_per_second": rate, **dict(zip(baselines, ratios, strict=True))})
    return rows


def compare_loaders(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run all ways on image files, and plsc on the other sources."""
    pictures = make_pictures(arguments.images)
    sizes = [len(data) for data in pictures]
    print(f"{len(pictures)} JPEGs of {statistics.mean(sizes):.0f} bytes, batch {BATCH}")
    ways: dict[str, Callable[[], int]] = {}
    sources = {name: SOURCES[name](folder / name, pictures) for name in arguments.sources}
    for name, source in sources.items():
        for threads in (1, 2):
            ways[f"plsc, {name}, {threads} thread{'s' * (threads > 1)}"] = read_with_plsc(source, threads)
    if "jpeg" in sources:
        ways["plsc, jpeg, 2 threads, no flip"] = read_with_plsc(sources["jpeg"], 2, flip=False)
        ways["plsc, jpeg, 2 threads, floats"] = read_with_plsc(sources["jpeg"], 2, to_floats=True)
        ways[RIVAL] = read_with_pillow(folder / "jpeg", len(pictures), 2)
    ways[RAW] = decode_alone(pictures, 2)
    baselines = [name for name in (RIVAL, RAW) if name in ways]
    return show(take_turns(ways, arguments.rounds), baselines)


def compare_training(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Time training steps with batches from the loader and from memory, in turn."""
    from plsc.models import build_model

    torch.manual_seed(0)
    device = torch.device(arguments.device)
    source = write_files(folder / "train", make_pictures(arguments.images))
    network = build_model(arguments.model, 512, SHAPE).to(device).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    pixels = torch.randint(0, 256, (arguments.batch, *SHAPE), dtype=torch.uint8)
    kept = Batch(pixels, torch.zeros(arguments.batch, dtype=torch.int64), [])

    def step(batch: Batch) -> None:
        labels = batch.labels.to(device)
        loss = network(batch.input(device), labels, True).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    plan = BatchPlan(len(source), arguments.batch, 1, seed=0, last_batch="drop")
    loader = SourceLoader(source, plan, 0, Recipe(SHAPE, 0), num_workers=2, pin_memory=device.type == "cuda")
    batches = endless(loader)
    floating = {
        "data in memory": lambda: step(kept),
        "plsc, jpeg, 2 threads": lambda: step(next(batches)),
    }

    def many(way: Callable[[], None]) -> Callable[[], int]:
        def run() -> int:
            for _ in range(arguments.steps):
                way()
            return arguments.steps * arguments.batch

        return run

    rates = take_turns({name: many(way) for name, way in floating.items()}, arguments.rounds)
    return show(rates, ["data in memory"])


def endless(loader: SourceLoader) -> Iterator[Any]:
    """Yield the batches of all epochs."""
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


def main() -> int:
    """Run the chosen comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sources", nargs="+", choices=list(SOURCES), default=["jpeg"])
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", action="store_true", help="compare training steps instead")
    parser.add_argument("--model", default="ResNet50")
    parser.add_argument("--batch", type=int, default=16, help="batch size of a training step")
    parser.add_argument("--steps", type=int, default=2, help="training steps per round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    compare = compare_training if arguments.train else compare_loaders
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(arguments, Path(folder))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
