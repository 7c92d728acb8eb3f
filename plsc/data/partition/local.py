"""Shuffle on one machine, with bucket files.

Lines are distributed to bucket files by the first bits of their keys. The buckets are processed one after
another: their lines are sorted in memory by their keys and copied to the parts.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.data.lines import Lines
from plsc.data.partition.inputs import (
    BYTES_PER_LINE,
    Budget,
    Input,
    InputCount,
    map_lines,
    pool_of,
    read_counted,
)
from plsc.data.partition.parts import LinePlaces, Parts, Run, line_keys, read_exactly, spread_lines

OnBytes = Callable[[int], object]

_LEAST_BITS, _MOST_BITS = 4, 8  # of the buckets: few files, of which each is removed before the next is read
_RECORD = np.dtype([("number", "<u8"), ("size", "<u4")])  # per line in a bucket; size with newline


@dataclass
class Loaded:
    """Lines in memory, and their line numbers, int64 [n]."""

    lines: LinePlaces
    numbers: np.ndarray


class Writer:
    """Write lines to the parts in the order of their keys, then `padding`, copies of some lines."""

    def __init__(self, seed: int, parts: Parts, padding: np.ndarray) -> None:
        self._seed = seed
        self._parts = parts
        self._padding = padding
        self._wanted = np.unique(padding)
        self._places: dict[int, tuple[int, int, int]] = {}  # of padding lines: rank, offset and size
        self._position = 0

    def write(self, batch: list[Loaded], pool: Executor) -> None:
        """Write lines whose keys follow those of the previous batch; threads of the pool sort and copy."""
        tasks = []
        orders = pool.map(lambda one: np.argsort(line_keys(self._seed, one.numbers)), batch)
        for loaded, order in zip(batch, orders, strict=True):
            runs = self._claim(loaded.numbers[order], loaded.lines.lengths[order] + 1)
            tasks += [(run, loaded.lines, order) for run in runs]
        for _ in pool.map(lambda task: self._parts.write(*task), tasks):
            pass

    def pad(self) -> None:
        """Write the padding, after all lines."""
        for number in self._padding.tolist():
            rank, offset, size = self._places[number]
            (run,) = self._parts.claim(self._position, np.array([size]))
            self._position += 1
            self._parts.copy(run, rank, offset, size)

    def _claim(self, numbers: np.ndarray, sizes: np.ndarray) -> list[Run]:
        """Return the runs of the next lines, and remember where lines needed for padding are written."""
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


@dataclass
class Bucket:
    """The lines whose keys start with `prefix` (of `bits` bits).

    It has two files: `records` with the number and size of each line (_RECORD), and `lines` with the lines in
    the same order, each with a newline.
    """

    folder: Path
    prefix: int
    bits: int
    lines: int = 0
    size: int = 0  # bytes of the lines

    def path(self, kind: str) -> Path:
        """Return the path of its `records` or `lines` file."""
        return self.folder / f"bucket_{self.bits}_{self.prefix:x}.{kind}"

    @property
    def memory(self) -> int:
        """Bytes of memory after `load`, including the line numbers."""
        return self.size + BYTES_PER_LINE * self.lines

    def load(self) -> Loaded:
        """Read the bucket into memory."""
        records = np.fromfile(self.path("records"), _RECORD)
        numbers, sizes = (records[name].astype(np.int64) for name in ("number", "size"))
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # all at once: as fast as a copy
        with self.path("lines").open("rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), self.size, flags, mmap.PROT_READ), np.uint8)
        return Loaded(LinePlaces.within(data, np.cumsum(sizes) - sizes, sizes - 1), numbers)

    def remove(self) -> None:
        """Delete its files."""
        self.path("records").unlink()
        self.path("lines").unlink()


class BucketWriter:
    """Distribute lines to 2**bits buckets below `parent`; `add` is thread-safe.

    A context manager: the files are open inside it, and the sizes of the buckets are known after it.
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

    def __enter__(self) -> BucketWriter:
        with ExitStack() as stack:
            handles = [
                stack.enter_context(bucket.path(kind).open("xb", buffering=0)).fileno()
                for bucket in self.buckets
                for kind in ("records", "lines")
            ]
            self._handles = np.array(handles, np.int32).reshape(-1, 2)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for bucket, lines, size in zip(self.buckets, self._lines, self._sizes, strict=True):
            bucket.lines, bucket.size = int(lines), int(size)

    def add(self, lines: LinePlaces, numbers: np.ndarray) -> None:
        """Append lines with their numbers, int64. Raises OSError if the disk is full."""
        which, sizes = self._which(numbers), lines.lengths + 1
        order = np.argsort(which, kind="stable")
        counts = np.bincount(which, minlength=len(self.buckets))
        taken = np.bincount(which, weights=sizes, minlength=len(self.buckets)).astype(np.int64)
        offsets = self._claim(counts, taken)
        records = np.empty(len(order), dtype=_RECORD)
        records["number"], records["size"] = numbers[order], sizes[order]
        spread_lines(lines, order, records, counts, self._handles, offsets)

    def _which(self, numbers: np.ndarray) -> np.ndarray:
        keys = line_keys(self._seed, numbers) >> np.uint64(64 - self._above - self._bits)
        return (keys & np.uint64(2**self._bits - 1)).astype(np.uint16)

    def _claim(self, lines: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the bytes of records and of lines in each bucket before these lines, int64 [buckets, 2]."""
        with self._lock:
            before = np.stack([self._lines * _RECORD.itemsize, self._sizes], axis=1)
            self._lines += lines
            self._sizes += sizes
        return before


def bits_for(size: int, budget: Budget) -> int:
    """Return b for 2**b buckets of `size` bytes in total, with some spare memory."""
    wanted = max(1, -(-size * 5 // (4 * budget.bucket)))
    return min(max((wanted - 1).bit_length(), _LEAST_BITS), _MOST_BITS)


def distribute(
    inputs: list[Input], spread: BucketWriter, budget: Budget, skip_bad: bool, on_bytes: OnBytes
) -> list[InputCount]:
    """Read all inputs and distribute their lines to buckets: one thread reads, the others write."""
    counts, first, buffers = [], 0, budget.buffers(budget.workers + 1)

    def add(lines: Lines, number: int) -> None:
        places = LinePlaces.within(lines.data, lines.starts, lines.ends - lines.starts)
        spread.add(places, np.arange(number, number + len(lines)))

    with pool_of(budget.workers) as pool:
        for one in inputs:
            count = InputCount()
            with one.open() as stream:
                samples = read_counted(stream, one.name, count, buffers, skip_bad, on_bytes)
                for _ in map_lines(samples, first, pool, buffers, add):
                    pass
            counts.append(count)
            first += count.lines
    return counts


def batches(buckets: list[Bucket], seed: int, budget: Budget) -> Iterator[list[Bucket]]:
    """Yield buckets in key order, as many at a time as the memory can hold; split those that do not fit.

    A single line that does not fit is yielded alone.
    """
    batch: list[Bucket] = []
    for bucket in _fitting(buckets, seed, budget):
        is_full = len(batch) == budget.workers
        if batch and (is_full or max(bucket.memory, batch[0].memory) > budget.bucket):
            yield batch
            batch = []
        batch.append(bucket)
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
    """Distribute a bucket over new ones, remove it, and return them in key order."""
    spread = BucketWriter(bucket.folder, seed, bits_for(bucket.memory, budget), bucket)
    at, some = 0, max(1, budget.block // 64)
    with bucket.path("records").open("rb") as file, bucket.path("lines").open("rb") as lines, spread:
        while len(records := np.fromfile(file, _RECORD, some)):
            numbers, sizes = (records[name].astype(np.int64) for name in ("number", "size"))
            at = _move(spread, lines.fileno(), at, numbers, sizes, budget.block)
    bucket.remove()
    return spread.buckets


def _move(
    spread: BucketWriter, source: int, at: int, numbers: np.ndarray, sizes: np.ndarray, block: int
) -> int:
    """Add consecutive lines of a file from `at`, about one block at a time; return their end."""
    stops = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        before = int(stops[begin] - sizes[begin])
        end = max(begin + 1, int(np.searchsorted(stops, before + block, side="right")))
        starts = stops[begin:end] - sizes[begin:end] - before
        data = read_exactly(source, int(stops[end - 1]) - before, at + before)
        places = LinePlaces.within(data, starts, sizes[begin:end] - 1)
        spread.add(places, numbers[begin:end])
        del data, places  # free the memory; the next line may be as long
        begin = end
    return at + int(stops[-1])


def write_buckets(buckets: list[Bucket], writer: Writer, seed: int, budget: Budget, pool: Executor) -> None:
    """Write the lines of all buckets, and remove the buckets."""
    for batch in batches(buckets, seed, budget):
        writer.write(list(pool.map(Bucket.load, batch)), pool)
        for _ in pool.map(Bucket.remove, batch):
            pass
