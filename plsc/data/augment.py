"""The flip of training images, and the transform of the user.

Random numbers depend only on (seed, epoch, sample, operation).
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from plsc.data.decode import check_normalised
from plsc.data.order import splitmix64_of
from plsc.errors import DataError, naming
from plsc.seeds import hash_key


class Operation(IntEnum):
    """Operations that draw random numbers. The numbers are part of the seed; never change or reuse them."""

    TRANSFORM = 0
    FLIP = 1
    READ = 2


@lru_cache(maxsize=16)
def _epoch_key(seed: int, epoch: int) -> int:
    return hash_key(seed, epoch)


def are_mirrored(seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
    """Return which of `samples`, int64 [n], the flip mirrors in an epoch: bool [n]; half of them.

    Those for which the highest bit of ``hash_key(seed, epoch, sample, Operation.FLIP)`` is 0.
    """
    keys = splitmix64_of(samples.astype(np.uint64) ^ np.uint64(_epoch_key(seed, epoch)))
    return splitmix64_of(keys ^ np.uint64(Operation.FLIP)) < np.uint64(2**63)


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
