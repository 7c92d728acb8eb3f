"""What it costs the loader to read the EXIF orientation of each JPEG: the same batches without reading it.

    python benchmarks/orientation.py

Images are 112x112, of about 5 kB, with and without EXIF data; larger ones take longer to decode, and the tag
takes the same time. Batches of 64 are read in turns by one process, and its processor time is taken, because
two runs of a whole loader differ by more than is measured. Prints the median of the ratios of 1,500 pairs.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from plsc.data import decode
from plsc.data.batch import BufferRing
from plsc.data.loader import BatchReader, Recipe
from plsc.data.sources import open_source

PAIRS, BATCH = 1500, 64


def make_images(folder: Path, has_exif: bool) -> None:
    """Write a dataset of smooth random images."""
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif.update(
        {271: "Camera", 272: "Model", 274: 1, 282: 72.0, 283: 72.0, 296: 2, 306: "2026:01:01 00:00:00"}
    )
    lines = []
    for index in range(BATCH):
        small = Image.fromarray(rng.integers(0, 255, (14, 14, 3), dtype=np.uint8))
        pixels = np.asarray(small.resize((112, 112), Image.Resampling.BICUBIC)).astype(int)
        image = Image.fromarray((pixels + rng.integers(-8, 8, pixels.shape)).clip(0, 255).astype(np.uint8))
        extra: dict[str, Any] = {"exif": exif.tobytes()} if has_exif else {}
        image.save(folder / f"{index}.jpg", quality=90, **extra)
        lines.append(f"{index}.jpg {index % 2}\n")
    (folder / "label.txt").write_text("".join(lines))


def _is_never_asked(data: bytes, frame: int) -> bool:
    return True


def measure(folder: Path) -> list[float]:
    """Return the ratios of the processor times with and without reading the tag."""
    reader, ring = (
        BatchReader(open_source(folder), Recipe((3, 112, 112), 0)),
        BufferRing(BATCH, (3, 112, 112)),
    )

    def read() -> int:
        start = time.thread_time_ns()
        reader.read((0, np.arange(BATCH)), ring)
        return time.thread_time_ns() - start

    def read_without() -> int:
        with mock.patch.object(decode, "_is_upright", _is_never_asked):
            return read()

    ratios = []
    for _ in range(PAIRS):
        first_is_ours = random.random() < 0.5
        ours = read() if first_is_ours else 0
        without = read_without()
        ratios.append((ours or read()) / without)
    return ratios


def main() -> None:
    """Print a line for images with EXIF data, and one without."""
    for has_exif in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            make_images(Path(folder), has_exif)
            low, median, high = np.quantile(measure(Path(folder)), [0.25, 0.5, 0.75])
            kind = "with EXIF data" if has_exif else "without EXIF data"
            print(f"{kind}: {median - 1:+.1%} (quartiles {low - 1:+.1%}, {high - 1:+.1%})")


if __name__ == "__main__":
    main()
