"""Describe a dataset: samples, classes, sizes and broken samples; small pictures of samples."""

from __future__ import annotations

import concurrent.futures
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from PIL import Image as PillowImage

from plsc.data.decode import decode_whole
from plsc.data.sources import Source
from plsc.errors import DataError, in_terminal, naming
from plsc.machine import usable_cores
from plsc.seeds import hash_key

_T = TypeVar("_T")
_MOST_TOLD = 20


@dataclass
class Overview:
    """A summary of a dataset. Bytes and pixels are those of the samples that were decoded.

    Attributes:
        images_per_class: (lowest number, highest, number of classes in this range), by powers of 2.
        unused: number of class ids below the largest label without a sample.
        faults: names and faults of the first 20 broken samples.
    """

    samples: int
    classes: int
    largest_label: int
    unused: int
    fewest: int
    median: float
    most: int
    images_per_class: list[tuple[int, int, int]]
    checked: int = 0
    bytes_median: float = 0
    bytes_most: int = 0
    pixels: list[tuple[str, int]] = field(default_factory=list)
    broken: int = 0
    faults: list[str] = field(default_factory=list)

    def render(self) -> str:
        """Return the summary as lines of text."""
        lines = [
            f"samples          {self.samples}",
            f"classes          {self.classes} (largest label {self.largest_label}, "
            f"{self.unused} labels without samples)",
            f"images per class {self.fewest} to {self.most}, median {self.median:g}",
            "  images per class    classes",
        ]
        widest = max((count for _, _, count in self.images_per_class), default=1)
        for low, high, count in self.images_per_class:
            span = f"{low}" if low == high else f"{low}-{high}"
            lines.append(f"  {span:>16} {count:>10} {'#' * max(1, round(40 * count / widest))}")
        lines.append(
            f"encoded bytes    median {self.bytes_median:g}, largest {self.bytes_most} "
            f"(of {self.checked} samples checked)"
        )
        sizes = ", ".join(f"{size}: {count}" for size, count in self.pixels)
        lines.append(f"pixels           {sizes or 'none'}")
        lines.append(f"broken           {self.broken} of {self.checked} checked")
        lines += [f"  {fault}" for fault in self.faults]
        return in_terminal("\n".join(lines))  # names of files may have control characters


def inspect_dataset(source: Source, *, checked: int = 10_000, seed: int = 0) -> Overview:
    """Return a summary of a dataset. All labels are counted; `checked` random samples are decoded.

    checked: 0 decodes all of them. Decoding uses as many threads as there are processors.
    """
    labels = source.labels()
    ids, counts = np.unique(labels, return_counts=True)
    powers = np.floor(np.log2(counts)).astype(int)
    found = Overview(
        samples=len(labels),
        classes=len(ids),
        largest_label=int(ids[-1]),
        unused=int(ids[-1]) + 1 - int((ids >= 0).sum()),
        fewest=int(counts.min()),
        median=float(np.median(counts)),
        most=int(counts.max()),
        images_per_class=[
            (2**power, 2 ** (power + 1) - 1, int((powers == power).sum()))
            for power in np.unique(powers).tolist()
        ],
    )
    _decode_some(source, draw_indices(len(labels), checked, seed), found)
    return found


def draw_indices(total: int, wanted: int, seed: int) -> np.ndarray:
    """Return `wanted` random distinct numbers below `total`, ascending; all if `wanted` is 0 or too large."""
    if wanted <= 0 or wanted >= total:
        return np.arange(total)
    numbers = np.random.default_rng(hash_key(seed, total))
    return np.sort(numbers.choice(total, wanted, replace=False))


def _decode_some(source: Source, indices: np.ndarray, found: Overview) -> None:
    sizes: list[int] = []
    pixels: Counter[str] = Counter()

    def check(index: int) -> tuple[int, str] | DataError:
        try:
            data, _ = source[index]  # an error names the sample
            with naming(source.name, index):
                height, width = decode_whole(data).shape[1:]
        except DataError as error:
            return error
        return len(data) if isinstance(data, bytes) else 0, f"{width}x{height}"

    for result in in_threads(check, indices.tolist()):
        if isinstance(result, DataError):
            found.broken += 1
            if len(found.faults) < _MOST_TOLD:
                found.faults.append(str(result))
        else:
            sizes.append(result[0])
            pixels[result[1]] += 1
    found.checked = len(indices)
    found.bytes_median = float(np.median(sizes)) if sizes else 0
    found.bytes_most = max(sizes, default=0)
    found.pixels = pixels.most_common(5)


def in_threads(function: Callable[[int], _T], numbers: Sequence[int]) -> Iterator[_T]:
    """Yield the result of the function for each number, in this order, with at most eight threads.

    Each may have an image of a GiB.
    """
    with concurrent.futures.ThreadPoolExecutor(min(8, usable_cores())) as threads:
        for start in range(0, len(numbers), 1000):  # bounds the number of waiting results
            yield from threads.map(function, numbers[start : start + 1000])


def thumbnail(source: Source, index: int, side: int) -> PillowImage.Image | None:
    """Return a sample, resized to fit a square of `side` pixels, in RGB; None if it is broken."""
    try:
        data, _ = source[index]
        pixels = decode_whole(data)
    except DataError:
        return None
    if pixels.is_floating_point():  # normalised by the user: stretch to the range of the image
        low, high = float(pixels.min()), float(pixels.max())
        pixels = ((pixels - low) * (255 / max(high - low, 1e-9))).byte()
    picture = PillowImage.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    scale = side / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, PillowImage.Resampling.BILINEAR)
