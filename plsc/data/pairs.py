"""Verification pairs in the pickled ``(bins, issame_list)`` form of LFW, CFP-FP and AgeDB.

``bins`` holds 2P encoded images, pair p being images 2p and 2p + 1; ``issame_list`` holds P flags.
The form is that of insightface's ``.bin`` files, written by Python 2 or 3 at any pickle protocol.
"""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.plain_pickle import PlainArray, load_plain
from plsc.errors import DataError
from plsc.storage.publish import replacing


@dataclass(frozen=True)
class PairSet:
    """P pairs of encoded images: ``images`` has 2P entries, ``is_same`` is bool [P]."""

    images: list[bytes]
    is_same: np.ndarray

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.is_same)


def read_pairs(path: str | os.PathLike[str]) -> PairSet:
    """Read a pair file; nothing in it is executed, whoever wrote it.

    Raises:
        DataError: the file is missing, empty, truncated, not a pair file, or asks for an object that
            a pair file never needs, which the text names.
    """
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a file; expected a pickled (images, is_same) pair file")
        if status.st_size == 0:
            raise DataError(f"{path} is empty; expected a pickled (images, is_same) pair file")
        with path.open("rb") as file:
            value = load_plain(file, status.st_size, str(path))
    except OSError as error:
        raise DataError(f"cannot read pair file {path}: {error.strerror or error}") from error
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise DataError(f"{path} holds {_kind(value)}; expected a pair of lists (images, is_same)")
    return _checked(value[0], value[1], str(path))


def write_pairs(
    path: str | os.PathLike[str], images: Sequence[bytes], is_same: Sequence[bool] | np.ndarray
) -> None:
    """Write a pair file that insightface, and ``pickle.load`` of any Python 3, read.

    The file appears whole or not at all.

    Raises:
        DataError: the images are not twice as many as the flags, or the file cannot be written.
    """
    pairs = _checked(list(images), np.asarray(is_same).tolist(), f"the pairs for {path}")
    with replacing(path) as temporary, temporary.open("wb") as file:
        pickle.dump((pairs.images, pairs.is_same.tolist()), file, protocol=4)


def _checked(bins: Any, flags: Any, name: str) -> PairSet:
    if not isinstance(bins, (list, tuple)):
        raise DataError(f"{name}: the images are {_kind(bins)}; expected a list of encoded images")
    images = [_image_bytes(image, index, name) for index, image in enumerate(bins)]
    is_same = _flags(flags, name)
    if len(images) != 2 * len(is_same):
        raise DataError(
            f"{name} holds {len(images)} images for {len(is_same)} pairs; "
            f"expected {2 * len(is_same)}, two for each pair"
        )
    if not images:
        raise DataError(f"{name} holds no pairs")
    return PairSet(images, is_same)


def _image_bytes(image: Any, index: int, name: str) -> bytes:
    if isinstance(image, PlainArray) and image.dtype == np.uint8:
        image = image.data
    if not isinstance(image, bytes):
        raise DataError(
            f"image {index} of {name} is {_kind(image)}; expected encoded bytes or a uint8 array"
        )
    if not image:
        raise DataError(f"image {index} of {name} is empty")
    return image


def _flags(flags: Any, name: str) -> np.ndarray:
    if isinstance(flags, PlainArray):
        flags = np.frombuffer(flags.data, flags.dtype).tolist()
    if not isinstance(flags, (list, tuple)):
        raise DataError(f"{name}: is_same is {_kind(flags)}; expected a list of booleans")
    for index, flag in enumerate(flags):
        if not isinstance(flag, int) or flag not in (0, 1):
            value = flag if isinstance(flag, int) and abs(flag) < 1 << 64 else _kind(flag)
            raise DataError(f"{name}: is_same[{index}] is {value}; expected True or False")
    return np.array(flags, dtype=bool)


def _kind(value: Any) -> str:
    if isinstance(value, PlainArray):
        return f"an array of {value.dtype}"
    if isinstance(value, (list, tuple, bytes, str)):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__.lstrip('_')}"
