"""Records of RecordIO files, found by C (records.c) as long as each is in one part."""

from __future__ import annotations

from ctypes import c_char_p, c_int64, c_void_p
from typing import NamedTuple

import numpy as np

from plsc.data.native import function

MOST_RECORDS = 8192  # of one call
_COLUMNS = 4  # of records.c


class FoundRecords(NamedTuple):
    """Records: places in the file, in bytes, flags and the images' bytes, int64 [n]; labels, float32 [n].

    position: where the first record that was not found begins, from the piece's start; ended: whether only
    for want of more of the file, or because there are `MOST_RECORDS`.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    flags: np.ndarray
    image_bytes: np.ndarray
    labels: np.ndarray
    position: int
    ended: bool


def find_records(piece: bytes, offset: int, size: int) -> FoundRecords | None:
    """Find records in the piece at `offset` of a file of `size` bytes; None where there is no library."""
    call = function(
        "plsc_records",
        (c_char_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p),
    )
    if call is None:
        return None
    most = min(MOST_RECORDS, len(piece) // 32 + 1)  # the least that a record takes
    columns, labels = np.empty((_COLUMNS, most), np.int64), np.empty(most, np.float32)
    state = np.empty(2, np.int64)
    room = (most, columns.ctypes.data, labels.ctypes.data, state.ctypes.data)
    count = call(piece, len(piece), offset, size, *room)
    arrays = [*columns[:, :count].copy(), labels[:count].copy()]
    return FoundRecords(*arrays, *state.tolist())
