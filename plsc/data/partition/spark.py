"""Run a partition on a Spark cluster, for datasets too large for one machine.

1. Count: the inputs are read in splits of a few MiB to count and check their lines. Then every line's number,
and the lowest key of each rank, are known. 2. Write: the splits are read again. Every line is sent to its
rank, sorted there by its key, and written, with a single Spark shuffle of the data.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.lines import Buffers
from plsc.data.partition.inputs import Input, InputCount, read_counted
from plsc.data.partition.parts import checksum, line_keys, lines_per_rank, padding_lines, rank_bounds
from plsc.errors import DataError, OptionError
from plsc.storage.publish import hidden_name, replacing
from plsc.storage.store import Store
from plsc.storage.urls import is_url
from plsc.version import install

_BLOCK = 4 * 2**20
_SPLIT_BYTES = 64 * 2**20
_LOOK = 2**16  # bytes read at a time when searching a newline
Key = tuple[int, int, int]  # rank, 1 for padding, order within that
# Until the process ends: Spark uses its first folder also for later sessions.
_private_folder = functools.cache(tempfile.TemporaryDirectory)


@dataclass(frozen=True)
class _Plan:
    """The data that tasks need to send lines to their ranks; sent to every executor."""

    seed: int
    lines_each: int
    bounds: np.ndarray
    padding: dict[int, list[int]]  # by line number: the positions that the line pads
    skip_bad: bool


@contextmanager
def session(master: str | None, memory: int, tmp_dir: str | None) -> Iterator[Any]:
    """Yield a SparkContext. Raises DataError when Spark fails; OptionError if PySpark is not installed."""
    try:
        from py4j.protocol import Py4JError
        from pyspark import SparkConf, SparkContext
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError:
        raise OptionError(f"--engine spark requires PySpark; run {install('spark')}") from None
    builder = SparkSession.builder.appName("plsc data partition")
    if master:
        builder = builder.master(master)
    settings = {"spark.python.worker.memory": f"{max(64, memory // 2**20)}m"}
    started = None
    try:
        # By default, other users can read all lines. Java takes this variable before spark.local.dir.
        place = tmp_dir or os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or None
        os.environ["SPARK_LOCAL_DIRS"] = settings["spark.local.dir"] = _private_folder(dir=place).name
        SparkContext._ensure_initialized()  # starts Java, which knows the default master
        if (master or SparkConf().get("spark.master", "")).startswith("local"):
            # Use this interpreter, which has plsc. For a cluster, its configuration decides.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            # By default, other machines can connect, without a login.
            settings |= {"spark.authenticate": "true", "spark.ui.enabled": "false"}
            settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        for name, value in settings.items():
            builder = builder.config(name, value)
        started = builder.getOrCreate()
        yield started.sparkContext
    except (Py4JError, PySparkException) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"Spark failed: {reason[:300]}; see its log") from error
    finally:
        if started is not None:
            started.stop()


def write(
    context: Any, inputs: list[Input], target: str, names: list[str], seed: int, skip_bad: bool
) -> tuple[list[InputCount], list[int], list[int]]:
    """Write the parts `names` to `target`, a folder that all executors share, or a URL.

    Returns (counts of each input, sizes of the parts, their checksums). Raises DataError for a bad line.
    """
    nranks, splits = len(names), split_inputs(inputs)
    numbered = context.parallelize(list(enumerate(splits)), len(splits))
    counts = [InputCount() for _ in inputs]
    firsts, lines = [], 0  # number of the first line of each split
    for split, (count, problem) in zip(
        splits, numbered.map(lambda item: _count(item[1], skip_bad)).collect(), strict=True
    ):
        if problem:
            raise DataError(problem)
        firsts.append(lines)
        lines += count.lines
        counts[split.number].add(count)
    if lines == 0:
        return counts, [], []  # which the report of the counts refuses, as for the local engine
    places: dict[int, list[int]] = {}
    for position, number in enumerate(padding_lines(seed, lines, nranks).tolist(), start=lines):
        places.setdefault(number, []).append(position)
    each, bounds = lines_per_rank(lines, nranks), rank_bounds(seed, lines, nranks)
    shared = context.broadcast(_Plan(seed, each, bounds, places, skip_bad))
    written = (
        numbered.flatMap(lambda item: _send(item[1], firsts[item[0]], shared.value))
        .repartitionAndSortWithinPartitions(nranks, lambda key: key[0])
        .mapPartitionsWithIndex(lambda rank, rows: _store(rank, rows, target, names[rank]))
        .collect()
    )
    _, lines_of, sizes, checksums = (list(column) for column in zip(*sorted(written), strict=True))
    if lines_of != [each] * nranks:
        raise DataError("the parts written by Spark have unexpected sizes; did an input change?")
    return counts, sizes, checksums


def _count(split: Split, skip_bad: bool) -> tuple[InputCount, str]:
    """Return (counts of a split, the error message if there is one)."""
    count, buffers = InputCount(), Buffers(1, _BLOCK)
    try:
        with open_split(split) as (stream, start):
            for lines in read_counted(stream, split.name, count, buffers, skip_bad, start=start):
                buffers.give_back(lines.data)
    except DataError as error:  # as a value: an exception would arrive as a long Java traceback
        return count, str(error)
    return count, ""


def _send(split: Split, first: int, plan: _Plan) -> Iterator[tuple[Key, bytes]]:
    """Yield the lines of a split, with newline and sort key; padding lines once more per position."""
    buffers = Buffers(1, _BLOCK)
    with open_split(split) as (stream, start):
        for lines in read_counted(stream, split.name, InputCount(), buffers, plan.skip_bad, start=start):
            pairs = zip(lines.starts.tolist(), lines.ends.tolist(), strict=True)
            contents = [lines.data[start:end].tobytes() for start, end in pairs]
            buffers.give_back(lines.data)
            numbers = np.arange(first, first + len(contents))
            first += len(contents)
            keys = line_keys(plan.seed, numbers)
            ranks = np.searchsorted(plan.bounds, keys, side="right")
            rows = zip(numbers.tolist(), ranks.tolist(), keys.tolist(), contents, strict=True)
            for number, rank, key, content in rows:
                yield (rank, 0, key), content + b"\n"
                for position in plan.padding.get(number, ()):
                    yield (position // plan.lines_each, 1, position), content + b"\n"


def _store(rank: int, rows: Iterable[tuple[Key, bytes]], target: str, name: str) -> Iterator[tuple[int, ...]]:
    """Write a part, safe if a task is run twice or by two executors; yield rank, lines, bytes, checksum."""
    with contextlib.ExitStack() as stack:
        if is_url(target):
            temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()), name)
        else:
            temporary = stack.enter_context(replacing(Path(target, name)))
        lines = size = total = 0
        with temporary.open("wb", buffering=2**20) as file:
            for _, line in rows:
                file.write(line)
                total += checksum(line, size)
                size, lines = size + len(line), lines + 1
        if is_url(target):
            store = Store(target)
            own = hidden_name(name) if store.can_rename else name  # an object appears when it is complete
            store.put(temporary, own)
            if own != name and store.exists(name):
                store.delete(own)  # the other attempt was faster
            elif own != name:
                store.rename(own, name)
    yield rank, lines, size, total % 2**64


# Byte ranges of inputs, so that many tasks can read one file.


@dataclass(frozen=True)
class Split:
    """The lines of input `number` that start in bytes [begin, end)."""

    source: Input
    number: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        """Name for messages; line numbers count from the beginning of the split."""
        return f"{self.source.name} from byte {self.begin}" if self.begin else self.source.name


def split_inputs(inputs: list[Input], split_bytes: int = _SPLIT_BYTES) -> list[Split]:
    """Return the splits of all inputs, in the order of their lines."""
    splits = []
    for number, one in enumerate(inputs):
        for begin in range(0, max(1, one.size), split_bytes):
            splits.append(Split(one, number, begin, min(one.size, begin + split_bytes)))
    return splits


@contextmanager
def open_split(split: Split) -> Iterator[tuple[Any, int]]:
    """Yield (a stream of the lines of a split, its offset in the content of the file)."""
    with split.source.open() as stream:
        begin = _start_of_line(stream, split.begin, split.source.size)
        end = _start_of_line(stream, split.end, split.source.size)
        stream.seek(begin)
        yield _Bounded(stream, end - begin), begin


def _start_of_line(stream: Any, position: int, size: int) -> int:
    """Return the start of the first line at or after `position`."""
    if position == 0 or position >= size:
        return min(position, size)
    stream.seek(position - 1)
    buffer = bytearray(_LOOK)
    at = position - 1
    while count := stream.readinto(memoryview(buffer)):
        found = buffer.find(b"\n", 0, count)
        if found >= 0:
            return at + found + 1
        at += count
    return size


@dataclass
class _Bounded:
    """The next `left` bytes of a stream."""

    stream: Any
    left: int

    def readinto(self, buffer: memoryview, /) -> int | None:
        wanted = min(len(buffer), self.left)
        count = self.stream.readinto(buffer[:wanted]) if wanted else 0
        self.left -= count or 0
        return count
