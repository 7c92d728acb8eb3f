"""Augmentation. Random numbers depend only on (seed, epoch, sample, operation).

To add an operation: give it a new number in ``Operation``, add a field to ``Augmentation`` and to
``AugmentationArguments`` in plsc/config/data.py, write a function that changes pixels in place, and call it
from ``augment``.
"""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image as PillowImage
from PIL import ImageEnhance

from plsc.data.decode import check_normalised
from plsc.data.order import splitmix64_of
from plsc.errors import DataError, naming
from plsc.seeds import hash_key, splitmix64

_ERASED_AREA = (0.02, 0.2)
_ERASED_ASPECT = 3.3
_LOWEST_RESOLUTION = 0.25
_GREY = 127  # about 0 after normalisation
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images, applied in the order crop, resolution, colour, erasing, flip.

    crop_padding: pixels. colour_jitter: x of the factors in [1 - x, 1 + x] of brightness, contrast and
    saturation. low_resolution, random_erasing: shares of the images, 0 to 1.
    """

    flip: bool = True
    crop_padding: int = 0
    colour_jitter: tuple[float, ...] = (0.0, 0.0, 0.0)
    low_resolution: float = 0.0
    random_erasing: float = 0.0

    @property
    def needs_bytes(self) -> bool:
        """Whether an operation requires uint8 pixels."""
        return self.low_resolution > 0 or any(self.colour_jitter)

    @property
    def changes_pixels(self) -> bool:
        """Whether any operation but the flip is enabled."""
        return self.needs_bytes or self.crop_padding > 0 or self.random_erasing > 0


class Operation(IntEnum):
    """Operations that draw random numbers. The numbers are part of the seed; never change or reuse them."""

    TRANSFORM = 0
    FLIP = 1
    READ = 2
    CROP = 3
    LOW_RESOLUTION = 4
    COLOUR = 5
    ERASE = 6


@lru_cache(maxsize=16)
def _epoch_key(seed: int, epoch: int) -> int:
    return hash_key(seed, epoch)


class Draws:
    """The random numbers of one sample in one epoch."""

    def __init__(self, seed: int, epoch: int, sample: int) -> None:
        self._key = splitmix64(_epoch_key(seed, epoch) ^ (sample & _MASK))  # equals hash_key of all three

    def uniform(self, operation: Operation, number: int | None = None) -> float:
        """Return a number in [0, 1). number: index, for an operation that draws several."""
        key = splitmix64(self._key ^ operation)
        if number is not None:
            key = splitmix64(key ^ number)
        return (key >> 11) / 2**53


def are_mirrored(seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
    """Return which of `samples`, int64 [n], the flip mirrors in an epoch: bool [n]; half of them.

    Equal to ``Draws(seed, epoch, sample).uniform(Operation.FLIP) < 0.5``.
    """
    keys = splitmix64_of(samples.astype(np.uint64) ^ np.uint64(_epoch_key(seed, epoch)))
    return splitmix64_of(keys ^ np.uint64(Operation.FLIP)) < np.uint64(2**63)  # its highest bit


def augment(pixels: np.ndarray, augmentation: Augmentation, draws: Draws) -> None:
    """Augment one image [H, W, C] in place, without the flip: uint8, or normalised floats.

    `plsc.data.batch.to_input` does the flip afterwards, where the image is copied anyway. Raises DataError
    for floats if an operation requires uint8.
    """
    if pixels.dtype != np.uint8 and augmentation.needs_bytes:
        raise DataError("the image has float values, but colour and low-resolution augmentation need uint8")
    if augmentation.crop_padding:
        shift_randomly(pixels, augmentation.crop_padding, draws)
    if augmentation.needs_bytes:
        _change_picture(pixels, augmentation, draws)
    if augmentation.random_erasing and draws.uniform(Operation.ERASE) < augmentation.random_erasing:
        erase_rectangle(pixels, draws)


def shift_randomly(pixels: np.ndarray, padding: int, draws: Draws) -> None:
    """Shift an image randomly by up to `padding` pixels, with black borders, in place."""
    height, width = pixels.shape[:2]
    span = 2 * padding + 1
    down = min(int(draws.uniform(Operation.CROP, 0) * span), span - 1) - padding
    right = min(int(draws.uniform(Operation.CROP, 1) * span), span - 1) - padding
    source = pixels.copy()
    pixels[...] = 0 if pixels.dtype == np.uint8 else -127.5 / 128
    if abs(down) >= height or abs(right) >= width:
        return
    rows, columns = height - abs(down), width - abs(right)
    to_row, to_column = max(0, -down), max(0, -right)
    row, column = max(0, down), max(0, right)
    pixels[to_row : to_row + rows, to_column : to_column + columns] = source[
        row : row + rows, column : column + columns
    ]


def erase_rectangle(pixels: np.ndarray, draws: Draws) -> None:
    """Make a random rectangle grey, in place (random erasing: Zhong et al. 2017, arXiv:1708.04896)."""
    height, width = pixels.shape[:2]
    low, high = _ERASED_AREA
    area = (low + (high - low) * draws.uniform(Operation.ERASE, 0)) * height * width
    aspect = math.exp((2 * draws.uniform(Operation.ERASE, 1) - 1) * math.log(_ERASED_ASPECT))
    rows = min(height, max(1, round(math.sqrt(area * aspect))))
    columns = min(width, max(1, round(math.sqrt(area / aspect))))
    top = int(draws.uniform(Operation.ERASE, 2) * (height - rows + 1))
    left = int(draws.uniform(Operation.ERASE, 3) * (width - columns + 1))
    pixels[top : top + rows, left : left + columns] = _GREY if pixels.dtype == np.uint8 else 0


def _change_picture(pixels: np.ndarray, augmentation: Augmentation, draws: Draws) -> None:
    """Apply the operations of Pillow, with one conversion: resolution, then colours."""
    is_lowered = draws.uniform(Operation.LOW_RESOLUTION) < augmentation.low_resolution
    if not is_lowered and not any(augmentation.colour_jitter):
        return
    is_gray = pixels.shape[2] == 1
    picture = PillowImage.fromarray(pixels[:, :, 0] if is_gray else pixels)
    if is_lowered:
        share = _LOWEST_RESOLUTION + (1 - _LOWEST_RESOLUTION) * draws.uniform(Operation.LOW_RESOLUTION, 0)
        size = max(1, round(picture.width * share)), max(1, round(picture.height * share))
        bilinear = PillowImage.Resampling.BILINEAR
        picture = picture.resize(size, bilinear).resize(picture.size, bilinear)
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for number, (enhancer, strength) in enumerate(zip(enhancers, augmentation.colour_jitter, strict=True)):
        if strength:
            factor = 1 + strength * (2 * draws.uniform(Operation.COLOUR, number) - 1)
            picture = enhancer(picture).enhance(max(0.0, factor))
    changed = np.asarray(picture)
    np.copyto(pixels, changed[:, :, None] if is_gray else changed)


Transform = Callable[[torch.Tensor], Any]
"""``f(tensor [C, H, W]) -> tensor``, as in torchvision.transforms.v2."""


def apply_transform(
    transform: Transform, pixels: np.ndarray, *, seed: int, epoch: int, sample: int
) -> torch.Tensor:
    """Run a user's transform with torch, ``random`` and numpy seeded for this sample.

    pixels: [H, W, C], uint8 or float. The result [C, H, W] must have the same size, and be uint8 or float
    (taken as normalised). Raises DataError otherwise, and for exceptions of the transform.
    """
    key = hash_key(seed, epoch, sample, Operation.TRANSFORM)
    with IsolatedRandom(key).active():
        try:
            result = transform(torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C")))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())
            raise DataError(
                f"the transform raised {type(error).__name__}: {text} ({where.filename}:{where.lineno})"
            ) from error
    return _checked(result, (pixels.shape[2], *pixels.shape[:2]))


def _checked(result: Any, shape: tuple[int, ...]) -> torch.Tensor:
    found = tuple(getattr(result, "shape", ())), getattr(result, "dtype", None)
    is_tensor = isinstance(result, torch.Tensor) and (
        result.dtype == torch.uint8 or result.is_floating_point()
    )
    if not is_tensor or found[0] != shape:
        kind = type(result).__name__
        raise DataError(f"the transform must return a tensor {shape} of uint8 or floats, not {kind} {found}")
    result = result.as_subclass(torch.Tensor)  # torchvision returns a subclass
    if result.dtype == torch.uint8:
        return result
    with naming(str, "the result of the transform"):
        check_normalised(result)
    return result.float()


class IsolatedRandom:
    """A private random state for ``random``, ``numpy.random`` and torch's CPU generator.

    Inside ``active()`` the three global generators continue this state, seeded from ``key``; afterwards they
    are restored. User code that calls ``random.shuffle`` is then reproducible, and dropout in the main
    process is not affected.
    """

    def __init__(self, key: int) -> None:
        self._python = random.Random(key).getstate()
        self._numpy = np.random.RandomState(key % 2**32).get_state()
        self._torch = torch.Generator().manual_seed(key).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install the private state; restore the global one at the end, also after an exception."""
        outer = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        try:
            yield
        finally:
            self._python = random.getstate()
            self._numpy = np.random.get_state()
            self._torch = torch.get_rng_state()
            random.setstate(outer[0])
            np.random.set_state(outer[1])
            torch.set_rng_state(outer[2])
