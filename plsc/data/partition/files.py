"""Reading and writing at a place of an open file: all of it, or an error."""

from __future__ import annotations

import os

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
