"""The shuffle on one machine: in memory, or, for what does not fit, by bucket files.

In memory, the files are read into one array. Otherwise their lines are spread over bucket files by the first
bits of their keys, and the buckets are read one after another. Either way lines at hand are sorted by their
keys and copied to the parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.data.line_reader import Buffers, LongLine
from plsc.data.lines import BOM, Lines, find_newlines, read_lines
from plsc.data.partition.inputs import (
    Input,
    InputCount,
    pool_of,
    read_counted,
    share_out,
)
from plsc.data.partition.options import BYTES_PER_LINE, Budget, PartitionOptions
from plsc.data.partition.order import line_keys
from plsc.data.partition.parts import (
    LinePlaces,
    Parts,
    Run,
    copy_lines,
    copy_range,
    put,
    read_exactly,
)
from plsc.errors import DataError

OnBytes = Callable[[int], object]

_SPARE = 8 * 2**20
_PIECE_BYTES = 2**24  # of a file, read by one thread
_BLOCK_BYTES = 2**19  # read at once: it is summed and searched while it is in the cache
_MOST_BUCKETS = 256
_RECORD = np.dtype([("number", "<u8"), ("size", "<u4")])  # of a line in a bucket; with newline


@dataclass
class Loaded:
    """Lines at hand, and their numbers, int64 [n]."""

    lines: LinePlaces
    numbers: np.ndarray


class Writer:
    """Writes lines to the parts in the order of their keys, then `padding`, copies of some of them."""

    def __init__(self, seed: int, parts: Parts, padding: np.ndarray) -> None:
        self._seed = seed
        self._parts = parts
        self._padding = padding
        self._wanted = np.unique(padding)
        self._places: dict[int, tuple[int, int, int]] = {}  # of those: rank, offset and size
        self._position = 0

    def write(self, batch: list[Loaded], pool: Executor) -> None:
        """Write lines whose keys come after those of the batch before; a pool's threads sort and copy."""
        tasks = []
        for loaded, order in zip(batch, pool.map(self._sort, batch), strict=True):
            runs = self._claim(loaded.numbers[order], loaded.lines.lengths[order] + 1)
            tasks += [(run, loaded.lines, order) for run in runs]
        for _ in pool.map(lambda task: self._parts.write(*task), tasks):
            pass

    def copy(self, number: int, source: int, size: int) -> None:
        """Write the line that an open file holds, newline included; it comes after the batch before."""
        (run,) = self._claim(np.array([number]), np.array([size]))
        self._parts.copy(run, source, 0, size)

    def pad(self) -> None:
        """Write the padding; all lines have been written."""
        for number in self._padding.tolist():
            rank, offset, size = self._places[number]
            (run,) = self._parts.claim(self._position, np.array([size]))
            self._position += 1
            with self._parts.paths[rank].open("rb") as source:
                self._parts.copy(run, source.fileno(), offset, size)

    def _sort(self, loaded: Loaded) -> np.ndarray:
        return np.argsort(line_keys(self._seed, loaded.numbers))

    def _claim(self, numbers: np.ndarray, sizes: np.ndarray) -> list[Run]:
        """Return the runs of the next lines, and note where those are written that padding copies."""
        runs = self._parts.claim(self._position, sizes)
        self._position += len(numbers)
        for run in runs if len(self._wanted) else ():
            hits = np.flatnonzero(np.isin(numbers[run.begin : run.end], self._wanted))
            ends = run.offset + np.cumsum(sizes[run.begin : run.end])
            for hit in hits.tolist():
                size = int(sizes[run.begin + hit])
                number = int(numbers[run.begin + hit])
                self._places[number] = run.rank, int(ends[hit]) - size, size
        return runs


# In memory.


class TooManyLines(Exception):
    """There are more lines than the memory has room for."""


def fits(inputs: list[Input], budget: Budget) -> bool:
    """Whether the inputs fit the memory as a whole; their lines may still turn out too many."""
    room = budget.total - _SPARE - 2 * budget.workers * _BLOCK_BYTES
    return all(one.is_plain for one in inputs) and sum(one.size for one in inputs) <= room


def read_to_memory(
    inputs: list[Input], options: PartitionOptions, on_bytes: OnBytes, pool: Executor
) -> tuple[Loaded, list[InputCount]]:
    """Return the lines and what was read. Raises DataError for a bad line, TooManyLines."""
    return _Reader(inputs, options, on_bytes).run(pool)


class _Reader:
    """Reads plain files into one array, by several threads, and finds their lines."""

    def __init__(self, inputs: list[Input], options: PartitionOptions, on_bytes: OnBytes) -> None:
        self._inputs = inputs
        self._skip_bad = options.skip_bad
        self._on_bytes = on_bytes
        self._starts = np.cumsum([0, *(one.size for one in inputs)]).tolist()
        self._room = (options.budget.total - _SPARE - self._starts[-1]) // BYTES_PER_LINE
        self._lock = threading.Lock()

    def run(self, pool: Executor) -> tuple[Loaded, list[InputCount]]:
        self._data = np.empty(self._starts[-1], dtype=np.uint8)
        counts = [InputCount() for _ in self._inputs]
        newlines: list[list[np.ndarray]] = [[] for _ in self._inputs]
        pieces = [
            (index, begin, min(one.size, begin + _PIECE_BYTES))
            for index, one in enumerate(self._inputs)
            for begin in range(0, one.size, _PIECE_BYTES)
        ]
        for index, found, count in pool.map(self._read_piece, pieces):
            newlines[index] += found
            counts[index].add(count)
        places = [self._cut(index, counts[index], newlines[index]) for index in range(len(counts))]
        starts, ends = (np.concatenate(arrays) for arrays in zip(*places, strict=True))
        lines = LinePlaces(self._data, starts, ends - starts)
        return Loaded(lines, np.arange(len(starts))), counts

    def _read_piece(self, piece: tuple[int, int, int]) -> tuple[int, list[np.ndarray], InputCount]:
        """Return (the input, positions of newlines in it, bytes and checksum) of bytes [begin, end) of it."""
        index, begin, end = piece
        one, newlines = self._inputs[index], []
        count = InputCount()
        with one.open() as stream:
            stream.seek(begin)
            while begin < end:
                at = self._starts[index] + begin
                block = self._data[at : at + min(_BLOCK_BYTES, end - begin)]
                got = stream.readinto(block.data)
                if not got:
                    raise one.changed()
                count.see(block[:got], begin)
                newlines.append(find_newlines(block[:got]) + begin)
                self._take(len(newlines[-1]))
                self._on_bytes(got)
                begin += got
        return index, newlines, count

    def _take(self, lines: int) -> None:
        with self._lock:
            self._room -= lines
            if self._room < 0:
                raise TooManyLines

    def _cut(
        self, index: int, count: InputCount, found: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where the lines of an input start and end in the array, and count them."""
        one, start = self._inputs[index], self._starts[index]
        data = self._data[start : start + one.size]
        newlines = np.concatenate([np.empty(0, dtype=np.int64), *found])
        found.clear()
        begin = 3 if data[:3].tobytes() == BOM else 0
        if len(data) > begin and data[-1] != ord("\n"):
            newlines = np.append(newlines, len(data))  # the last newline is missing
        lines = read_lines(data, begin, newlines, one.name, 1, self._skip_bad)
        count.lines, count.blanks = len(lines), lines.blanks
        count.skipped, count.messages = len(lines.skipped), lines.skipped[:20]
        return lines.starts + start, lines.ends + start


# By buckets.


@dataclass
class Bucket:
    """The lines whose keys start with `prefix` (its `bits` first bits).

    Two files: of each line its number and size (_RECORD), and, in the same order, the lines, each with a
    newline.
    """

    folder: Path
    prefix: int
    bits: int
    lines: int = 0
    size: int = 0  # of the lines

    def path(self, kind: str) -> Path:
        """Return the path of its `records` or `lines`."""
        return self.folder / f"bucket_{self.bits}_{self.prefix:x}.{kind}"

    @property
    def memory(self) -> int:
        """Bytes that it takes once it is read, its numbers included."""
        return self.size + BYTES_PER_LINE * self.lines

    def load(self) -> Loaded:
        """Read it."""
        records = np.fromfile(self.path("records"), _RECORD)
        numbers, sizes = (records[name].astype(np.int64) for name in ("number", "size"))
        data = np.fromfile(self.path("lines"), np.uint8)
        if len(records) != self.lines or len(data) != self.size or sizes.sum() != self.size:
            raise DataError(f"{self.path('lines')} was changed while in use; start again")
        return Loaded(LinePlaces(data, np.cumsum(sizes) - sizes, sizes - 1), numbers)

    def remove(self) -> None:
        """Delete the files."""
        self.path("records").unlink()
        self.path("lines").unlink()


class Spread:
    """Appends lines to 2**bits buckets below `parent`; threads may add at once.

    Used as a context: the files are open in it, and their buckets know their sizes when it is left.
    """

    def __init__(self, folder: Path, seed: int, bits: int, parent: Bucket | None = None) -> None:
        self._seed = seed
        self._bits = bits
        prefix, self._above = (parent.prefix, parent.bits) if parent else (0, 0)
        self.buckets = [
            Bucket(folder, prefix << bits | index, self._above + bits) for index in range(2**bits)
        ]
        self._sizes, self._lines = np.zeros((2, 2**bits), dtype=np.int64)
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> Spread:
        with ExitStack() as stack:
            self._handles = [
                [
                    stack.enter_context(bucket.path(kind).open("xb", buffering=0)).fileno()
                    for kind in ("records", "lines")
                ]
                for bucket in self.buckets
            ]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for bucket, lines, size in zip(self.buckets, self._lines, self._sizes, strict=True):
            bucket.lines, bucket.size = int(lines), int(size)

    def add(self, lines: LinePlaces, numbers: np.ndarray) -> None:
        """Append lines with their numbers, int64. A full disk raises OSError."""
        which, sizes = self._which(numbers), lines.lengths + 1
        order = np.argsort(which, kind="stable")
        counts = np.bincount(which, minlength=len(self.buckets))
        taken = np.bincount(which, weights=sizes, minlength=len(self.buckets)).astype(np.int64)
        first_lines, offsets = self._claim(counts, taken)
        records = np.empty(len(order), dtype=_RECORD)
        records["number"], records["size"] = numbers[order], sizes[order]
        begin = 0
        for index in np.flatnonzero(counts).tolist():
            end = begin + int(counts[index])
            at = int(first_lines[index]) * _RECORD.itemsize
            put(self._handles[index][0], records[begin:end].tobytes(), at)
            handle, offset = self._handles[index][1], int(offsets[index])
            copy_lines(lines, order[begin:end], handle, offset, is_summed=False)
            begin = end

    def add_long(self, source: int, begin: int, size: int, number: int) -> None:
        """Append a line of `size` bytes, newline excluded, from `begin` on in an open file."""
        index = int(self._which(np.array([number]))[0])
        counts = (np.arange(len(self.buckets)) == index).astype(np.int64)
        first_lines, offsets = self._claim(counts, counts * (size + 1))
        record = np.array([(number, size + 1)], dtype=_RECORD)
        records, handle = self._handles[index]
        put(records, record.tobytes(), int(first_lines[index]) * _RECORD.itemsize)
        copy_range(source, begin, size, handle, int(offsets[index]))
        put(handle, b"\n", int(offsets[index]) + size)

    def _which(self, numbers: np.ndarray) -> np.ndarray:
        if self._bits == 0:  # one bucket; a shift by all bits is undefined
            return np.zeros(len(numbers), dtype=np.uint16)
        keys = line_keys(self._seed, numbers) >> np.uint64(64 - self._above - self._bits)
        return (keys & np.uint64(2**self._bits - 1)).astype(np.uint16)

    def _claim(self, lines: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each bucket, how many lines and bytes come before these."""
        with self._lock:
            before = self._lines.copy(), self._sizes.copy()
            self._lines += lines
            self._sizes += sizes
        return before


def bits_for(size: int, budget: Budget) -> int:
    """Return the b of 2**b buckets that `size` bytes want: a few more than would just fit."""
    wanted = max(1, -(-size * 5 // (4 * budget.bucket)))
    return min((wanted - 1).bit_length(), _MOST_BUCKETS.bit_length() - 1)


def spread_inputs(
    inputs: list[Input],
    options: PartitionOptions,
    expected_bytes: int,
    folder: Path,
    on_bytes: OnBytes,
) -> tuple[list[Bucket], list[InputCount]]:
    """Read all inputs and add their lines to buckets: one thread reads, the others write."""
    budget, counts, first = options.budget, [], 0
    buffers = Buffers(budget.workers + 1, budget.block)

    def add(lines: Lines, number: int) -> None:
        places = LinePlaces(lines.data, lines.starts, lines.ends - lines.starts)
        spread.add(places, np.arange(number, number + len(lines)))

    def add_long(line: LongLine, number: int) -> None:
        line.file.flush()
        spread.add_long(line.file.fileno(), 0, line.length, number)

    bits = bits_for(expected_bytes, budget)
    with Spread(folder, options.seed, bits) as spread, pool_of(budget.workers) as pool:
        for one in inputs:
            count = InputCount()
            with one.open() as stream:
                samples = read_counted(
                    stream, one.name, count, buffers, options.skip_bad, on_bytes, tmp_dir=folder
                )
                for _ in share_out(samples, first, pool, buffers, add, add_long):
                    pass
            counts.append(count)
            first += count.lines
    return spread.buckets, counts


def batches(buckets: list[Bucket], seed: int, budget: Budget) -> Iterator[list[Bucket]]:
    """Yield buckets in key order, as many as the memory holds; what does not fit is split.

    A single line that does not fit is a batch of its own.
    """
    batch: list[Bucket] = []
    for bucket in _fitting(buckets, seed, budget):
        is_too_large = bucket.memory > budget.bucket
        if batch and (is_too_large or len(batch) == budget.workers):
            yield batch
            batch = []
        batch.append(bucket)
        if is_too_large:
            yield batch
            batch = []
    if batch:
        yield batch


def _fitting(buckets: list[Bucket], seed: int, budget: Budget) -> Iterator[Bucket]:
    for bucket in buckets:
        if bucket.lines > 1 and bucket.memory > budget.bucket:
            yield from _fitting(_split(bucket, seed, budget), seed, budget)
        elif bucket.lines:
            yield bucket
        else:
            bucket.remove()


def _split(bucket: Bucket, seed: int, budget: Budget) -> list[Bucket]:
    """Spread a bucket over new ones, remove it, and return them in key order."""
    spread = Spread(bucket.folder, seed, max(1, bits_for(bucket.memory, budget)), bucket)
    at, some = 0, max(1, budget.block // 64)
    with (
        bucket.path("records").open("rb") as file,
        bucket.path("lines").open("rb") as lines,
        spread,
    ):
        while len(records := np.fromfile(file, _RECORD, some)):
            numbers, sizes = (records[name].astype(np.int64) for name in ("number", "size"))
            at = _move(spread, lines.fileno(), at, numbers, sizes, budget.block)
    bucket.remove()
    return spread.buckets


def _move(
    spread: Spread, source: int, at: int, numbers: np.ndarray, sizes: np.ndarray, block: int
) -> int:
    """Add lines that follow each other in a file from `at` on, about a block at once; return their end."""
    stops = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        before = int(stops[begin] - sizes[begin])
        end = int(np.searchsorted(stops, before + block, side="right"))
        if end == begin:  # longer than a block
            spread.add_long(source, at + before, int(sizes[begin]) - 1, int(numbers[begin]))
            end += 1
        else:
            content = read_exactly(source, int(stops[end - 1]) - before, at + before)
            starts = stops[begin:end] - sizes[begin:end] - before
            data = np.frombuffer(content, dtype=np.uint8)
            spread.add(LinePlaces(data, starts, sizes[begin:end] - 1), numbers[begin:end])
        begin = end
    return at + int(stops[-1])


def write_buckets(
    buckets: list[Bucket], writer: Writer, seed: int, budget: Budget, pool: Executor
) -> None:
    """Write the lines of all buckets, which are removed on the way."""
    for batch in batches(buckets, seed, budget):
        if batch[0].memory > budget.bucket:
            (bucket,) = batch
            (record,) = np.fromfile(bucket.path("records"), _RECORD)
            with bucket.path("lines").open("rb") as lines:
                writer.copy(int(record["number"]), lines.fileno(), int(record["size"]))
        else:
            writer.write(list(pool.map(Bucket.load, batch)), pool)
        for bucket in batch:
            bucket.remove()
