"""Read a file of five landmarks per image, as detectors write it, and find the landmarks of images in it."""

from __future__ import annotations

import hashlib
import os
from array import array
from typing import BinaryIO

import numpy as np

from plsc.data.alignment import TEMPLATE, Face
from plsc.data.files import PathTable, name_key
from plsc.data.sources.index_store import load_or_build
from plsc.errors import DataError
from plsc.storage.blocks import streamed, text_lines
from plsc.storage.urls import base_name, shown

_EXPECTED = "expected '<path> x1 y1 x2 y2 x3 y3 x4 y4 x5 y5 [score]'"
_MAX_LINE_BYTES = 8192
_MOST_HEADERS = 2  # as in CelebA: the number of images, and the names of the columns
_MOST = 1e6  # pixels
_WORST_FIT = 0.7  # of the median face; a profile fits with 0.87, swapped eyes and mouth corners with 0.23


class Landmarks:
    """The landmarks of the images at `paths`, by index; memory-mapped, so processes share them.

    The file at `location` has lines ``path x1 y1 x2 y2 x3 y3 x4 y4 x5 y5 [score]``, with the points of
    `plsc.data.alignment.TEMPLATE` in pixels. Up to two header lines are ignored, as in CelebA's
    list_landmarks; IJB's name_5pts_score.txt has this format too. Raises DataError if it is missing, or a
    line is invalid; the message names the line.
    """

    def __init__(self, location: str, paths: PathTable) -> None:
        self.location = location
        index = load_or_build([self.location], "landmarks-2", self._read)
        self._points, keys = index["points"], index["keys"]
        wanted = np.frombuffer(b"".join(_key(paths[one]) for one in range(len(paths))), np.int64)
        rows = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        self._rows = np.where(keys[rows] == wanted, rows, -1)

    def missing(self) -> np.ndarray:
        """Return the indices of the images without landmarks, int64 [n]."""
        return np.flatnonzero(self._rows < 0)

    def face(self, index: int, image: bytes) -> Face:
        """Return the face in an image. Raises DataError if the image has no landmarks."""
        row = self._rows[index]
        if row < 0:
            raise DataError(f"the image has no line in {shown(self.location)}; add it", kind="landmarks")
        return Face(image, tuple((x, y) for x, y in self._points[row].tolist()))

    def _read(self) -> dict[str, np.ndarray]:
        name = base_name(shown(self.location))
        with streamed(self.location) as file:
            keys, numbers, points = _parse_file(file, name)
        _check_fit(points, name)
        order = np.argsort(keys, kind="stable")
        repeated = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        if len(repeated):
            first, second = numbers[order[repeated[0]]], numbers[order[repeated[0] + 1]]
            raise DataError(
                f"{name}:{second}: the image has another line already, {name}:{first}; remove one of them"
            )
        return {"keys": keys[order], "points": points[order]}


def _key(path: bytes) -> bytes:
    """Return 8 bytes that represent a path; two of ten million are equal with a probability of 3e-6."""
    path = os.fsencode(name_key(os.fsdecode(path.removeprefix(b"./"))))
    return hashlib.blake2b(path, digest_size=8).digest()


def _parse_file(file: BinaryIO, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each line, the key and the line number, int64 [n], and the points, float32 [n, 5, 2]."""
    keys, numbers, points = bytearray(), array("q"), array("f")
    for number, _, line in text_lines(file, name, _MAX_LINE_BYTES):
        line = line.strip()
        if not line or (number <= _MOST_HEADERS and not keys and _is_header(line)):
            continue
        try:
            path, values = _parse(line)
        except ValueError as problem:
            raise DataError(f"{name}:{number}: {_EXPECTED}; {problem}") from None
        keys += _key(path)
        numbers.append(number)
        points.extend(values)
    found = np.frombuffer(points, np.float32).reshape(-1, 5, 2)
    return np.frombuffer(keys, np.int64), np.frombuffer(numbers, np.int64), found


def _is_header(line: bytes) -> bool:
    words = line.split()
    return (len(words) == 1 and words[0].isdigit()) or not any(map(_is_number, words))


def _is_number(word: bytes) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _parse(line: bytes) -> tuple[bytes, list[float]]:
    """Return the path, which may contain blanks, and ten numbers. Raises ValueError for a wrong line."""
    fields = line.rsplit(None, 11)
    if len(fields) < 12 or not _is_number(fields[1]):  # without a score
        fields = line.rsplit(None, 10)
    values = [float(word) for word in fields[1:11]]
    if len(values) < 10 or not all(abs(value) <= _MOST for value in values):  # also NaN
        raise ValueError("a coordinate is missing, not finite, or over a million pixels")
    return fields[0], values


def _check_fit(points: np.ndarray, name: str) -> None:
    """Raise DataError if most lines do not look like faces, as in another order, or there are none."""
    z, w = ((one - one.mean(axis=-2, keepdims=True)) @ [1, 1j] for one in (points, TEMPLATE))
    size = np.sqrt((np.abs(z) ** 2).sum(axis=1) * (np.abs(w) ** 2).sum())
    # Of equal points it is 0; `align` names their image.
    fit = np.abs((z.conj() * w).sum(axis=1)) / np.maximum(size, 1e-9)
    if not len(fit) or np.median(fit) < _WORST_FIT:
        raise DataError(
            f"the landmarks in {name} are none, or do not look like faces; expected x1 y1 to x5 y5 of left "
            "eye, right eye, nose, left and right corner of the mouth, as seen in the image"
        )
