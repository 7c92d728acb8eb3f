"""Lines spread over files by the first bits of their keys, so that each file can be sorted in memory.

A bucket file is a row of frames: the number of lines (uint64), their numbers (uint64 each), their lengths
(uint32 each, newline included), and their bytes. A frame is what one block of an input gave the bucket.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from plsc.data.lines import line_slices
from plsc.data.partition.files import read_exactly
from plsc.data.partition.memory import BYTES_A_LINE
from plsc.data.partition.order import line_keys
from plsc.errors import DataError

MOST_BUCKETS = 256
_IOV_MAX = 1024
_COUNT = np.dtype("<u8")
_PIECE = 2**20


@dataclass
class Bucket:
    """The lines whose keys start with `prefix` (its `bits` first bits)."""

    path: Path
    prefix: int
    bits: int
    lines: int = 0
    size: int = 0  # of the file
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def memory(self) -> int:
        """Bytes that it takes once it is read, its numbers included."""
        return self.size + BYTES_A_LINE * self.lines

    def remove(self) -> None:
        """Delete the file, if lines ever came."""
        self.path.unlink(missing_ok=True)


class Spread:
    """Appends lines to the buckets below `parent`, which are `2**bits`; threads may add at once.

    Used as a context: the files are open in it.
    """

    def __init__(self, folder: Path, seed: int, bits: int, parent: Bucket | None = None) -> None:
        self._seed = seed
        above, prefix = (parent.bits, parent.prefix) if parent else (0, 0)
        self._shift = np.uint64(64 - above - bits)
        self._mask = np.uint64(2**bits - 1)
        self.buckets = []
        for index in range(2**bits):
            full = prefix << bits | index
            path = folder / f"bucket_{above + bits}_{full:x}"
            self.buckets.append(Bucket(path, full, above + bits))
        self._handles: list[int] = []

    def __enter__(self) -> Spread:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        for bucket in self.buckets:
            self._handles.append(os.open(bucket.path, flags, 0o600))
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def add(
        self, view: memoryview, starts: np.ndarray, ends: np.ndarray, numbers: np.ndarray
    ) -> None:
        """Append lines, given as bytes [start, end) of `view`, newline excluded, with their numbers."""
        which = self._which(numbers)
        order = np.argsort(which, kind="stable")
        bounds = np.searchsorted(which[order], np.arange(len(self.buckets) + 1))
        lengths = (ends - starts + 1).astype("<u4")
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            chosen = order[bounds[index] : bounds[index + 1]]
            bucket, handle = self.buckets[index], self._handles[index]
            head = _frame_head(numbers[chosen], lengths[chosen])
            with bucket.lock:
                _write_all(handle, [memoryview(head)])
                for begin in range(0, len(chosen), _IOV_MAX // 2):
                    some = chosen[begin : begin + _IOV_MAX // 2]
                    _write_all(handle, line_slices(view, starts[some], ends[some]))
                bucket.lines += len(chosen)
                bucket.size += len(head) + int(lengths[chosen].sum())

    def add_long(self, source: int, offset: int, length: int, number: int) -> None:
        """Append a line of `length` bytes, newline excluded, at `offset` of an open file, piece by piece."""
        numbers = np.array([number], dtype=np.int64)
        index = int(self._which(numbers)[0])
        head = _frame_head(numbers, np.array([length + 1], dtype="<u4"))
        bucket, handle = self.buckets[index], self._handles[index]
        with bucket.lock:
            _write_all(handle, [memoryview(head)])
            for begin in range(0, length, _PIECE):
                piece = read_exactly(source, min(_PIECE, length - begin), offset + begin)
                _write_all(handle, [memoryview(piece)])
            _write_all(handle, [memoryview(b"\n")])
            bucket.lines += 1
            bucket.size += len(head) + length + 1

    def _which(self, numbers: np.ndarray) -> np.ndarray:
        if self._shift == 64:  # one bucket; a shift by all bits is undefined
            return np.zeros(len(numbers), dtype=np.uint16)
        keys = line_keys(self._seed, numbers)
        return ((keys >> self._shift) & self._mask).astype(np.uint16)


def _frame_head(numbers: np.ndarray, lengths: np.ndarray) -> bytes:
    count = np.array([len(numbers)], dtype=_COUNT).tobytes()
    return count + numbers.astype("<u8").tobytes() + lengths.tobytes()


def _write_all(handle: int, pieces: list[memoryview]) -> None:
    """Append at most _IOV_MAX pieces; a full disk raises OSError."""
    left = sum(map(len, pieces)) - os.writev(handle, pieces)
    if left:  # the disk is about to be full: the next write says so
        rest = b"".join(pieces)[-left:]
        while rest:
            rest = rest[os.write(handle, rest) :]


@dataclass
class Loaded:
    """A bucket in memory: numbers, starts and ends (newline excluded) of its lines, int64 [n]."""

    view: memoryview
    numbers: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def load(bucket: Bucket, buffer: np.ndarray) -> Loaded:
    """Read a bucket into the buffer (uint8, at least `bucket.size`). Raises DataError if it is not whole."""
    view = buffer.data[: bucket.size]
    with bucket.path.open("rb", buffering=0) as file:
        got = 0
        while got < bucket.size and (count := file.readinto(view[got:])):
            got += count
    numbers, lengths, heads, counts = [], [], [], []
    position = 0
    try:
        while position < got:
            count, frame_numbers, frame_lengths = _read_head(view, position)
            numbers.append(frame_numbers)
            lengths.append(frame_lengths)
            counts.append(count)
            heads.append(_COUNT.itemsize + 12 * count)
            position += heads[-1] + int(frame_lengths.sum(dtype=np.int64))
    except ValueError:
        position = -1
    if position != bucket.size or sum(counts) != bucket.lines:
        raise DataError(f"the temporary file {bucket.path} was changed while in use; start again")
    all_lengths = np.concatenate(lengths).astype(np.int64)
    # A line lies behind all lines before it and behind the heads up to its own frame's.
    starts = np.cumsum(all_lengths) - all_lengths + np.repeat(np.cumsum(heads), counts)
    return Loaded(view, np.concatenate(numbers).astype(np.int64), starts, starts + all_lengths - 1)


def _read_head(view: memoryview, position: int) -> tuple[int, np.ndarray, np.ndarray]:
    count = int(np.frombuffer(view, _COUNT, 1, position)[0])
    position += _COUNT.itemsize
    numbers = np.frombuffer(view, "<u8", count, position)
    return count, numbers, np.frombuffer(view, "<u4", count, position + 8 * count)


def split(bucket: Bucket, folder: Path, seed: int, bits: int, block_bytes: int) -> list[Bucket]:
    """Spread a bucket that is too large over 2**bits new ones, remove it, and return them in key order."""
    spread = Spread(folder, seed, bits, bucket)
    buffer = np.empty(block_bytes, dtype=np.uint8)
    handle = os.open(bucket.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with spread:
            for numbers, lengths, offset in _frames(bucket, handle):
                _move_frame(spread, handle, numbers, lengths, offset, buffer)
    finally:
        os.close(handle)
    if sum(new.lines for new in spread.buckets) != bucket.lines:
        raise DataError(f"the temporary file {bucket.path} was changed while in use; start again")
    bucket.remove()
    return [new for new in spread.buckets if new.lines]


def _frames(bucket: Bucket, handle: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    position = 0
    while position < bucket.size:
        count = int.from_bytes(read_exactly(handle, _COUNT.itemsize, position), "little")
        if count > bucket.lines:
            raise DataError(
                f"the temporary file {bucket.path} was changed while in use; start again"
            )
        head = memoryview(read_exactly(handle, _COUNT.itemsize + 12 * count, position))
        _, numbers, lengths = _read_head(head, 0)
        position += len(head)
        yield numbers.astype(np.int64), lengths.astype(np.int64), position
        position += int(lengths.sum(dtype=np.int64))


def _move_frame(
    spread: Spread,
    handle: int,
    numbers: np.ndarray,
    lengths: np.ndarray,
    offset: int,
    buffer: np.ndarray,
) -> None:
    """Add a frame's lines to `spread`, as many at once as the buffer holds."""
    stops = np.cumsum(lengths)
    begin = 0
    while begin < len(lengths):
        base = int(stops[begin] - lengths[begin])
        end = int(np.searchsorted(stops, base + len(buffer), side="right"))
        if end == begin:
            length = int(lengths[begin]) - 1
            spread.add_long(handle, offset + base, length, int(numbers[begin]))
            begin += 1
            continue
        size = int(stops[end - 1]) - base
        buffer[:size] = np.frombuffer(read_exactly(handle, size, offset + base), dtype=np.uint8)
        ends = stops[begin:end] - base - 1
        starts = ends - lengths[begin:end] + 1
        spread.add(buffer.data[:size], starts, ends, numbers[begin:end])
        begin = end
