"""The way for sets beyond the memory: spread over bucket files by key, then sorted bucket by bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from plsc.data.line_reader import Buffers, LineReader, LongLine
from plsc.data.lines import Lines
from plsc.data.native.partition import CopyError, LinePlaces, truncation_caught
from plsc.data.partition.buckets import (
    MOST_BUCKETS,
    Bucket,
    Spread,
    changed,
    load,
    split,
)
from plsc.data.partition.checksum import checksum
from plsc.data.partition.counts import Counts, InputCount
from plsc.data.partition.files import read_exactly
from plsc.data.partition.inputs import Input
from plsc.data.partition.memory import Budget
from plsc.data.partition.order import line_keys
from plsc.data.partition.padding import Padding
from plsc.data.partition.parallel import BrokenTurn, Turns, pool_of
from plsc.data.partition.parts import Parts
from plsc.data.partition.progress import Progress
from plsc.data.partition.space import Space

_HEAVY = 64  # bytes: lines shorter than this have numbers that weigh more than they do


def bits_for(size: int, budget: Budget) -> int:
    """Return the b of 2**b buckets that `size` bytes want: a few more than would just fit."""
    wanted = max(1, -(-size * 5 // (4 * budget.bucket)))
    return min((wanted - 1).bit_length(), MOST_BUCKETS.bit_length() - 1)


class Spreader:
    """Reads all inputs and adds their lines to the buckets: one thread reads, the others write."""

    def __init__(
        self,
        spread: Spread,
        budget: Budget,
        folder: Path,
        skip_bad: bool,
        progress: Progress,
        space: Space,
    ) -> None:
        self._spread = spread
        self._buffers = Buffers(budget.workers + 1, budget.block)
        self._budget = budget
        self._folder = folder
        self._skip_bad = skip_bad
        self._progress = progress
        self._space = space
        self._under_way: deque[Future[None]] = deque()
        self._next = 0  # number of the next line

    def run(self, inputs: list[Input]) -> Counts:
        """Return what was read. Raises DataError for a bad line, OSError for a full disk."""
        counts = Counts()
        with pool_of(self._budget.workers) as pool:
            for one in inputs:
                counts.inputs.append(self._read(one, counts, pool))
            self._settle()
        return counts

    def _read(self, one: Input, counts: Counts, pool: ThreadPoolExecutor) -> InputCount:
        count = InputCount(one)

        def on_bytes(piece: np.ndarray, offset: int) -> None:
            count.checksum = (count.checksum + checksum(piece, offset)) % 2**64
            count.content_bytes += len(piece)
            self._progress.add(len(piece))
            self._space.take(len(piece))

        with one.open() as stream:
            reader = LineReader(
                stream, one.name, self._buffers, on_bytes, self._skip_bad, self._folder
            )
            for lines in reader:
                before = self._next
                if isinstance(lines, LongLine):
                    lines.file.flush()
                    self._spread.add_long(lines.file.fileno(), 0, lines.length, self._next)
                    self._next += 1
                else:
                    self._add(lines, pool)
                count.lines += self._next - before
        count.blanks, count.skipped = reader.blanks, len(reader.skipped)
        counts.remember(reader.skipped)
        return count

    def _add(self, lines: Lines, pool: ThreadPoolExecutor) -> None:
        numbers = np.arange(self._next, self._next + len(lines))
        self._next += len(lines)
        if len(lines) * _HEAVY > self._budget.block:
            self._settle()
            self._put(lines, numbers)
            return
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()
        self._under_way.append(pool.submit(self._put, lines, numbers))

    def _put(self, lines: Lines, numbers: np.ndarray) -> None:
        try:
            places = LinePlaces(lines.starts, lines.ends - lines.starts, [lines.data])
            self._spread.add(places, numbers)
        finally:
            self._buffers.give_back(lines.data)

    def _settle(self) -> None:
        while self._under_way:
            self._under_way.popleft().result()


def fitting_buckets(
    buckets: list[Bucket], folder: Path, seed: int, budget: Budget
) -> Iterator[Bucket]:
    """Yield the buckets in key order; what does not fit is split, down to single lines."""
    for bucket in buckets:
        if bucket.lines <= 1 or bucket.memory <= budget.bucket:
            if bucket.lines:
                yield bucket
            else:
                bucket.remove()
            continue
        bits = max(1, bits_for(bucket.memory, budget))
        finer = split(bucket, folder, seed, bits, budget.block)
        yield from fitting_buckets(finer, folder, seed, budget)


class Sorter:
    """Writes buckets to the parts: threads read and sort them and take places in turn, others copy."""

    def __init__(self, seed: int, parts: Parts, padding: Padding, budget: Budget) -> None:
        self._seed = seed
        self._parts = parts
        self._padding = padding
        self._budget = budget
        self._turns = Turns()
        self._position = 0

    def run(self, buckets: list[Bucket]) -> None:
        """Write all lines of the buckets, which come in key order, then the padding."""
        workers, copiers = self._budget.workers, self._budget.copiers
        with truncation_caught(), pool_of(copiers) as copying, pool_of(workers) as pool:
            futures = [
                pool.submit(self._write, turn, bucket, copying)
                for turn, bucket in enumerate(buckets)
            ]
            errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenTurn)):
            raise error
        self._padding.copy(self._parts)

    def _write(self, turn: int, bucket: Bucket, copying: Executor) -> None:
        try:
            if bucket.memory <= self._budget.bucket:
                self._write_sorted(turn, bucket, copying)
            else:
                self._write_single(turn, bucket)
            bucket.remove()
        except BaseException:
            self._turns.give_up()
            raise

    def _write_sorted(self, turn: int, bucket: Bucket, copying: Executor) -> None:
        loaded = load(bucket)
        lines = loaded.lines
        order = np.argsort(line_keys(self._seed, loaded.numbers)).astype(np.int64)
        numbers, lengths = loaded.numbers[order], lines.lengths[order] + 1
        with self._turns.take(turn):
            runs = self._parts.claim(self._position, lengths)
            self._position += len(lengths)
        copies = []
        for run in runs:
            self._padding.note(run, numbers, lengths)
            for piece in run.cut(lengths):
                copies.append(copying.submit(self._parts.write, piece, lines, order))
        try:
            for copy in copies:
                copy.result()
        except CopyError:
            raise changed(bucket) from None

    def _write_single(self, turn: int, bucket: Bucket) -> None:
        """Copy a line that is larger than the memory for a bucket, piece by piece."""
        with bucket.path.open("rb", buffering=0) as file:
            head = read_exactly(file.fileno(), 20, 0)
            number = np.frombuffer(head, "<u8", 1, 8).astype(np.int64)
            length = np.frombuffer(head, "<u4", 1, 16).astype(np.int64)
            with self._turns.take(turn):
                (run,) = self._parts.claim(self._position, length)
                self._position += 1
            self._padding.note(run, number, length)
            self._parts.copy_line(run, file.fileno(), len(head), int(length[0]))
