"""Samples of tar archives, found by C (tar.c) as long as they are usual."""

from __future__ import annotations

from ctypes import c_char_p, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np

from plsc.data.native import function, kept_by_thread

MOST_SAMPLES = 4096  # of one call
IS_JSON = -2
_COLUMNS = 7  # of tar.c


@dataclass(frozen=True)
class FoundSamples:
    """Samples in a piece of an archive, int64 [n] each.

    offsets, lengths: of the images, in the archive. key and text starts and lengths: of the samples' names
    and labels, in the piece. numbers: the labels that are whole numbers; -1 for other texts; `IS_JSON` for
    one that is in a JSON. position: where the first sample that was not found begins, in the piece; ended:
    whether only for want of more of the archive, or because there are `MOST_SAMPLES`.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    key_starts: np.ndarray
    key_lengths: np.ndarray
    text_starts: np.ndarray
    text_lengths: np.ndarray
    numbers: np.ndarray
    position: int
    ended: bool

    def __len__(self) -> int:
        return len(self.offsets)


_columns = kept_by_thread(lambda: np.empty((_COLUMNS, MOST_SAMPLES), np.int64))


def find_tar_samples(
    piece: bytes, offset: int, size: int, image: str, label: str
) -> FoundSamples | None:
    """Find samples in the piece at `offset` of an archive of `size` bytes; None where there is no library.

    image: the suffix of the images, or nothing for any that images have; label: that of the labels.
    """
    call = function(
        "plsc_tar_samples",
        (c_char_p, c_int64, c_int64, c_int64, c_char_p, c_char_p, c_int64, c_void_p, c_void_p),
    )
    if call is None:
        return None
    columns, state = _columns(), np.empty(2, np.int64)
    room = (MOST_SAMPLES, columns.ctypes.data, state.ctypes.data)
    count = call(piece, len(piece), offset, size, image.encode(), label.encode(), *room)
    return FoundSamples(*columns[:, :count].copy(), *state.tolist())
