"""Many small files, or ranges of open files, read by one call (files.c) into memory that is used again.

What comes is bytes; or None for what cannot be read so: missing, empty, no plain file, longer than the
memory, or there is no library. The plain way then reads it, or says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_char_p, c_int64, c_void_p
from typing import Any

import numpy as np

from plsc.data.native import function, kept_by_thread

BUFFER_BYTES = 2**20
_BUFFER = (c_void_p, c_int64, c_void_p)


_buffer = kept_by_thread(lambda: np.empty(BUFFER_BYTES, np.uint8))


def read_files(
    folder: bytes, text: np.ndarray, ends: np.ndarray, chosen: np.ndarray
) -> Iterator[bytes | None]:
    """Yield the bytes of the chosen files of a table of paths below a folder.

    text: uint8, all paths; ends: int64 [paths + 1], from 0, where each ends in it; chosen: int64 [n].
    """
    call = function(
        "plsc_read_files",
        (c_char_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, *_BUFFER),
    )
    table = (folder, len(folder), text.ctypes.data, ends.ctypes.data, len(ends) - 1)
    return _read(call, table, (np.ascontiguousarray(chosen, np.int64),))


def read_ranges(
    descriptors: np.ndarray, offsets: np.ndarray, lengths: np.ndarray
) -> Iterator[bytes | None]:
    """Yield lengths[i] bytes at offsets[i] of the open file descriptors[i] (int32; -1: none).

    The caller keeps the files open until the last value has come.
    """
    call = function("plsc_read_ranges", (c_void_p, c_void_p, c_void_p, c_int64, *_BUFFER))
    places = tuple(np.ascontiguousarray(array, np.int64) for array in (offsets, lengths))
    return _read(call, (), (np.ascontiguousarray(descriptors, np.int32), *places))


def _read(
    call: Any, table: tuple[Any, ...], wanted: tuple[np.ndarray, ...]
) -> Iterator[bytes | None]:
    count = len(wanted[0])
    if call is None:
        yield from [None] * count
        return
    buffer, sizes = _buffer(), np.empty(count, np.int64)
    done = 0
    while done < count:
        places = [array[done:].ctypes.data for array in wanted]
        room = (buffer.ctypes.data, len(buffer), sizes.ctypes.data)
        more = call(*table, *places, count - done, *room)
        # All of it at once: before the next value is asked for, the buffer may be in other use.
        yield from _cut(buffer, sizes[:more].tolist())
        done += more


def _cut(buffer: np.ndarray, sizes: list[int]) -> list[bytes | None]:
    view, position = buffer.data, 0
    found: list[bytes | None] = []
    for size in sizes:
        found.append(bytes(view[position : position + size]) if size >= 0 else None)
        position += max(size, 0)
    return found
