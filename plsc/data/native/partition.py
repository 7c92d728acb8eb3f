"""Calls of copying.c and buckets.c: arrays in, arrays out. `plsc.data.partition` says what they must do."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from plsc.data.native import library

_DONE, _NO_MEMORY, _CANNOT_WRITE = range(3)  # others: the line could not be read

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Lines(ctypes.Structure):
    _fields_ = [
        ("memories", _pointer),
        ("sizes", _pointer),
        ("memory_count", _long),
        ("files", _pointer),
        ("starts", _pointer),
        ("lengths", _pointer),
        ("count", _long),
    ]


class _Outcome(ctypes.Structure):
    _fields_ = [("checksum", ctypes.c_uint64), ("line", _long), ("status", _int), ("error", _int)]


@functools.cache
def functions() -> ctypes.CDLL | None:
    """Return the library with the types of its functions said, None where there is none."""
    loaded = library()
    if loaded is None:
        return None
    lines, outcome = ctypes.POINTER(_Lines), ctypes.POINTER(_Outcome)
    signatures = {
        "checksum": ([_pointer, _long, _long, _pointer], ctypes.c_uint64),
        "copy_lines": ([lines, _pointer, _long, _int, _int, _long, _pointer, outcome], None),
        "sort_to_buckets": (
            [_pointer, _pointer, _long, ctypes.c_uint64, _int, _int, *[_pointer] * 3],
            _int,
        ),
        "write_frames": ([lines, *[_pointer] * 3, _long, _pointer, _pointer, outcome], None),
        "read_frames": ([_pointer, _long, _long, *[_pointer] * 3], _long),
        "catch_truncation": ([_int], None),
        "start_writeback": ([_int, _long, _long], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(loaded, f"plsc_{name}")
        function.argtypes, function.restype = arguments, result
    return loaded


class CopyError(Exception):
    """Line `line` is not where it should be."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is not where it was")
        self.line = line


class LinePlaces:
    """Where lines lie: line i in memories[files[i]] (uint8), in the only one without `files` (int32 [n]).

    starts, lengths: int64 [n], newline excluded. All arrays are contiguous.
    """

    def __init__(
        self,
        starts: np.ndarray,
        lengths: np.ndarray,
        memories: Sequence[np.ndarray],
        files: np.ndarray | None = None,
    ) -> None:
        self.starts = starts
        self.lengths = lengths
        self.memories = memories
        self.files = files
        self._addresses = np.array([one.ctypes.data for one in memories], dtype=np.uintp)
        self._sizes = np.array([len(one) for one in memories], dtype=np.int64)

    def structure(self) -> _Lines:
        """Return the C structure; it refers to the arrays of this object."""
        return _Lines(
            self._addresses.ctypes.data,
            self._sizes.ctypes.data,
            len(self.memories),
            None if self.files is None else self.files.ctypes.data,
            self.starts.ctypes.data,
            self.lengths.ctypes.data,
            len(self.starts),
        )


def checksum(native: ctypes.CDLL, data: np.ndarray, offset: int, factors: np.ndarray) -> int:
    """Return what contiguous uint8 data at `offset` add to a file's checksum."""
    total: int = native.plsc_checksum(data.ctypes.data, len(data), offset, factors.ctypes.data)
    return total


def copy_lines(
    native: ctypes.CDLL,
    lines: LinePlaces,
    order: np.ndarray,
    handle: int,
    offset: int,
    factors: np.ndarray,
    direct: int = -1,
) -> int:
    """Write the lines `order` (int64) to a file from `offset` on; return what they add to its checksum.

    direct: a handle of the same file that passes the system's cache by, -1 if there is none. Raises OSError
    if the file cannot be written, CopyError if a line cannot be read.
    """
    outcome = _Outcome()
    order = np.ascontiguousarray(order)
    native.plsc_copy_lines(
        lines.structure(), order.ctypes.data, len(order), handle, direct, offset,
        factors.ctypes.data, outcome,
    )  # fmt: skip
    _raise_failure(outcome)
    return int(outcome.checksum)


def sort_to_buckets(
    native: ctypes.CDLL, numbers: np.ndarray, lengths: np.ndarray, key: int, above: int, bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (lines in the order of their buckets, each bucket's lines, and their bytes), int64."""
    order = np.empty(len(numbers), dtype=np.int64)
    counts, sizes = np.empty((2, 2**bits), dtype=np.int64)
    is_done = native.plsc_sort_to_buckets(
        numbers.ctypes.data, lengths.ctypes.data, len(numbers), key, above, bits,
        order.ctypes.data, counts.ctypes.data, sizes.ctypes.data,
    )  # fmt: skip
    if not is_done:
        raise ValueError(f"{bits} bits after {above} are none of a key")
    return order, counts, sizes


def write_frames(
    native: ctypes.CDLL,
    lines: LinePlaces,
    numbers: np.ndarray,
    order: np.ndarray,
    counts: np.ndarray,
    handles: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """Write a frame to each bucket (handles int32, offsets int64) that lines go to. Raises OSError."""
    outcome = _Outcome()
    native.plsc_write_frames(
        lines.structure(), numbers.ctypes.data, order.ctypes.data, counts.ctypes.data, len(counts),
        handles.ctypes.data, offsets.ctypes.data, outcome,
    )  # fmt: skip
    _raise_failure(outcome)


def read_frames(
    native: ctypes.CDLL, data: np.ndarray, lines: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return (numbers, starts, lengths without newline), int64 [lines]; None if data are not such frames."""
    rows = np.empty((3, lines), dtype=np.int64)
    found = native.plsc_read_frames(
        data.ctypes.data, len(data), lines, *(row.ctypes.data for row in rows)
    )
    return None if found != lines else (rows[0], rows[1], rows[2])


@contextmanager
def truncation_caught() -> Iterator[None]:
    """Have `copy_lines` raise CopyError for a mapped file that is cut short, which is SIGBUS without."""
    native = functions()
    if native is None:
        yield
        return
    native.plsc_catch_truncation(1)
    try:
        yield
    finally:
        native.plsc_catch_truncation(0)


def start_writeback(handle: int, offset: int, size: int) -> None:
    """Begin to bring bytes of a file to the disk, without waiting for them; a hint."""
    native = functions()
    if native is not None:
        native.plsc_start_writeback(handle, offset, size)


def _raise_failure(outcome: _Outcome) -> None:
    status = outcome.status
    if status == _NO_MEMORY:
        raise MemoryError
    if status == _CANNOT_WRITE:
        raise OSError(outcome.error, os.strerror(outcome.error))
    if status != _DONE:
        raise CopyError(outcome.line)
