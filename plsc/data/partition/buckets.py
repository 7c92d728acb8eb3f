"""Lines spread over files by the first bits of their keys, so that each file can be sorted in memory.

A bucket file is a row of frames (`plsc.data.partition.frames`), each what one block of an input gave it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.data.native import partition as native
from plsc.data.native.partition import LinePlaces
from plsc.data.partition.copying import pieces_of
from plsc.data.partition.files import map_file, read_exactly, write_all
from plsc.data.partition.frames import COUNT_BYTES, frame_bytes, frame_head, read_frames, read_head
from plsc.data.partition.memory import BYTES_A_LINE
from plsc.data.partition.order import line_keys
from plsc.errors import DataError
from plsc.seeds import hash_key

MOST_BUCKETS = 256
_PIECE = 2**20


@dataclass
class Bucket:
    """The lines whose keys start with `prefix` (its `bits` first bits)."""

    path: Path
    prefix: int
    bits: int
    lines: int = 0
    size: int = 0  # of the file

    @property
    def memory(self) -> int:
        """Bytes that it takes once it is read, its numbers included."""
        return self.size + BYTES_A_LINE * self.lines

    def remove(self) -> None:
        """Delete the file, if lines ever came."""
        self.path.unlink(missing_ok=True)


class Spread:
    """Appends lines to the buckets below `parent`, which are `2**bits`; threads may add at once.

    Used as a context: the files are open in it, and their buckets know their sizes when it is left.
    """

    def __init__(self, folder: Path, seed: int, bits: int, parent: Bucket | None = None) -> None:
        self._seed = seed
        self._bits = bits
        self._above, prefix = (parent.bits, parent.prefix) if parent else (0, 0)
        self.buckets = []
        for index in range(2**bits):
            full = prefix << bits | index
            path = folder / f"bucket_{self._above + bits}_{full:x}"
            self.buckets.append(Bucket(path, full, self._above + bits))
        self._handles = np.empty(0, dtype=np.int32)
        self._sizes = np.zeros(2**bits, dtype=np.int64)
        self._lines = np.zeros(2**bits, dtype=np.int64)
        self._lock = threading.Lock()

    def __enter__(self) -> Spread:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        handles: list[int] = []
        try:
            for bucket in self.buckets:
                handles.append(os.open(bucket.path, flags, 0o600))
        finally:  # also if one could not be opened: __exit__ does not come then
            self._handles = np.array(handles, dtype=np.int32)
            if len(handles) < len(self.buckets):
                self._close()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        for index, bucket in enumerate(self.buckets):
            bucket.lines, bucket.size = int(self._lines[index]), int(self._sizes[index])

    def add(self, lines: LinePlaces, numbers: np.ndarray) -> None:
        """Append lines of memory with their numbers, int64. A full disk raises OSError."""
        library = native.functions()
        if library is None:
            order, counts, sizes = self._sort_plainly(lines, numbers)
        else:
            key = hash_key(self._seed)
            order, counts, sizes = native.sort_to_buckets(
                library, numbers, lines.lengths, key, self._above, self._bits
            )
        offsets = self._claim(counts, sizes + (counts > 0) * frame_bytes(counts))
        if library is None:
            self._write_plainly(lines, numbers, order, counts, offsets)
        else:
            native.write_frames(library, lines, numbers, order, counts, self._handles, offsets)

    def add_long(self, source: int, offset: int, length: int, number: int) -> None:
        """Append a line of `length` bytes, newline excluded, at `offset` of an open file, piece by piece."""
        numbers = np.array([number], dtype=np.int64)
        index = int(self._which(numbers)[0])
        head = frame_head(numbers, np.array([length]))
        counts = np.zeros(len(self.buckets), dtype=np.int64)
        counts[index] = 1
        at = int(self._claim(counts, counts * (len(head) + length + 1))[index])
        handle = int(self._handles[index])
        write_all(handle, memoryview(head), at)
        at += len(head)
        for begin in range(0, length, _PIECE):
            piece = read_exactly(source, min(_PIECE, length - begin), offset + begin)
            write_all(handle, memoryview(piece), at + begin)
        write_all(handle, memoryview(b"\n"), at + length)

    def _claim(self, lines: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return where in each bucket so many bytes, that hold so many lines, may be written."""
        with self._lock:
            offsets = self._sizes.copy()
            self._sizes += sizes
            self._lines += lines
        return offsets

    def _which(self, numbers: np.ndarray) -> np.ndarray:
        if self._bits == 0:  # one bucket; a shift by all bits is undefined
            return np.zeros(len(numbers), dtype=np.uint16)
        keys = line_keys(self._seed, numbers) >> np.uint64(64 - self._above - self._bits)
        return (keys & np.uint64(2**self._bits - 1)).astype(np.uint16)

    def _sort_plainly(
        self, lines: LinePlaces, numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what native.sort_to_buckets does, without the library."""
        which, buckets = self._which(numbers), len(self.buckets)
        sizes = np.zeros(buckets, dtype=np.int64)
        np.add.at(sizes, which, lines.lengths + 1)
        return np.argsort(which, kind="stable"), np.bincount(which, minlength=buckets), sizes

    def _write_plainly(
        self,
        lines: LinePlaces,
        numbers: np.ndarray,
        order: np.ndarray,
        counts: np.ndarray,
        offsets: np.ndarray,
    ) -> None:
        done = 0
        for index in np.flatnonzero(counts).tolist():
            chosen = order[done : done + int(counts[index])]
            done += len(chosen)
            at = int(offsets[index])
            for piece in self._pieces(lines, numbers, chosen):
                write_all(int(self._handles[index]), memoryview(piece), at)
                at += len(piece)

    @staticmethod
    def _pieces(lines: LinePlaces, numbers: np.ndarray, chosen: np.ndarray) -> Iterator[bytes]:
        yield frame_head(numbers[chosen], lines.lengths[chosen])
        for begin in range(0, len(chosen), 512):
            some = chosen[begin : begin + 512].tolist()
            yield b"".join(piece for line in some for piece in pieces_of(lines, line))

    def _close(self) -> None:
        for handle in self._handles.tolist():
            os.close(handle)
        self._handles = self._handles[:0]


@dataclass
class Loaded:
    """A mapped bucket: its lines and their numbers, int64 [n]."""

    lines: LinePlaces
    numbers: np.ndarray


def load(bucket: Bucket) -> Loaded:
    """Return the lines of a bucket, which is mapped. Raises DataError if it is not whole."""
    try:
        data = map_file(bucket.path, bucket.size, is_wanted_now=True)
    except (ValueError, FileNotFoundError):
        raise changed(bucket) from None
    found = read_frames(data, bucket.lines)
    if found is None:
        raise changed(bucket)
    numbers, starts, lengths = found
    return Loaded(LinePlaces(starts, lengths, [data]), numbers)


def changed(bucket: Bucket) -> DataError:
    """Return the error for a bucket that is not what was written."""
    return DataError(f"the temporary file {bucket.path} was changed while in use; start again")


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
        raise changed(bucket)
    bucket.remove()
    return [new for new in spread.buckets if new.lines]


def _frames(bucket: Bucket, handle: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    position = 0
    while position < bucket.size:
        count = int.from_bytes(read_exactly(handle, COUNT_BYTES, position), "little")
        if count > bucket.lines:
            raise changed(bucket)
        head = memoryview(read_exactly(handle, frame_bytes(count), position))
        _, numbers, lengths = read_head(head, 0)
        position += len(head)
        yield numbers.astype(np.int64), lengths, position
        position += int(lengths.sum())


def _move_frame(
    spread: Spread,
    handle: int,
    numbers: np.ndarray,
    lengths: np.ndarray,
    offset: int,
    buffer: np.ndarray,
) -> None:
    """Add a frame's lines to `spread`, as many at once as the buffer holds. lengths: with newline."""
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
        some = lengths[begin:end]
        places = LinePlaces(stops[begin:end] - base - some, some - 1, [buffer[:size]])
        spread.add(places, numbers[begin:end])
        begin = end
