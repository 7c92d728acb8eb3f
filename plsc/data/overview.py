"""Describe a dataset: samples, classes and broken samples; small pictures of samples."""

from __future__ import annotations

import concurrent.futures
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
    """A summary of a dataset.

    Attributes:
        unused: number of class ids below the largest label without a sample.
        fewest, median, most: images per class.
        checked: number of samples that were decoded.
        faults: names and faults of the first 20 broken samples.
    """

    samples: int
    classes: int
    largest_label: int
    unused: int
    fewest: int
    median: float
    most: int
    checked: int
    broken: int = 0
    faults: list[str] = field(default_factory=list)

    def render(self) -> str:
        """Return the summary as lines of text."""
        lines = [
            f"samples          {self.samples}",
            f"classes          {self.classes} (largest label {self.largest_label}, "
            f"{self.unused} labels without samples)",
            f"images per class {self.fewest} to {self.most}, median {self.median:g}",
            f"broken           {self.broken} of {self.checked} checked",
            *(f"  {fault}" for fault in self.faults),
        ]
        return in_terminal("\n".join(lines))  # names of files may have control characters


def inspect_dataset(source: Source, *, checked: int = 10_000, seed: int = 0) -> Overview:
    """Return a summary of a dataset. All labels are counted; `checked` random samples are decoded.

    checked: 0 decodes all of them. Decoding uses as many threads as there are processors.
    """
    labels = source.labels()
    ids, counts = np.unique(labels, return_counts=True)
    indices = draw_indices(len(labels), checked, seed)
    found = Overview(
        samples=len(labels),
        classes=len(ids),
        largest_label=int(ids[-1]),
        unused=int(ids[-1]) + 1 - int((ids >= 0).sum()),
        fewest=int(counts.min()),
        median=float(np.median(counts)),
        most=int(counts.max()),
        checked=len(indices),
    )

    def fault_of(index: int) -> str:
        try:
            data, _ = source[index]  # an error names the sample
            with naming(source.name, index):
                decode_whole(data)
        except DataError as error:
            return str(error)
        return ""

    for fault in filter(None, in_threads(fault_of, indices.tolist())):
        found.broken += 1
        if len(found.faults) < _MOST_TOLD:
            found.faults.append(fault)
    return found


def draw_indices(total: int, wanted: int, seed: int) -> np.ndarray:
    """Return `wanted` random distinct numbers below `total`, ascending; all if `wanted` is 0 or too large."""
    if wanted <= 0 or wanted >= total:
        return np.arange(total)
    numbers = np.random.default_rng(hash_key(seed, total))
    return np.sort(numbers.choice(total, wanted, replace=False))


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
