"""Lines of ``<base64>TAB<label>``: of a block of bytes, and of a stream, block by block.

Blank lines, CRLF, a UTF-8 byte order mark and a missing last newline are accepted. Everything else that is
not base64, one tab and a whole number is a bad line, named by file and line. `plsc/data/native/lines.c` reads
the usual lines; `parse_line` the others, and all where the library is not.
"""

from __future__ import annotations

import queue
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from plsc.data import native
from plsc.errors import DataError

MAX_LABEL_DIGITS = 18  # all such numbers fit int64
MAX_LINE_BYTES = (
    64 * 2**20 * 4 // 3 + MAX_LABEL_DIGITS + 4
)  # base64 of the largest image, tab, label
BOM = b"\xef\xbb\xbf"

_EXCERPT = 60
OnBytes = Callable[[np.ndarray, int], None]

_PIECE_BYTES = 2**19  # read at once: on_bytes sees it while it is in the cache
_TAIL = 2 * MAX_LABEL_DIGITS + 8  # of a long line: holds the tab and the label of a good one


@dataclass
class Lines:
    """Neighbouring samples of a file, blank lines left out.

    data: uint8, the bytes they lie in. starts, ends: int64 [n], their first byte and the one after
    their last in `data`, line end excluded. tabs: int64 [n], where the base64 ends. labels: int64 [n].
    numbers: int64 [n], their line numbers in the file, from 1. blanks: blank lines left out.
    skipped: bad lines left out, as messages.
    """

    data: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    tabs: np.ndarray
    labels: np.ndarray
    numbers: np.ndarray
    blanks: int
    skipped: list[str]

    def __len__(self) -> int:
        return len(self.starts)


def find_newlines(data: np.ndarray) -> np.ndarray:
    """Return the positions of the newlines in uint8 data, int64."""
    found = native.find_newlines(data)
    return np.flatnonzero(data == 10) if found is None else found


def read_lines(
    data: np.ndarray,
    begin: int,
    newlines: np.ndarray,
    name: str,
    first_number: int,
    skip_bad: bool = False,
) -> Lines:
    """Return the samples whose lines start at `begin` and end at the newlines.

    data: uint8, contiguous. newlines: int64, rising; `len(data)` may stand for a last one that is missing.
    The first line is number `first_number` of file `name`. Raises DataError for the first bad line,
    unless `skip_bad`.
    """
    found = native.read_lines(data, begin, newlines, first_number, MAX_LINE_BYTES)
    rows, suspects = found or _cut_plainly(data, begin, newlines, first_number)
    starts, ends, tabs, labels, numbers = rows
    blanks = len(newlines) - len(starts)
    lines = Lines(data, starts, ends, tabs, labels, numbers, blanks, [])
    if suspects:
        _look_closer(lines, np.flatnonzero(lines.tabs < 0), name, skip_bad)
    return lines


def _cut_plainly(
    data: np.ndarray, begin: int, newlines: np.ndarray, first_number: int
) -> tuple[np.ndarray, int]:
    """Return what `native.read_lines` does, with every line left to the naive reader: its tab is -1."""
    starts = np.append(begin, newlines[:-1] + 1)[: len(newlines)]
    ends = newlines - ((newlines > starts) & (data[newlines - 1] == 13))
    numbers = np.arange(first_number, first_number + len(starts))
    rows = np.stack([starts, ends, np.full_like(ends, -1), np.zeros_like(ends), numbers])
    rows = rows[:, ends > starts]
    return rows, rows.shape[1]


def _look_closer(lines: Lines, suspects: np.ndarray, name: str, skip_bad: bool) -> None:
    keep = np.ones(len(lines), dtype=bool)
    for index in suspects.tolist():
        start, end = int(lines.starts[index]), int(lines.ends[index])
        try:
            check_length(end - start)
            parsed = parse_line(lines.data[start:end].tobytes())
        except ValueError as problem:
            message = f"{name}:{lines.numbers[index]}: {problem}"
            if not skip_bad:
                raise DataError(f"{message}; fix the line or take it out") from None
            lines.skipped.append(message)
            keep[index] = False
            continue
        if parsed is None:
            lines.blanks += 1
            keep[index] = False
        else:
            lines.tabs[index], lines.labels[index] = start + parsed[0], parsed[1]
    if not keep.all():
        for field in ("starts", "ends", "tabs", "labels", "numbers"):
            setattr(lines, field, getattr(lines, field)[keep])


def check_length(length: int) -> None:
    """Raise ValueError if a line is longer than that of the largest image."""
    if length > MAX_LINE_BYTES:
        raise ValueError(f"the line is over {MAX_LINE_BYTES} bytes long; is it base64 of an image?")


def parse_line(line: bytes) -> tuple[int, int] | None:
    """Return (where the base64 ends, label) of a line, None if it is blank; ValueError says what is wrong.

    The naive reading, for what the fast one does not accept at once: blanks after the label, and bad lines.
    """
    text = line.rstrip(b" \t\r")
    if not text:
        return None
    data, tab, label = text.rpartition(b"\t")
    if not tab:
        raise ValueError(f"expected '<base64>TAB<label>', there is no tab in {_excerpt(text)}")
    if not data:
        raise ValueError("expected '<base64>TAB<label>', there is nothing before the tab")
    return len(data), parse_label(label)


def parse_label(label: bytes) -> int:
    """Return the whole number of 0 or more that the digits say; ValueError says what is wrong."""
    if not label.isdigit():
        if label[:1] == b"-" and label[1:].isdigit():
            raise ValueError(f"a label must be 0 or more, got {_excerpt(label)}")
        raise ValueError(f"a label must be a whole number, got {_excerpt(label)}")
    if len(label) > MAX_LABEL_DIGITS:
        raise ValueError(f"the label is too large: {_excerpt(label)}")
    return int(label)


def _excerpt(text: bytes) -> str:
    shown = text[:_EXCERPT].decode("ascii", "backslashreplace")
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    return f"'{shown}{'...' if len(text) > _EXCERPT else ''}'"


class Stream(Protocol):
    """What lines are read from: a raw file, a decompressor, a remote file."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the buffer from its start; return how many bytes came, 0 at the end."""
        ...


@dataclass
class LongLine:
    """A sample longer than a block: the first `length` bytes of `file`, line end excluded.

    start: its place in the content. tab: where its base64 ends, counted from its first byte. The file is
    empty if the reader was not to keep what it holds.
    """

    file: IO[bytes]
    start: int
    length: int
    tab: int
    label: int
    number: int


class Buffers:
    """A few buffers that are used again and again; the memory of a reader is theirs.

    Each is 2 block_bytes of uint8: a half that the stream fills, and before it room for the start of a
    line that the block before began.
    """

    def __init__(self, count: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(np.empty(2 * block_bytes, dtype=np.uint8))

    def take(self) -> np.ndarray:
        """Return a free buffer; wait for one to be given back if there is none."""
        return self._free.get()

    def give_back(self, buffer: np.ndarray) -> None:
        """Let the buffer be filled anew: nothing that was read into it is needed any more."""
        self._free.put(buffer)


class LineReader:
    """Iterates over a stream: Lines for each block, LongLine for a sample longer than a block.

    The `data` of Lines is one of `buffers` and must be given back to them. The memory is that of the buffers
    and the numbers of a block's lines, a few dozen bytes for each. on_bytes is called with each piece of the
    stream (uint8) and its offset in the content. start: where in the content the stream begins; line numbers
    count from there. keeps_long: whether what long lines hold is wanted. Raises DataError for the first bad
    line and for one longer than that of the largest image, unless `skip_bad`.
    """

    def __init__(
        self,
        stream: Stream,
        name: str,
        buffers: Buffers,
        on_bytes: OnBytes | None = None,
        skip_bad: bool = False,
        tmp_dir: str | Path | None = None,
        start: int = 0,
        keeps_long: bool = True,
    ) -> None:
        self._stream = stream
        self._name = name
        self._buffers = buffers
        self._on_bytes = on_bytes
        self._skip_bad = skip_bad
        self._tmp_dir = tmp_dir
        self._keeps_long = keeps_long
        self._spool: IO[bytes] | None = None  # a long line whose end has not come yet
        self._spooled = 0
        self._tail = b""  # of that line
        self._spool_start = 0
        self._number = 1  # of the line that comes next
        self.offset = start  # in the content, of what comes next
        self.base = 0  # what makes places in the `data` of the latest Lines places in the content
        self.blanks = 0
        self.skipped: list[str] = []

    def __iter__(self) -> Iterator[Lines | LongLine]:
        block = self._buffers.block_bytes
        carry = np.empty(0, dtype=np.uint8)
        is_last = False
        while not is_last:
            is_first = self.offset == 0
            buffer = self._buffers.take()
            end = block + self._fill(buffer[block:])
            is_last = end < 2 * block
            self.base = self.offset - end
            begin = block - len(carry)
            buffer[begin:block] = carry
            if is_first and buffer[begin : min(end, begin + 3)].tobytes() == BOM:
                begin += 3
            newlines = find_newlines(buffer[block:end]) + block
            is_open = (begin < end or self._spool is not None) and (
                len(newlines) == 0 or newlines[-1] != end - 1
            )
            if is_last and is_open:
                newlines = np.append(newlines, end)  # the last newline is missing
            if self._spool is not None or (len(newlines) == 0 and not is_last):
                stop = int(newlines[0]) if len(newlines) else end
                self._add_to_spool(buffer[begin:stop], begin + self.base)
                if len(newlines):
                    yield from self._end_of_spool()
                begin, newlines = min(stop + 1, end), newlines[1:]
            rest = int(newlines[-1]) + 1 if len(newlines) else begin
            carry = buffer[rest:end].copy()
            if len(newlines) == 0:
                self._buffers.give_back(buffer)
                continue
            lines = read_lines(buffer, begin, newlines, self._name, self._number, self._skip_bad)
            self._number += len(newlines)
            self.blanks += lines.blanks
            self.skipped += lines.skipped
            yield lines

    def _fill(self, fresh: np.ndarray) -> int:
        """Fill `fresh` from the stream; return how many bytes came, fewer only at its end."""
        got = 0
        while got < len(fresh):
            piece = fresh[got : got + _PIECE_BYTES]
            count = self._stream.readinto(piece.data)
            if not count:
                break
            if self._on_bytes is not None:
                self._on_bytes(piece[:count], self.offset)
            got += count
            self.offset += count
        return got

    def _open_spool(self) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=self._tmp_dir) if self._keeps_long else BytesIO()

    def _add_to_spool(self, piece: np.ndarray, start: int) -> None:
        if self._spool is None:
            self._spool = self._open_spool()
            self._spooled, self._spool_start, self._tail = 0, start, b""
        self._spooled += len(piece)
        try:
            check_length(self._spooled)
        except ValueError as problem:
            if not self._skip_bad:
                raise self._error(problem) from None
            return  # only its end is looked for
        self._tail = (self._tail + piece[-_TAIL:].tobytes())[-_TAIL:]
        if self._keeps_long:
            self._spool.write(piece.data)

    def _end_of_spool(self) -> Iterator[LongLine]:
        """Yield the long line, unless it is bad and to be skipped."""
        assert self._spool is not None
        file, number = self._spool, self._number
        self._spool = None
        try:
            check_length(self._spooled)
            tail = self._tail
            length = self._spooled - tail.endswith(b"\r")
            parsed = parse_line(tail)
            if parsed is None:
                raise ValueError("the line ends in blanks, a label is missing")
            tab = self._spooled - len(tail) + parsed[0]
            yield LongLine(file, self._spool_start, length, tab, parsed[1], number)
        except ValueError as problem:
            if not self._skip_bad:
                raise self._error(problem) from None
            self.skipped.append(f"{self._name}:{number}: {problem}")
        finally:
            self._number += 1
            file.close()

    def _error(self, problem: ValueError) -> DataError:
        return DataError(f"{self._name}:{self._number}: {problem}; fix the line or take it out")
