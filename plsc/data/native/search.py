"""Lines of mapped files, found, checked and summed by C (search.c) as long as they are usual."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from plsc.data.native import library

MOST_LINES = 8192  # of one call

_pointer, _long = ctypes.c_void_p, ctypes.c_int64


class _Search(ctypes.Structure):
    _fields_ = [
        ("data", _pointer),
        *((name, _long) for name in ("position", "line", "end", "longest")),
        ("checksum", ctypes.c_uint64),
        ("blanks", _long),
        *((name, _pointer) for name in ("starts", "ends")),
        *((name, _long) for name in ("count", "room")),
    ]


@dataclass(frozen=True)
class FoundLines:
    """Some lines: starts and ends in the data, line ends excluded, int64 [n].

    blanks: lines left out before and between them. checksum: what the bytes that were searched for them add
    to that of the file.
    """

    starts: np.ndarray
    ends: np.ndarray
    blanks: int
    checksum: int


class UnusualLine(Exception):
    """The plain reader must see the lines: one may be bad, or the file was cut short."""


@functools.cache
def functions() -> ctypes.CDLL | None:
    """Return the library with the types of its functions said, None where there is none."""
    loaded = library()
    if loaded is not None:
        loaded.plsc_search_lines.argtypes = [ctypes.POINTER(_Search), _pointer]
        loaded.plsc_search_lines.restype = ctypes.c_int32
        loaded.plsc_populate.argtypes = [_pointer, _long]
        loaded.plsc_populate.restype = None
    return loaded


def search_lines(
    native: ctypes.CDLL, data: np.ndarray, begin: int, end: int, longest: int, factors: np.ndarray
) -> Iterator[FoundLines]:
    """Yield the lines of data[begin:end] (uint8, mapped), some at a time.

    A line begins at `begin`, and none goes on behind `end`. longest: bytes that a line may have. factors:
    those of the checksum. Raises UnusualLine.
    """
    if not 0 <= begin <= end <= len(data):
        raise ValueError(f"[{begin}, {end}) is not in {len(data)} bytes")
    native.plsc_populate(data.ctypes.data + begin, end - begin)
    rows = np.empty((2, MOST_LINES), dtype=np.int64)
    state = _Search(
        data.ctypes.data, begin, begin, end, longest, 0, 0, rows[0].ctypes.data, rows[1].ctypes.data
    )
    state.room = MOST_LINES
    while state.position < end or state.line < end:
        state.count = state.blanks = state.checksum = 0
        if not native.plsc_search_lines(state, factors.ctypes.data):
            raise UnusualLine
        starts, ends = rows[:, : state.count].copy()
        yield FoundLines(starts, ends, state.blanks, state.checksum)
