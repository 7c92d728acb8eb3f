"""The parts of the ranks: which line is at which position, and the files with their sizes and checksums.

The order is a pure function of the seed and the number of lines. Line i has the key
``plsc.seeds.hash_key(seed, i)``. For a fixed seed this is a bijection of 64-bit numbers, so keys are unique.
The shuffled order is the order of the keys. Rank r of R gets positions [rL, (r + 1)L), L = ceil(N / R).

The R L - N positions left at the end are padded with the first lines of a second shuffle, with the keys
``hash_key(seed, PADDING, i)``. All lines are equally likely, and none is repeated unless there are more
positions than lines; then the second shuffle is repeated.

The checksum is as fast as copying, and can be summed in any order. The file is read as little-endian 64-bit
words, the last one padded with zeros. Word j contributes ``word[j] * c(j)`` modulo 2**64, with odd factors
c(j) = splitmix64(j mod 32768) | 1 times splitmix64(j div 32768) | 1. Changing one word always changes the
checksum; other damage is missed with a probability of about 2**-60. It does not protect against intentional
changes. (zlib.crc32 and sha256 would take longer than the shuffle.)

`plsc/data/native/copying.c` does the summing and copying if it is built; the Python functions here if not.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.data.lines import anonymous
from plsc.data.native import function
from plsc.data.order import splitmix64_of
from plsc.errors import DataError
from plsc.seeds import hash_key, splitmix64

PADDING = 0x70616464696E67  # "padding"

_CHUNK = 2**18
_MANY = 2**21
_BINS = 2**16
_BIN_SHIFT = np.uint64(48)

_WORDS = 2**15
_CHUNK_BYTES = 2**18  # collected, summed and written at a time, while in the cache
_LINES_AT_ONCE = 2**14  # copied per call; the progress bar is updated in between
_MODULUS = 2**64
_FACTORS = splitmix64_of(np.arange(_WORDS, dtype=np.uint64)) | np.uint64(1)  # c(j) of the first words

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_CHECKSUM = ("plsc_checksum", (_pointer, _long, _long, _pointer))
_COPY = ("plsc_copy_lines", (*[_pointer] * 3, _long, _int, _long, *[_pointer] * 2))
_SPREAD = ("plsc_spread_lines", (*[_pointer] * 4, _long, *[_pointer] * 3, _long))


def line_keys(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return the keys of the lines with these numbers (from 0), uint64."""
    return splitmix64_of(numbers.astype(np.uint64) ^ np.uint64(hash_key(seed)))


def lines_per_rank(lines: int, nranks: int) -> int:
    """Return L, the number of lines per rank."""
    return -(-lines // nranks)


def rank_bounds(seed: int, lines: int, nranks: int) -> np.ndarray:
    """Return the lowest key of each rank but the first, uint64; ranks that only have padding get none.

    Computes the keys of all lines twice, in bounded memory: for a histogram, then for the bins in which ranks
    begin.
    """
    positions = np.arange(1, nranks) * lines_per_rank(lines, nranks)
    positions = positions[positions < lines]
    counts = np.zeros(_BINS, dtype=np.int64)
    for keys in _all_keys(seed, lines):
        counts += np.bincount((keys >> _BIN_SHIFT).astype(np.int64), minlength=_BINS)
    ends = np.cumsum(counts)
    bins = np.searchsorted(ends, positions, side="right")
    is_wanted = np.zeros(_BINS, dtype=bool)
    is_wanted[bins] = True
    found = [keys[is_wanted[keys >> _BIN_SHIFT]] for keys in _all_keys(seed, lines)]
    wanted = np.sort(np.concatenate(found))
    # Convert a position among all keys to one among the kept keys: subtract the bins left out before it.
    left_out = np.cumsum(np.where(is_wanted, 0, counts))
    return wanted[positions - left_out[bins]]


def _all_keys(seed: int, lines: int) -> Iterator[np.ndarray]:
    for begin in range(0, lines, _MANY):
        yield line_keys(seed, np.arange(begin, min(lines, begin + _MANY)))


def padding_lines(seed: int, lines: int, nranks: int) -> np.ndarray:
    """Return the numbers of the padding lines, in order, int64.

    The memory is proportional to nranks, independent of `lines`.
    """
    places = lines_per_rank(lines, nranks) * nranks - lines
    if places == 0:
        return np.empty(0, dtype=np.int64)
    base = np.uint64(hash_key(seed, PADDING))
    best_keys, best = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    for begin in range(0, lines, _CHUNK):
        numbers = np.arange(begin, min(lines, begin + _CHUNK))
        keys = np.concatenate([best_keys, splitmix64_of(numbers.astype(np.uint64) ^ base)])
        numbers = np.concatenate([best, numbers])
        if len(keys) > places:
            chosen = np.argpartition(keys, places - 1)[:places]
            keys, numbers = keys[chosen], numbers[chosen]
        best_keys, best = keys, numbers
    return np.resize(best[np.argsort(best_keys)], places)


def checksum(data: np.ndarray | bytes | bytearray | memoryview, offset: int = 0) -> int:
    """Return the contribution of the bytes at `offset` of a file to its checksum.

    The checksum of the file is the sum over its pieces modulo 2**64.
    """
    array = np.frombuffer(data, dtype=np.uint8)
    native = function(*_CHECKSUM)
    if native is None:
        return checksum_reference(array, offset)
    total: int = native(array.ctypes.data, len(array), offset, _FACTORS.ctypes.data)
    return total % _MODULUS


def checksum_reference(array: np.ndarray, offset: int) -> int:
    """Compute `checksum` for uint8 without the library (reference implementation)."""
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
        total += int(product) * (splitmix64(block) | 1)
        done += count
    return total % _MODULUS


@dataclass(frozen=True)
class LinePlaces:
    """Positions of lines in memory: addresses and lengths without newline, int64 [n].

    arrays: the arrays that contain the lines.
    """

    addresses: np.ndarray
    lengths: np.ndarray
    arrays: list[np.ndarray]

    @classmethod
    def within(cls, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> LinePlaces:
        """Return the places of lines that start at `starts` in data (uint8, contiguous)."""
        return cls(starts + data.ctypes.data, lengths, [data])


def copy_lines(lines: LinePlaces, order: np.ndarray, handle: int, offset: int) -> int:
    """Write the lines `order` (int64), each followed by a newline, to an open file from `offset`.

    Returns their contribution to the file's checksum. Raises OSError if writing fails.
    """
    native = function(*_COPY)
    if native is None:
        return copy_lines_reference(lines, order, handle, offset)
    order = np.ascontiguousarray(order)
    total = ctypes.c_uint64()
    _check(native(
        lines.addresses.ctypes.data, lines.lengths.ctypes.data, order.ctypes.data, len(order),
        handle, offset, _FACTORS.ctypes.data, ctypes.byref(total),
    ))  # fmt: skip
    return total.value


def spread_lines(
    lines: LinePlaces,
    order: np.ndarray,
    records: np.ndarray,
    counts: np.ndarray,
    handles: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """Write the lines `order` (int64) and their records [len(order)] to n pairs of open files, in one call.

    The next counts[i] (int64 [n]) records are written to handles[i, 0] (int32 [n, 2]) from byte offsets[i, 0]
    (int64 [n, 2]), and their lines, each followed by a newline, to handles[i, 1] from offsets[i, 1]. Raises
    OSError if writing fails.
    """
    native = function(*_SPREAD)
    if native is not None:
        arrays = (lines.addresses, lines.lengths, order, records)
        _check(native(
            *(array.ctypes.data for array in arrays), records.itemsize,
            counts.ctypes.data, handles.ctypes.data, offsets.ctypes.data, len(counts),
        ))  # fmt: skip
        return
    ends = np.cumsum(counts).tolist()
    for begin, end, pair, at in zip([0, *ends], ends, handles.tolist(), offsets.tolist(), strict=False):
        put(pair[0], records[begin:end].tobytes(), at[0])
        copy_lines_reference(lines, order[begin:end], pair[1], at[1])


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))


def copy_lines_reference(lines: LinePlaces, order: np.ndarray, handle: int, offset: int) -> int:
    """Do what `copy_lines` does, without the library (reference implementation)."""
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


def put(handle: int, data: bytes | memoryview, offset: int) -> int:
    """Write data at `offset`; return their contribution to the checksum. OSError if the disk is full."""
    view, at = memoryview(data), offset
    while len(view):
        count = os.pwrite(handle, view, at)
        view, at = view[count:], at + count
    return checksum(data, offset)


def read_exactly(handle: int, size: int, offset: int) -> np.ndarray:
    """Return `size` bytes at `offset` of a temporary file, uint8. Raises DataError if the file is shorter."""
    data = anonymous(size)
    if os.preadv(handle, [data.data], offset) < size:
        raise DataError("a temporary file was truncated while in use; start again")
    return data


@dataclass(frozen=True)
class Run:
    """Lines [begin, end) of the lines in memory, to be written consecutively to a part from byte `offset`."""

    rank: int
    offset: int
    begin: int
    end: int


def part_names(nranks: int, start: str | None = None) -> list[str]:
    """Return the names of the parts: part_0.txt, with numbers of equal width, or `start` and the rank."""
    if start is not None:
        return [f"{start}{rank}" for rank in range(nranks)]
    width = len(str(nranks - 1))
    return [f"part_{rank:0{width}d}.txt" for rank in range(nranks)]


class Parts:
    """One file per rank, each with `lines_each` lines. Threads may write runs concurrently."""

    def __init__(self, paths: list[Path], lines_each: int, on_bytes: Callable[[int], object]) -> None:
        self.paths = paths
        self.lines_each = lines_each
        self.sizes = [0] * len(paths)
        self.checksums = [0] * len(paths)
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    def claim(self, position: int, lengths: np.ndarray) -> list[Run]:
        """Return the runs for lines of these lengths (int64 [n], with newline), starting at `position`.

        Calls must be in the order of the positions, because the bytes of a part are assigned consecutively.
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
        """Write a run of the lines in memory, `order` (int64) of `lines`. Raises OSError if that fails."""
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
        """Write a run of one line, copied from `offset` in the part of `rank` (`size` bytes with newline)."""
        with self.paths[rank].open("rb") as source:
            line = read_exactly(source.fileno(), size, offset)
        handle = self._open(run.rank)
        try:
            self._add(run.rank, size, put(handle, line.data, run.offset))
        finally:
            os.close(handle)

    def _open(self, rank: int) -> int:
        return os.open(self.paths[rank], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def _add(self, rank: int, size: int, total: int) -> None:
        self._on_bytes(size)
        with self._lock:
            self.checksums[rank] = (self.checksums[rank] + total) % _MODULUS
