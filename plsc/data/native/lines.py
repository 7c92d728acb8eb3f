"""Calls of lines.c: arrays in, arrays out. `plsc.data.lines` says what they must return."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from plsc.data.native import library

_ROOM = 4096  # newlines that one call finds

_pointer, _long = ctypes.c_void_p, ctypes.c_int64
_out = ctypes.POINTER(ctypes.c_int64)


@functools.cache
def functions() -> tuple[Callable[..., int], Callable[..., int]] | None:
    """Return (plsc_find_newlines, plsc_read_lines), None where there is no library."""
    loaded = library()
    if loaded is None:
        return None
    find, read = loaded.plsc_find_newlines, loaded.plsc_read_lines
    find.argtypes = [_pointer, _long, _long, _pointer, _long, _out]
    read.argtypes = [_pointer, _long, _long, _pointer, *[_long] * 3, *[_pointer] * 5, _out]
    find.restype = read.restype = _long
    return find, read


class _Scratch(threading.local):
    """Room for what one call finds, for each thread."""

    def __init__(self) -> None:
        self.found = np.empty(_ROOM, dtype=np.int64)
        self.next = ctypes.c_int64()


_scratch = _Scratch()


def find_newlines(find: Callable[..., int], data: np.ndarray) -> np.ndarray:
    """Return the positions of the newlines in uint8 data, int64."""
    found, following = _scratch.found, _scratch.next
    address, end = data.ctypes.data, len(data)
    pieces, begin = [], 0
    while begin < end:
        count = find(address, begin, end, found.ctypes.data, _ROOM, following)
        pieces.append(found[:count].copy())
        begin = following.value
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def read_lines(
    read: Callable[..., int],
    data: np.ndarray,
    begin: int,
    newlines: np.ndarray,
    first_number: int,
    longest: int,
) -> tuple[Any, int]:
    """Return (int64 [5, n]: starts, ends, tabs, labels, numbers; how many tabs are -1).

    Raises ValueError if the newlines are not places in the data in rising order.
    """
    count = len(newlines)
    newlines = np.ascontiguousarray(newlines, dtype=np.int64)
    rows = np.empty((5, count), dtype=np.int64)
    suspects = ctypes.c_int64()
    address, step = rows.ctypes.data, 8 * count
    kept = read(
        data.ctypes.data, len(data), begin, newlines.ctypes.data, count, first_number, longest,
        *range(address, address + 5 * step, step) if count else [address] * 5, suspects,
    )  # fmt: skip
    if kept < 0:
        raise ValueError(f"the ends of lines do not rise within {len(data)} bytes")
    return rows[:, :kept], suspects.value
