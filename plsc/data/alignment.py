"""Align faces by five landmarks to the template of ArcFace, and read files of landmarks.

The least-squares similarity transform (Umeyama 1991, without reflection) maps the landmarks to the template.
The pixels are interpolated once, bilinearly, from the upright image in its own size. Where the image is
shrunk, the value of a pixel is the mean over its area.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from PIL import Image as PillowImage

from plsc.data.files import PathTable, Shards, load_or_build, name_key
from plsc.errors import DataError
from plsc.storage.blocks import streamed, text_lines
from plsc.storage.urls import base_name, shown

TEMPLATE = np.array(
    [(38.2946, 51.6963), (73.5318, 51.5014), (56.0252, 71.7366), (41.5493, 92.3655), (70.7299, 92.2041)]
)
"""The landmarks (x, y) in an aligned image of 112x112, as published by insightface: left eye, right eye,
nose, left and right corner of the mouth, as seen in the image. Pixel centres have integer coordinates."""

ALIGNED_SIZE = (112, 112)
_LEAST_SPREAD = 0.5  # pixels; the landmarks of a face of about one pixel
_MOST_SAMPLES = 16  # per output pixel and axis: limits the memory for a huge face
_EXPECTED = "expected '<path> x1 y1 x2 y2 x3 y3 x4 y4 x5 y5 [score]'"
_MAX_LINE_BYTES = 8192
_MOST_HEADERS = 2  # as in CelebA: the number of images, and the names of the columns
_MOST = 1e6  # pixels
_WORST_FIT = 0.7  # of the median face; a profile fits with 0.87, swapped eyes and mouth corners with 0.23


@dataclass(frozen=True)
class Face:
    """An encoded image and the five landmarks (x, y) of the face in it, in pixels; decoding aligns it."""

    image: bytes
    landmarks: tuple[tuple[float, float], ...]  # hashable


def scaled_template(height: int, width: int) -> np.ndarray:
    """Return the template for an image of this size, float64 [5, 2].

    Squares of a multiple of 128: the template with a margin of 8 pixels on the left and right, scaled from
    128x128 (insightface's rule). Otherwise the template is scaled from 112 to the height, and centred
    horizontally: 112x96 gives SphereFace's template.
    """
    if height == width and height % 128 == 0:
        return (TEMPLATE + np.array([8, 0])) * (height / 128)
    ratio = height / 112
    return TEMPLATE * ratio + np.array([(width - 112 * ratio) / 2, 0])


def similarity(points: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the matrix [2, 3] of the similarity transform that maps `points` to `target` best, both [N, 2].

    It minimises the sum of squared distances over rotation, scale and translation, without reflection. Raises
    DataError if the points are equal, or if no such transform fits better than a constant.
    """
    centre, middle = points.mean(axis=0), target.mean(axis=0)
    p, q = (points - centre) @ [1, 1j], (target - middle) @ [1, 1j]
    size = max(np.vdot(p, p).real, 1e-9)
    factor = np.vdot(p, q) / size  # a complex number: scale and rotation
    is_face = size >= len(p) * _LEAST_SPREAD**2 and abs(factor) ** 2 * size >= 1e-3 * np.vdot(q, q).real
    if not is_face:  # also NaN
        raise DataError(
            f"the landmarks {points.round(3).tolist()} are equal, not in pixels, or not a face in order",
            kind="landmarks",
        )
    linear = np.array([[factor.real, -factor.imag], [factor.imag, factor.real]])
    return np.column_stack([linear, middle - linear @ centre])


def align(pixels: np.ndarray, landmarks: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the aligned face of an image [H, W, C], uint8, with 1 or 3 channels: uint8 [height, width, C].

    landmarks: [5, 2] as in `TEMPLATE`. Outside of the image the result is black. If the face is shrunk k
    times (rounded), each output pixel is the mean of k x k samples. Raises DataError if the landmarks are
    degenerate, or their centre is not in the image.
    """
    x, y = landmarks.mean(axis=0)
    if not (0 <= x < pixels.shape[1] and 0 <= y < pixels.shape[0]):
        raise DataError(
            f"the landmarks are around x={x:.0f}, y={y:.0f}, outside of the image", kind="landmarks"
        )
    # From here on pixel centres have coordinates of n + 0.5, as in Pillow.
    matrix = similarity(landmarks + 0.5, scaled_template(height, width) + 0.5)
    inverse = np.linalg.inv(matrix[:, :2])
    corners = (np.array([(0, 0), (width, 0), (0, height), (width, height)]) - matrix[:, 2]) @ inverse.T
    size = np.array([pixels.shape[1], pixels.shape[0]])
    left, top = np.clip(np.floor(corners.min(axis=0)).astype(int) - 2, 0, size - 1)
    right, bottom = np.clip(np.ceil(corners.max(axis=0)).astype(int) + 2, (left + 1, top + 1), size)
    part = np.ascontiguousarray(pixels[top:bottom, left:right])
    samples = int(np.clip(round(np.sqrt(abs(np.linalg.det(inverse)))), 1, _MOST_SAMPLES))
    offset = -inverse @ matrix[:, 2] - (left, top)
    picture = PillowImage.fromarray(part[:, :, 0] if part.shape[2] == 1 else part).transform(
        (width * samples, height * samples),
        PillowImage.Transform.AFFINE,
        np.column_stack([inverse / samples, offset]).ravel().tolist(),
        PillowImage.Resampling.BILINEAR,
    )
    aligned = np.asarray(picture.reduce(samples) if samples > 1 else picture)
    return aligned.reshape(height, width, pixels.shape[2])


# A file of landmarks, as detectors write it.


class Landmarks:
    """The landmarks of the images at `paths`, by index; memory-mapped, so processes share them.

    The file at `location` has lines ``path x1 y1 x2 y2 x3 y3 x4 y4 x5 y5 [score]``, with the points of
    `plsc.data.alignment.TEMPLATE` in pixels. Up to two header lines are ignored, as in CelebA's
    list_landmarks; IJB's name_5pts_score.txt has this format too. Raises DataError if it is missing, or a
    line is invalid; the message names the line.
    """

    def __init__(self, location: str, paths: PathTable) -> None:
        self.location = location
        index = load_or_build(Shards([self.location]), "landmarks-2", self._read)
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
        is_header = (line.isdigit() or not any(map(_is_number, line.split()))) and not keys
        if not line or (number <= _MOST_HEADERS and is_header):
            continue
        fields = line.rsplit(None, 11)  # the path may contain blanks
        if len(fields) < 12 or not _is_number(fields[1]):  # without a score
            fields = line.rsplit(None, 10)
        path, words = fields[0], fields[1:11]
        if len(words) < 10 or not all(_is_number(word) and abs(float(word)) <= _MOST for word in words):
            raise DataError(f"{name}:{number}: {_EXPECTED}, finite, in pixels")
        keys += _key(path)
        numbers.append(number)
        points.extend(map(float, words))
    found = np.frombuffer(points, np.float32).reshape(-1, 5, 2)
    return np.frombuffer(keys, np.int64), np.frombuffer(numbers, np.int64), found


def _is_number(word: bytes) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_fit(points: np.ndarray, name: str) -> None:
    """Raise DataError if most lines do not look like faces, as in another order, or there are none."""
    z, w = ((one - one.mean(axis=-2, keepdims=True)) @ [1, 1j] for one in (points, TEMPLATE))
    size = np.sqrt((np.abs(z) ** 2).sum(axis=1) * (np.abs(w) ** 2).sum())
    # Of equal points it is 0; `align` names their image.
    fit = np.abs((z.conj() * w).sum(axis=1)) / np.maximum(size, 1e-9)
    if not len(fit) or np.median(fit) < _WORST_FIT:
        raise DataError(
            f"the landmarks in {name} are none, or do not look like faces; expected left eye, right eye, "
            "nose, left and right corner of the mouth, as seen in the image"
        )
