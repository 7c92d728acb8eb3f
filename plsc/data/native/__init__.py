"""The C library of the data tools (the .c files in this folder), built with the package.

Each function has a reference implementation in Python, which is used if the library is missing. To build the
library in a source checkout, run ``python setup.py build_ext --inplace``.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from ctypes import c_char_p, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

_ABI = 11  # PLSC_DATA_ABI of native.h
_LIBRARY = Path(__file__).with_name("libdata.so")


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None if it is missing or of another version."""
    try:
        loaded = ctypes.CDLL(str(_LIBRARY))
        abi = loaded.plsc_data_abi()
    except (OSError, AttributeError):
        return None
    return loaded if abi == _ABI else None


@functools.cache
def function(name: str, argument_types: tuple[Any, ...]) -> Any:
    """Return a function of the library, which returns an int64; None if the library is missing."""
    loaded = library()
    if loaded is None:
        return None
    found = getattr(loaded, name)
    found.argtypes, found.restype = argument_types, ctypes.c_int64
    return found


_FIND = (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p)
_READ = (c_void_p, c_int64, c_int64, c_void_p, *[c_int64] * 3, *[c_void_p] * 6)


def find_newlines(data: np.ndarray) -> np.ndarray | None:
    """Return the positions of newlines in uint8 data, int64; None if the library is missing."""
    call = function("plsc_find_newlines", _FIND)
    if call is None:
        return None
    found, following = np.empty(4096, np.int64), np.zeros(1, np.int64)
    pieces = [np.empty(0, np.int64)]
    while following[0] < len(data):
        place = (found.ctypes.data, len(found), following.ctypes.data)
        count = call(data.ctypes.data, int(following[0]), len(data), *place)
        pieces.append(found[:count].copy())
    return np.concatenate(pieces)


def read_lines(
    data: np.ndarray, begin: int, newlines: np.ndarray, first_number: int, longest: int
) -> tuple[np.ndarray, int] | None:
    """Return (int64 [5, n]: starts, ends, tabs, labels, numbers; how many tabs are -1), or None.

    Raises ValueError if the newlines are not ascending positions in the data.
    """
    call = function("plsc_read_lines", _READ)
    if call is None:
        return None
    newlines = np.ascontiguousarray(newlines, dtype=np.int64)
    rows, suspects = np.empty((5, len(newlines)), np.int64), np.empty(1, np.int64)
    places = [rows.ctypes.data + row * rows.strides[0] for row in range(5)]
    what = (newlines.ctypes.data, len(newlines), first_number, longest)
    kept = call(data.ctypes.data, len(data), begin, *what, *places, suspects.ctypes.data)
    if kept < 0:
        raise ValueError(f"the line ends are not ascending positions within {len(data)} bytes")
    return rows[:, :kept], int(suspects[0])


_BUFFER = (c_void_p, c_int64, c_void_p)
_BUFFER_BYTES = 2**20
_memory = threading.local()  # a buffer per thread: allocating a new one costs more than the call


def read_files(
    folder: bytes, text: np.ndarray, ends: np.ndarray, chosen: np.ndarray, may_leave: bool = False
) -> Iterator[bytes | None]:
    """Yield the bytes of chosen files below a folder, many files per call.

    None stands for a file that cannot be read this way: missing, empty, not a regular file, larger than the
    buffer, a link that leaves the folder (unless `may_leave`), or the library is missing. The caller then
    reads it in Python, which reports the error.

    text: uint8, all paths; ends: int64 [paths + 1], from 0, end of each path in it; chosen: int64 [n].
    """
    call = function(
        "plsc_read_files", (c_char_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, *_BUFFER)
    )
    table = (folder, may_leave, text.ctypes.data, ends.ctypes.data, len(ends) - 1)
    return _read(call, table, (np.ascontiguousarray(chosen, np.int64),))


def read_ranges(descriptors: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> Iterator[bytes | None]:
    """Yield lengths[i] bytes at offsets[i] of the open file descriptors[i] (int32; -1: none), or None.

    The caller must keep the files open until the last value is yielded.
    """
    call = function("plsc_read_ranges", (c_void_p, c_void_p, c_void_p, c_int64, *_BUFFER))
    places = tuple(np.ascontiguousarray(array, np.int64) for array in (offsets, lengths))
    return _read(call, (), (np.ascontiguousarray(descriptors, np.int32), *places))


def move_blocks(descriptor: int, is_write: bool, numbers: np.ndarray, data: np.ndarray) -> None:
    """Read or write the blocks of an open file: data uint8 [n, size], block i at numbers[i] * size.

    One call for all blocks, which releases the interpreter lock once. Raises OSError.
    """
    size, numbers = data.shape[1], np.ascontiguousarray(numbers, np.int64)
    call = function("plsc_move_blocks", (c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p))
    if call is not None:
        status = call(descriptor, is_write, numbers.ctypes.data, len(numbers), size, data.ctypes.data)
        if status:
            raise OSError(-status, os.strerror(-status))
        return
    for number, row in zip(numbers.tolist(), data, strict=True):
        move_bytes(os.pwritev if is_write else os.preadv, descriptor, row, number * size)


def move_bytes(call: Callable[..., int], descriptor: int, data: np.ndarray, offset: int) -> None:
    """Read (os.preadv) or write (os.pwritev) all bytes of a contiguous array. Raises OSError."""
    left = data.reshape(-1).view(np.uint8).data
    while left.nbytes:
        moved = call(descriptor, [left], offset)  # one call may move fewer bytes
        if not moved:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        left, offset = left[moved:], offset + moved


def _read(call: Any, table: tuple[Any, ...], wanted: tuple[np.ndarray, ...]) -> Iterator[bytes | None]:
    count = len(wanted[0])
    if call is None:
        yield from [None] * count
        return
    if not hasattr(_memory, "buffer"):
        _memory.buffer = np.empty(_BUFFER_BYTES, np.uint8)
    buffer, sizes = _memory.buffer, np.empty(count, np.int64)
    done = 0
    while done < count:
        places = [array[done:].ctypes.data for array in wanted]
        room = (buffer.ctypes.data, len(buffer), sizes.ctypes.data)
        more = call(*table, *places, count - done, *room)
        # Copy all of it now: before the next value is requested, the buffer may be reused.
        found: list[bytes | None] = []
        position = 0
        for size in sizes[:more].tolist():
            found.append(bytes(buffer.data[position : position + size]) if size >= 0 else None)
            position += max(size, 0)
        yield from found
        done += more


_SMALLEST_CRC = 4096  # bytes; below, zlib is faster


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return zlib's CRC-32 of contiguous bytes; `value` is the CRC of the preceding bytes.

    Several times faster on processors with carry-less multiplication, and releases the interpreter lock.
    """
    view = memoryview(data)
    if view.nbytes < _SMALLEST_CRC:
        return zlib.crc32(view, value)
    view = view.cast("B")
    blocks = len(view) - len(view) % 16
    found = crc32_rows(np.frombuffer(view[:blocks], np.uint8)[None], value)
    return zlib.crc32(view[blocks:], int(found[0]))


def crc32_rows(data: np.ndarray, value: int = 0) -> np.ndarray:
    """Return `crc32` of each row of contiguous uint8 [n, size], uint32 [n]."""
    found = np.empty(len(data), np.uint32)
    call = function("plsc_crc32_rows", (c_void_p, c_int64, c_int64, c_uint32, c_void_p))
    if call is None or call(data.ctypes.data, *data.shape, value, found.ctypes.data) < 0:
        found[:] = [zlib.crc32(row, value) for row in data]
    return found
