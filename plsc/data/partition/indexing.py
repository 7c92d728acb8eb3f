"""Where all lines of plain files are: read in pieces by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from plsc.data.line_reader import Buffers, LineReader, LongLine
from plsc.data.partition.checksum import checksum
from plsc.data.partition.counts import Counts, InputCount
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
    """Lines of the inputs, in their order: files int32, starts and ends (newline excluded) int64."""

    files: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


@dataclass
class _Found:
    """What a piece of a file holds."""

    count: InputCount
    starts: list[np.ndarray] = field(default_factory=list)
    ends: list[np.ndarray] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


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
        self._lines = 0
        self._lock = threading.Lock()

    def run(self, inputs: list[Input]) -> tuple[Index, Counts]:
        """Return the index and what was seen. Raises DataError for a bad line, TooManyLines."""
        # Messages about skipped lines need their numbers, so there each file is read by one thread.
        size = None if self._skip_bad else _PIECE_BYTES
        splits = split_at_lines(inputs, size)
        found = map_in_order(self._workers, self._read, splits)
        counts = Counts([InputCount(one) for one in inputs])
        for split, some in zip(splits, found, strict=True):
            counts.inputs[split.number].add(some.count)
            counts.remember(some.messages)
        starts = [array for some in found for array in some.starts]
        ends = [array for some in found for array in some.ends]
        if not starts:
            nothing = np.empty(0, dtype=np.int64)
            return Index(nothing.astype(np.int32), nothing, nothing), counts
        lines = [one.lines for one in counts.inputs]
        files = np.repeat(np.arange(len(inputs), dtype=np.int32), lines)
        return Index(files, np.concatenate(starts), np.concatenate(ends)), counts

    def _read(self, split: Split) -> _Found:
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
                if isinstance(lines, LongLine):
                    found.starts.append(np.array([lines.start]))
                    found.ends.append(np.array([lines.start + lines.length]))
                else:
                    found.starts.append(lines.starts + reader.base)
                    found.ends.append(lines.ends + reader.base)
                    buffers.give_back(lines.data)
                count.lines += len(found.starts[-1])
                self._take(len(found.starts[-1]))
        count.blanks, count.skipped = reader.blanks, len(reader.skipped)
        found.messages = reader.skipped
        self._kept.buffers = buffers
        return found

    def _take(self, lines: int) -> None:
        with self._lock:
            self._lines += lines
            if self._lines > self._room:
                raise TooManyLines
