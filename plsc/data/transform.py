"""Run a user's transform on training images, with random numbers seeded per sample."""

from __future__ import annotations

import inspect
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from plsc.data.augment import Operation
from plsc.data.decode import check_normalised
from plsc.errors import DataError, naming
from plsc.seeds import hash_key

Transform = Callable[..., Any]
"""``f(tensor [C, H, W]) -> tensor``, as in torchvision.transforms.v2, or ``f(image=array)["image"]`` with
arrays [H, W, C], as in albumentations."""


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
            result = _call(transform, pixels, key)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())
            raise DataError(
                f"the transform raised {type(error).__name__}: {text} ({where.filename}:{where.lineno})"
            ) from error
    return _checked(result, (pixels.shape[2], *pixels.shape[:2]))


def takes_image_by_name(transform: Transform) -> bool:
    """Return whether a callable expects ``image=``: it is of albumentations, or requires that argument.

    A function ``f(image)``, which accepts both, gets a tensor.
    """
    if any(kind.__module__.split(".")[0] == "albumentations" for kind in type(transform).__mro__):
        return True
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):  # no signature: written in C
        return False
    is_positional = any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
    return not is_positional and any(p.name == "image" or p.kind is p.VAR_KEYWORD for p in parameters)


def _call(transform: Transform, pixels: np.ndarray, key: int) -> Any:
    if not takes_image_by_name(transform):
        return transform(torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C")))
    if hasattr(transform, "set_random_seed"):  # albumentations has its own generators
        transform.set_random_seed(key % 2**32)
    image = transform(image=pixels.copy())["image"]
    if isinstance(image, np.ndarray):
        image = image[:, :, None] if image.ndim == 2 else image
        image = torch.from_numpy(np.array(image.transpose(2, 0, 1), order="C"))
    return image


def _checked(result: Any, shape: tuple[int, ...]) -> torch.Tensor:
    found = tuple(getattr(result, "shape", ())), getattr(result, "dtype", None)
    is_tensor = isinstance(result, torch.Tensor) and (
        result.dtype == torch.uint8 or result.is_floating_point()
    )
    if not is_tensor or found[0] != shape:
        raise DataError(
            f"the transform must return a tensor {shape} of uint8 or floats, not {type(result).__name__} "
            f"{found}"
        )
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
