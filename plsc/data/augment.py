"""Augmentation: each operation draws from (seed, epoch, sample, operation), never from shared state.

To add one: give it a number in ``Operation`` that is never reused, write a function of the image and a
uniform draw, and call it from ``augment``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

from plsc.data.isolated import IsolatedRandom
from plsc.errors import DataError
from plsc.keys import hash_key, uniform

Transform = Callable[[torch.Tensor], Any]


class Operation(IntEnum):
    """The operations that draw random numbers; a number is part of what a seed means."""

    TRANSFORM = 0
    FLIP = 1


def flip_horizontally(image: torch.Tensor, draw: float) -> torch.Tensor:
    """Mirror half of the images: those whose ``draw`` from [0, 1) is below 0.5."""
    return image.flip(-1) if draw < 0.5 else image


def augment(image: torch.Tensor, *, seed: int, epoch: int, sample: int, flip: bool) -> torch.Tensor:
    """Return the augmented image [C, H, W], same dtype and shape."""
    if flip:
        image = flip_horizontally(image, uniform(seed, epoch, sample, Operation.FLIP))
    return image


def apply_transform(
    transform: Transform, image: torch.Tensor, *, seed: int, epoch: int, sample: int
) -> torch.Tensor:
    """Run a user's transform with torch, ``random`` and numpy seeded for this sample.

    It gets the image [C, H, W] and must return one of the same shape, uint8 or float (float is taken
    as already normalised). Raises DataError otherwise.
    """
    key = hash_key(seed, epoch, sample, Operation.TRANSFORM)
    with IsolatedRandom(key).active():
        result = transform(image)
    if not isinstance(result, torch.Tensor):
        raise DataError(f"the transform must return a tensor, it gave {type(result).__name__}")
    if result.shape != image.shape:
        raise DataError(
            f"the transform must keep the shape {tuple(image.shape)}, it gave {tuple(result.shape)}"
        )
    if result.dtype == torch.uint8:
        return result.as_subclass(torch.Tensor)
    if not result.is_floating_point():
        raise DataError(f"the transform must return uint8 or floats, it gave {result.dtype}")
    if not bool(torch.isfinite(result).all()):
        raise DataError("the transform returned NaN or infinite values")
    return result.as_subclass(torch.Tensor).float()
