"""Reading and writing at a place of a file: all of it, or an error."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np

from plsc.errors import DataError


def read_exactly(handle: int, size: int, offset: int) -> bytes:
    """Return `size` bytes at `offset` of a file of our own. Raises DataError if they are not there."""
    data = os.pread(handle, size, offset)
    while len(data) < size:
        more = os.pread(handle, size - len(data), offset + len(data))
        if not more:
            raise DataError("a temporary file was cut short while it was in use; start again")
        data += more
    return data


def write_all(handle: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; a full disk raises OSError."""
    while len(data):
        count = os.pwrite(handle, data, offset)
        data, offset = data[count:], offset + count


def open_direct(path: Path) -> int:
    """Return a handle to write a file past the system's cache (O_DIRECT), -1 where that cannot be."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return -1
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag)
    except OSError:
        return -1


_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14: maps all pages at once, not one by one


def map_file(path: str | Path, size: int, is_wanted_now: bool = False) -> np.ndarray:
    """Return the first `size` bytes of a file, mapped, uint8. is_wanted_now: all of it is read before long.

    Raises OSError, and ValueError if the file is shorter. If it is cut short later, reading what is missing
    is SIGBUS (see plsc.data.native.partition.truncation_caught).
    """
    if size == 0:  # cannot be mapped
        return np.empty(0, dtype=np.uint8)
    with Path(path).open("rb") as file:
        if is_wanted_now:
            os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_WILLNEED)
        mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    if is_wanted_now:
        with contextlib.suppress(OSError):
            mapped.madvise(_POPULATE_READ)
    return np.frombuffer(mapped, dtype=np.uint8)
