"""Find images that are the same, or nearly: neighbours by embedding, compared pixel by pixel.

Images are near duplicates if they agree as well as an image and its copy, cropped, scaled, brightened and
saved again as JPEG: as the 10 % quantile of such copies of the dataset's own images.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image as PillowImage
from PIL import ImageEnhance

from plsc.clean.faults import Found, distinct, pairs_in
from plsc.data.decode import decode_image
from plsc.data.overview import in_threads
from plsc.data.sources import Source
from plsc.errors import naming

_SIDE, _NEAR, _COPIES, _PAIRS = 32, 5, 1000, 4096
_PLAIN = 8  # levels of gray: an image with fewer agrees with no copy


@dataclass(frozen=True)
class Pixels:
    """N images in gray, uint8 [N, 32, 32], and the first 8 bytes of the SHA-256 of each file, uint64 [N]."""

    gray: np.ndarray
    digests: np.ndarray


def read_pixels(source: Source, numbers: np.ndarray) -> Pixels:
    """Read images of a source, numbers: int64 [N], with a thread per processor; DataError names a bad one."""
    gray, digests = np.zeros((len(numbers), _SIDE, _SIDE), np.uint8), np.zeros(len(numbers), np.uint64)

    def read(row: int) -> None:
        number = numbers.item(row)
        with naming(source.name, number):
            data, _ = source[number]
            assert isinstance(data, bytes)  # `read_listing` has refused other datasets than files
            gray[row] = decode_image(data, (1, _SIDE, _SIDE))[0].numpy()
        digests[row] = int.from_bytes(hashlib.sha256(data).digest()[:8], "little")

    deque(in_threads(read, range(len(numbers))), 0)
    return Pixels(gray, digests)


def agreement(one: np.ndarray, other: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the highest correlation, over all cyclic shifts, of pairs of images, float [n].

    one, other: the images, uint8 [N, 32, 32]. pairs: numbers in `one` and in `other`, int64 [n, 2].
    """
    found = np.empty(len(pairs))
    for first in range(0, len(pairs), _PAIRS):
        rows = slice(first, first + _PAIRS)
        mine, theirs = _spectra(one[pairs[rows, 0]]), _spectra(other[pairs[rows, 1]])
        found[rows] = np.fft.irfft2(mine * theirs.conj(), s=one.shape[1:]).max((1, 2))
    return found


def _spectra(gray: np.ndarray) -> np.ndarray:
    pixels = gray.astype(np.float32)
    pixels -= pixels.mean((1, 2), keepdims=True)
    pixels /= np.maximum(np.linalg.norm(pixels, axis=(1, 2), keepdims=True), 1e-3)
    return np.fft.rfft2(pixels)


def find_duplicates(near: Sequence[np.ndarray], pixels: Pixels, copies: np.ndarray) -> Found:
    """Return pairs of images that are duplicates.

    near: the nearest images by view, `Labels.near`. copies: the agreement of images with their copies
    (`planted_copies`).
    """
    order = np.argsort(pixels.digests, kind="stable")
    is_same = np.diff(pixels.digests[order]) == 0
    pairs = [np.stack([order[:-1], order[1:]], 1)[is_same]]
    pairs += [pairs_in(numbers[:, : _NEAR + 1]) for numbers in near]
    return agreeing(pixels, pixels, distinct(pairs), copies)


def agreeing(one: Pixels, other: Pixels, pairs: np.ndarray, copies: np.ndarray) -> Found:
    """Return those of the pairs, int64 [n, 2], that agree as nine in ten copies do, or are the same file."""
    first, second = pairs.T
    scores = agreement(one.gray, other.gray, pairs)
    scores[one.digests[first] == other.digests[second]] = 1
    enough = np.quantile(copies, 0.1) if len(copies) else 1
    order = np.argsort(-scores, kind="stable")[: (scores >= enough).sum()]
    return Found(np.minimum(scores[order], 1), pairs[order])


def planted_copies(source: Source, numbers: np.ndarray, pixels: Pixels) -> np.ndarray:
    """Return the agreement of images with their copies, for up to 1,000 random images of several colours."""
    rng = np.random.default_rng(5)
    rows = rng.permutation(np.flatnonzero(np.ptp(pixels.gray, (1, 2)) >= _PLAIN))[:_COPIES]
    copies = [_copy(source, numbers.item(row), rng) for row in rows]
    gray = np.array(copies, np.uint8).reshape(-1, _SIDE, _SIDE)
    return agreement(pixels.gray, gray, np.stack([rows, np.arange(len(rows))], 1))


def _copy(source: Source, number: int, rng: np.random.Generator) -> np.ndarray:
    """Return the gray pixels of a copy: up to 1 % cropped, 50 to 100 % of the size, brighter, as JPEG."""
    data, _ = source[number]
    pixels = decode_image(data, (3, 256, 256)).permute(1, 2, 0).contiguous().numpy()
    left, top, right, bottom = (rng.uniform(0, 0.01, 4) * 256).round().astype(int).tolist()
    picture = PillowImage.fromarray(pixels).crop((left, top, 256 - right, 256 - bottom))
    side = int(rng.uniform(0.5, 1) * 256)
    picture = ImageEnhance.Brightness(picture.resize((side, side))).enhance(rng.uniform(0.9, 1.1))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=int(rng.integers(60, 96)))
    return decode_image(file.getvalue(), (1, _SIDE, _SIDE))[0].numpy()
