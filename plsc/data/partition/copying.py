"""Copies lines into a file in a new order, and sums the file on the way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plsc.data.native import partition as native
from plsc.data.native.partition import CopyError, LinePlaces
from plsc.data.partition.checksum import checksum, factors
from plsc.data.partition.files import write_all

_CHUNK_BYTES = 2**18  # written at once: put together, summed and written while it is in the cache


def copy_lines(
    lines: LinePlaces, order: np.ndarray, handle: int, offset: int, direct: int = -1
) -> int:
    """Write the lines `order` (int64), each closed by a newline, to an open file from `offset` on.

    direct: a handle of the same file that passes the system's cache by, -1 if there is none; what may be
    written so then is. Returns what they add to the file's checksum. Raises CopyError for a line that is not
    where it should be, OSError if the file cannot be written.
    """
    library = native.functions()
    if library is not None:
        return native.copy_lines(library, lines, order, handle, offset, factors(), direct)
    return copy_lines_plainly(lines, order, handle, offset)


def copy_lines_plainly(lines: LinePlaces, order: np.ndarray, handle: int, offset: int) -> int:
    """Do the same without the library."""
    total, waiting, size = 0, [], 0
    for line in order.tolist():
        for piece in pieces_of(lines, line):
            waiting.append(piece)
            size += len(piece)
            if size >= _CHUNK_BYTES:
                total += put(handle, b"".join(waiting), offset)
                offset, waiting, size = offset + size, [], 0
    return (total + put(handle, b"".join(waiting), offset)) % 2**64


def pieces_of(lines: LinePlaces, line: int) -> Iterator[bytes]:
    """Yield a line and its newline, in pieces of at most _CHUNK_BYTES."""
    start, length = int(lines.starts[line]), int(lines.lengths[line])
    memory = lines.memories[0 if lines.files is None else lines.files[line]]
    if start < 0 or length < 0 or start + length > len(memory):
        raise CopyError(line)
    for at in range(start, start + length, _CHUNK_BYTES):
        yield memory[at : min(at + _CHUNK_BYTES, start + length)].tobytes()
    yield b"\n"


def put(handle: int, data: bytes, offset: int) -> int:
    """Write data at `offset`; return what they add to the checksum. A full disk raises OSError."""
    write_all(handle, memoryview(data), offset)
    return checksum(data, offset)
