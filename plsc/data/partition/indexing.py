"""Where all lines of plain files are: found in pieces by several threads.

The files are mapped, and what is usual in them is found there, by C. A piece that holds anything else, and
all of them where there is no library, are read by `LineReader`, which knows what to do about it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from plsc.data.line_reader import Buffers, LineReader, LongLine
from plsc.data.lines import MAX_LINE_BYTES
from plsc.data.native import search
from plsc.data.native.partition import truncation_caught
from plsc.data.partition.checksum import checksum, factors
from plsc.data.partition.counts import Counts, InputCount
from plsc.data.partition.files import map_file
from plsc.data.partition.inputs import Input
from plsc.data.partition.parallel import map_in_order
from plsc.data.partition.split import Split, open_split, split_at_lines
from plsc.errors import DataError

BLOCK_BYTES = 2**20  # read at once: it is searched, summed and cut while it is in the cache
_PIECE_BYTES = 2**24  # that a thread takes


class TooManyLines(Exception):
    """There are more lines than the index may hold."""


@dataclass
class Index:
    """Lines of the inputs, in their order: files int32, starts and ends (newline excluded) int64.

    memories: the files, mapped, uint8.
    """

    files: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    memories: list[np.ndarray]


@dataclass
class _Found:
    """What a piece of a file holds."""

    count: InputCount
    starts: list[np.ndarray] = field(default_factory=list)
    ends: list[np.ndarray] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def add(self, starts: np.ndarray, ends: np.ndarray) -> None:
        """Add the places of lines, int64."""
        self.starts.append(starts)
        self.ends.append(ends)
        self.count.lines += len(starts)


class Indexer:
    """Reads and checks all lines, at most `room` of them."""

    def __init__(
        self, workers: int, room: int, skip_bad: bool, on_bytes: Callable[[int], None]
    ) -> None:
        self._workers = workers
        self._room = room
        self._skip_bad = skip_bad
        self._on_bytes = on_bytes
        self._kept = threading.local()  # each thread's buffers, for its next piece
        self._memories: list[np.ndarray] = []
        self._lines = 0
        self._lock = threading.Lock()

    def run(self, inputs: list[Input]) -> tuple[Index, Counts]:
        """Return the index and what was seen. Raises DataError for a bad line, TooManyLines."""
        # Messages about skipped lines need their numbers, so there each file is read by one thread.
        size = None if self._skip_bad else _PIECE_BYTES
        splits = split_at_lines(inputs, size)
        self._memories = [_map(one) for one in inputs]
        with truncation_caught():
            found = map_in_order(self._workers, self._read, splits)
        counts = Counts([InputCount(one) for one in inputs])
        for split, some in zip(splits, found, strict=True):
            counts.inputs[split.number].add(some.count)
            counts.remember(some.messages)
        starts = [array for some in found for array in some.starts]
        ends = [array for some in found for array in some.ends]
        nothing = np.empty(0, dtype=np.int64)  # for inputs without lines
        places = np.concatenate([nothing, *starts]), np.concatenate([nothing, *ends])
        lines = [one.lines for one in counts.inputs]
        files = np.repeat(np.arange(len(inputs), dtype=np.int32), lines)
        return Index(files, *places, self._memories), counts

    def _read(self, split: Split) -> _Found:
        found = self._search(split)
        if found is not None:
            return found
        try:
            return self._read_lines(split)
        except DataError:
            if split.begin == 0:
                raise
        # A bad line: its number counts from the beginning of the file.
        self._read_lines(Split(split.source, split.number, 0, split.source.size))
        raise DataError(
            f"{split.source.name} changed while it was read; start again when it is whole"
        )

    def _search(self, split: Split) -> _Found | None:
        """Find the lines in the mapped file; None if they are not all usual, or there is no library."""
        library = search.functions()
        if library is None:
            return None
        found = _Found(InputCount(split.source))
        count, data = found.count, self._memories[split.number]
        try:
            for lines in search.search_lines(
                library, data, split.begin, split.end, MAX_LINE_BYTES, factors()
            ):
                found.add(lines.starts, lines.ends)
                count.blanks += lines.blanks
                count.checksum = (count.checksum + lines.checksum) % 2**64
                self._take(len(lines.starts))
        except search.UnusualLine:
            self._take(-count.lines)
            return None
        count.content_bytes = split.end - split.begin
        self._on_bytes(count.content_bytes)
        return found

    def _read_lines(self, split: Split) -> _Found:
        found = _Found(InputCount(split.source))
        count = found.count
        buffers = getattr(self._kept, "buffers", None) or Buffers(1, BLOCK_BYTES)
        self._kept.buffers = None  # a reader that fails keeps them

        def on_bytes(piece: np.ndarray, offset: int) -> None:
            count.checksum = (count.checksum + checksum(piece, offset)) % 2**64
            count.content_bytes += len(piece)
            self._on_bytes(len(piece))

        with open_split(split) as (stream, start):
            reader = LineReader(
                stream, split.source.name, buffers, on_bytes, self._skip_bad,
                start=start, keeps_long=False,
            )  # fmt: skip
            for lines in reader:
                before = count.lines
                if isinstance(lines, LongLine):
                    found.add(np.array([lines.start]), np.array([lines.start + lines.length]))
                else:
                    found.add(lines.starts + reader.base, lines.ends + reader.base)
                    buffers.give_back(lines.data)
                self._take(count.lines - before)
        count.blanks, count.skipped = reader.blanks, len(reader.skipped)
        found.messages = reader.skipped
        self._kept.buffers = buffers
        return found

    def _take(self, lines: int) -> None:
        with self._lock:
            self._lines += lines
            if self._lines > self._room:
                raise TooManyLines


def _map(one: Input) -> np.ndarray:
    """Return the bytes of a plain file, uint8."""
    try:
        return map_file(one.location, one.size)
    except (OSError, ValueError) as error:
        raise DataError(f"{one.name} cannot be read: {error}; check the file") from error
