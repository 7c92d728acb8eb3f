"""The files of the ranks, while they are written: who writes where, their sizes and checksums.

The checksum keeps up with copying and can be summed in any order. The file is taken as little-endian 64-bit
words, the last one filled with zeros. Word j counts ``word[j] * c(j)`` modulo 2**64, with odd factors
c(j) = splitmix64(j mod 32768) | 1 times splitmix64(j div 32768) | 1; the checksum is the sum. Changing one
word always changes it; other damage goes unnoticed with a chance of about 2**-60. It is no protection against
intent. (zlib.crc32 and sha256 would take longer than the shuffle.)

`plsc/data/native/copying.c` sums and copies where it is built, the plain functions here elsewhere.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc import seeds
from plsc.data.native import function
from plsc.data.order import splitmix64_of
from plsc.errors import DataError

_WORDS = 2**15
_CHUNK_BYTES = 2**18  # written at once: put together, summed and written while it is in the cache
_LINES_AT_ONCE = 2**14  # copied by one call; the progress bar moves in between
_MODULUS = 2**64
_FACTORS = splitmix64_of(np.arange(_WORDS, dtype=np.uint64)) | np.uint64(1)  # c(j) of the first words

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_CHECKSUM = ("plsc_checksum", (_pointer, _long, _long, _pointer))
_COPY = ("plsc_copy_lines", (*[_pointer] * 3, _long, _int, _long, *[_pointer] * 2))


def checksum(data: np.ndarray | bytes | bytearray | memoryview, offset: int = 0) -> int:
    """Return what the bytes that lie at `offset` of a file add to its checksum.

    The checksum of the file is the sum over its pieces modulo 2**64.
    """
    array = np.frombuffer(data, dtype=np.uint8)
    native = function(*_CHECKSUM)
    if native is None:
        return checksum_plainly(array, offset)
    total: int = native(array.ctypes.data, len(array), offset, _FACTORS.ctypes.data)
    return total % _MODULUS


def checksum_plainly(array: np.ndarray, offset: int) -> int:
    """Do the same, for uint8, without the library."""
    lead = offset % 8
    if lead or len(array) % 8:
        padded = np.zeros(-(-(lead + len(array)) // 8) * 8, dtype=np.uint8)
        padded[lead : lead + len(array)] = array
        array = padded
    words, first = array.view("<u8"), offset // 8
    total = done = 0
    while done < len(words):
        block, inside = divmod(first + done, _WORDS)
        count = min(_WORDS - inside, len(words) - done)
        product = np.dot(words[done : done + count], _FACTORS[inside : inside + count])
        total += int(product) * (seeds.splitmix64(block) | 1)
        done += count
    return total % _MODULUS


@dataclass(frozen=True)
class LinePlaces:
    """Where lines lie in memory: addresses and lengths, newline excluded, int64 [n].

    arrays: what holds the lines.
    """

    addresses: np.ndarray
    lengths: np.ndarray
    arrays: list[np.ndarray]

    @classmethod
    def within(cls, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> LinePlaces:
        """Return the places of lines that start at `starts` in data (uint8, contiguous)."""
        return cls(starts + data.ctypes.data, lengths, [data])


def map_file(path: str | Path, size: int, *, populates: bool = False) -> np.ndarray:
    """Return the first `size` bytes of a file, mapped, uint8. populates: all of them are read now.

    Raises OSError, and ValueError if the file is shorter. If it is cut short later, reading it is SIGBUS.
    """
    if size == 0:  # cannot be mapped
        return np.empty(0, dtype=np.uint8)
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populates else 0)
    with Path(path).open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), size, flags, mmap.PROT_READ), dtype=np.uint8)


def copy_lines(
    lines: LinePlaces, order: np.ndarray, handle: int, offset: int, *, is_summed: bool = True
) -> int:
    """Write the lines `order` (int64), each closed by a newline, to an open file from `offset` on.

    Returns what they add to the file's checksum, if `is_summed`. Raises OSError if they cannot be written.
    """
    native = function(*_COPY)
    if native is None:
        return copy_lines_plainly(lines, order, handle, offset)
    order = np.ascontiguousarray(order)
    total = ctypes.c_uint64()
    error = native(
        lines.addresses.ctypes.data, lines.lengths.ctypes.data, order.ctypes.data, len(order),
        handle, offset,
        _FACTORS.ctypes.data if is_summed else None, ctypes.byref(total),
    )  # fmt: skip
    if error:
        raise OSError(error, os.strerror(error))
    return total.value


def copy_lines_plainly(lines: LinePlaces, order: np.ndarray, handle: int, offset: int) -> int:
    """Do the same without the library."""
    total, waiting, size = 0, [], 0
    for line in order.tolist():
        address, length = int(lines.addresses[line]), int(lines.lengths[line])
        for begin in range(0, length, _CHUNK_BYTES):
            waiting.append(ctypes.string_at(address + begin, min(_CHUNK_BYTES, length - begin)))
            size += len(waiting[-1])
            if size >= _CHUNK_BYTES:
                total += put(handle, b"".join(waiting), offset)
                offset, waiting, size = offset + size, [], 0
        waiting.append(b"\n")
        size += 1
    return (total + put(handle, b"".join(waiting), offset)) % _MODULUS


def put(handle: int, data: bytes, offset: int) -> int:
    """Write data at `offset`; return what they add to the checksum. A full disk raises OSError."""
    view, at = memoryview(data), offset
    while len(view):
        count = os.pwrite(handle, view, at)
        view, at = view[count:], at + count
    return checksum(data, offset)


def read_exactly(handle: int, size: int, offset: int) -> bytes:
    """Return `size` bytes at `offset` of a file of our own. Raises DataError if they are not there."""
    data = os.pread(handle, size, offset)
    if len(data) < size:
        raise DataError("a temporary file was cut short while it was in use; start again")
    return data


@dataclass(frozen=True)
class Run:
    """Lines [begin, end) of those at hand go to a part, one after another, from byte `offset` on."""

    rank: int
    offset: int
    begin: int
    end: int


def part_names(nranks: int) -> list[str]:
    """Return the names of the parts: part_0.txt and so on, all as long as the last one's."""
    width = len(str(nranks - 1))
    return [f"part_{rank:0{width}d}.txt" for rank in range(nranks)]


class Parts:
    """One file per rank, each with `lines_each` lines. Several threads may write runs at once."""

    def __init__(self, folder: Path, nranks: int, lines_each: int, on_bytes: Callable[[int], object]) -> None:
        self.paths = [folder / name for name in part_names(nranks)]
        self.lines_each = lines_each
        self.sizes = [0] * nranks
        self.checksums = [0] * nranks
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    def claim(self, position: int, lengths: np.ndarray) -> list[Run]:
        """Return the runs for lines of these lengths (int64 [n], newline included) from `position` on.

        Calls must come in the order of the positions: a part's bytes are given out one after another.
        """
        ends = np.concatenate([[0], np.cumsum(lengths)])
        runs, begin = [], 0
        while begin < len(lengths):
            rank, inside = divmod(position + begin, self.lines_each)
            end = min(len(lengths), begin + self.lines_each - inside)
            runs.append(Run(rank, self.sizes[rank], begin, end))
            self.sizes[rank] += int(ends[end] - ends[begin])
            begin = end
        return runs

    def write(self, run: Run, lines: LinePlaces, order: np.ndarray) -> None:
        """Write a run of the lines at hand, which are `order` (int64) of `lines`. OSError if it cannot."""
        handle, offset = self._open(run.rank), run.offset
        try:
            for begin in range(run.begin, run.end, _LINES_AT_ONCE):
                some = order[begin : min(begin + _LINES_AT_ONCE, run.end)]
                size = int(lines.lengths[some].sum()) + len(some)
                self._add(run.rank, size, copy_lines(lines, some, handle, offset))
                offset += size
        finally:
            os.close(handle)

    def copy(self, run: Run, rank: int, offset: int, size: int) -> None:
        """Write a run of one line: `size` bytes from `offset` on in the part of `rank`, newline included."""
        with self.paths[rank].open("rb") as source:
            line = read_exactly(source.fileno(), size, offset)
        handle = self._open(run.rank)
        try:
            self._add(run.rank, size, put(handle, line, run.offset))
        finally:
            os.close(handle)

    def _open(self, rank: int) -> int:
        return os.open(self.paths[rank], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _add(self, rank: int, size: int, total: int) -> None:
        self._on_bytes(size)
        with self._lock:
            self.checksums[rank] = (self.checksums[rank] + total) % _MODULUS
