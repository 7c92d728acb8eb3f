"""The way for sets that fit the memory: an index of the lines of mapped files, gathered in the new order."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.data.lines import BOM, Lines, find_newlines, line_slices, read_lines
from plsc.data.partition.checksum import checksum
from plsc.data.partition.counts import Counts, InputCount
from plsc.data.partition.inputs import Input
from plsc.data.partition.memory import BYTES_A_LINE
from plsc.data.partition.order import line_keys
from plsc.data.partition.padding import Padding
from plsc.data.partition.parallel import map_in_order
from plsc.data.partition.parts import Parts, Run
from plsc.data.partition.progress import Progress
from plsc.errors import DataError

_PIECE = 2**21  # bytes that one task searches
_CACHED = 2**18  # searched and summed while it is in the cache
_LINES = 2**16  # read at once
_TASK_LINES = 2**14  # written by one task
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14: maps the pages of a range at once
_SPARE = 8 * 2**20


class TooManyLines(Exception):
    """The index does not fit beside the data."""


def fits(inputs: list[Input], memory: int, workers: int) -> bool:
    """Whether the inputs may be mapped as a whole; their index may still turn out too large."""
    room = memory - _SPARE - workers * 4 * _PIECE
    return all(one.is_plain for one in inputs) and sum(one.size for one in inputs) <= room


@dataclass
class Index:
    """Where all lines are: in which of the views, and from where to where in it, newline excluded."""

    views: list[memoryview]
    files: np.ndarray  # int32 [n]
    starts: np.ndarray  # int64 [n]
    ends: np.ndarray  # int64 [n]
    is_closed: bool  # all lines by a newline alone

    def slices(self, chosen: np.ndarray) -> list[memoryview]:
        """Return the bytes of these lines, in this order, each closed by one newline."""
        files, starts, ends = self.files[chosen], self.starts[chosen], self.ends[chosen]
        if len(self.views) == 1 or (files[0] == files[-1] and (files == files[0]).all()):
            return line_slices(self.views[int(files[0])], starts, ends)
        views = self.views
        if self.is_closed:
            where = zip(files.tolist(), starts.tolist(), (ends + 1).tolist(), strict=True)
            return [views[file][start:stop] for file, start, stop in where]
        slices = []
        for file, start, end in zip(files.tolist(), starts.tolist(), ends.tolist(), strict=True):
            slices += [views[file][start:end], memoryview(b"\n")]
        return slices


def index_inputs(
    inputs: list[Input], memory: int, workers: int, skip_bad: bool, progress: Progress
) -> tuple[Index, Counts]:
    """Find and check all lines. Raises DataError for a bad one, TooManyLines if the index grows too large."""
    room = (memory - _SPARE - sum(one.size for one in inputs)) // BYTES_A_LINE
    searcher = _Searcher(room, progress.add)
    counts = Counts()
    nothing = np.empty(0, dtype=np.int64)
    index = Index([], nothing, nothing, nothing, is_closed=True)
    files, starts, ends = [], [], []
    for number, one in enumerate(inputs):
        mapped = _map(one)
        index.views.append(memoryview(mapped))
        data = np.frombuffer(mapped, dtype=np.uint8)
        newlines, total = searcher.search(mapped, workers)
        count = InputCount(one, content_bytes=len(data), checksum=total)
        for lines in _read_all(data, newlines, one.name, skip_bad):
            starts.append(lines.starts)
            ends.append(lines.ends)
            files.append(np.full(len(lines), number, dtype=np.int32))
            count.lines += len(lines)
            count.blanks += lines.blanks
            count.skipped += len(lines.skipped)
            counts.remember(lines.skipped)
            index.is_closed &= _all_closed(data, lines.ends)
        counts.inputs.append(count)
    if starts:
        index.files, index.starts, index.ends = map(np.concatenate, (files, starts, ends))
    return index, counts


def gather(index: Index, seed: int, parts: Parts, padding: Padding, workers: int) -> None:
    """Write all lines to the parts in the order of their keys, then the padding."""
    order = np.argsort(line_keys(seed, np.arange(len(index.starts)))).astype(np.int64)
    lengths = (index.ends - index.starts + 1)[order]
    runs = parts.claim(0, lengths)
    for run in runs:
        padding.note(run, order, lengths)

    def slices(begin: int, end: int) -> list[memoryview]:
        return index.slices(order[begin:end])

    tasks = [task for run in runs for task in _cut(run, lengths)]
    map_in_order(workers, lambda task: parts.write(task, slices, lengths), tasks)
    padding.copy(parts)


def _cut(run: Run, lengths: np.ndarray) -> list[Run]:
    """Cut a run, so that several threads can share it."""
    tasks, offset = [], run.offset
    for begin in range(run.begin, run.end, _TASK_LINES):
        end = min(run.end, begin + _TASK_LINES)
        tasks.append(Run(run.rank, offset, begin, end))
        offset += int(lengths[begin:end].sum())
    return tasks


def _map(one: Input) -> mmap.mmap | bytes:
    if one.size == 0:
        return b""  # nothing cannot be mapped
    try:
        with Path(one.location).open("rb") as file:
            return mmap.mmap(file.fileno(), one.size, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise DataError(f"{one.name} cannot be read: {error}; check the file") from error


class _Searcher:
    """Finds newlines, in at most `room` of them, and sums the bytes on the way."""

    def __init__(self, room: int, on_bytes: Callable[[int], None]) -> None:
        self._room = room
        self._on_bytes = on_bytes
        self._found = 0
        self._lock = threading.Lock()

    def search(self, mapped: mmap.mmap | bytes, workers: int) -> tuple[np.ndarray, int]:
        """Return (positions of newlines, checksum)."""
        pieces = range(0, len(mapped), _PIECE)
        found = map_in_order(workers, lambda begin: self._piece(mapped, begin), pieces)
        newlines = [positions for positions, _ in found]
        total = sum(part for _, part in found) % 2**64
        return np.concatenate(newlines) if newlines else np.empty(0, dtype=np.int64), total

    def _piece(self, mapped: mmap.mmap | bytes, begin: int) -> tuple[np.ndarray, int]:
        data = np.frombuffer(mapped, dtype=np.uint8)
        end = min(len(data), begin + _PIECE)
        if isinstance(mapped, mmap.mmap):
            with contextlib.suppress(OSError):  # an older kernel maps them one by one
                mapped.madvise(_POPULATE_READ, begin, end - begin)
        newlines, total = [], 0
        for at in range(begin, end, _CACHED):
            piece = data[at : min(end, at + _CACHED)]
            newlines.append(find_newlines(piece) + at)
            total += checksum(piece, at)
        positions = np.concatenate(newlines)
        with self._lock:
            self._found += len(positions)
            if self._found > self._room:
                raise TooManyLines
        self._on_bytes(end - begin)
        return positions, total


def _read_all(data: np.ndarray, newlines: np.ndarray, name: str, skip_bad: bool) -> list[Lines]:
    begin = len(BOM) if data[: len(BOM)].tobytes() == BOM else 0
    if len(data) > begin and (len(newlines) == 0 or newlines[-1] != len(data) - 1):
        newlines = np.append(newlines, len(data))  # the last newline is missing
    found = []
    for first in range(0, len(newlines), _LINES):
        some = newlines[first : first + _LINES]
        found.append(read_lines(data, begin, some, name, first + 1, skip_bad))
        begin = int(some[-1]) + 1
    return found


def _all_closed(data: np.ndarray, ends: np.ndarray) -> bool:
    if not len(ends):
        return True
    return bool(ends[-1] < len(data) and (data[ends] == 10).all())
