"""Parse lines of ``<base64>TAB<label>``, in a block of bytes or in a stream, block by block.

Blank lines, CRLF, a UTF-8 byte order mark and a missing last newline are accepted. Any other line that is
not text, a tab and an integer is a bad line, reported by file and line. On request, so is a line whose text
has characters that are not of base64. A file without a good line among the first ones is of another format:
an error, also if bad lines are skipped. Messages have nothing of a line: a list of files may name a private
one. `plsc/data/native/lines.c` parses regular lines; `parse_line` parses the others, and all lines if the
library is missing.
"""

from __future__ import annotations

import mmap
import queue
import re
import string
from collections.abc import Callable, Iterator
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pybase64

from plsc.data import native
from plsc.data.files import MAX_LABEL_DIGITS, parse_label
from plsc.errors import DataError
from plsc.storage.regular import without_mark

MAX_LINE_BYTES = 64 * 2**20 * 4 // 3 + MAX_LABEL_DIGITS + 4  # base64 of the largest image, tab, label

_FIRST = 16  # lines by which the format of a file is recognised
_ALPHABET = f"{string.ascii_letters}{string.digits}+/=\t\r\n".encode()
_DATA_URI = re.compile(rb"\s*(data:[^,\t]*;base64,)?\s*", re.IGNORECASE)  # always matches
_LONGEST_URI = 256  # bytes before the base64
_WITHIN_LINE = re.compile(rb"\S[ \t]+\S")
_STANDARD = bytes.maketrans(b"-_", b"+/")
OnBytes = Callable[[np.ndarray, int], bool]

_PIECE_BYTES = 2**19  # read at once, so that on_bytes sees it while it is in the cache


@dataclass
class Lines:
    """Consecutive samples of a file, without blank lines.

    Attributes:
        data: uint8, the bytes that contain the lines.
        starts, ends: int64 [n], range of each line in `data`, without the line end.
        tabs: int64 [n], where the base64 ends.
        labels: int64 [n].
        numbers: int64 [n], line numbers in the file, from 1.
        blanks: number of blank lines left out.
        skipped: messages about bad lines left out.
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


def is_base64(data: np.ndarray) -> bool:
    """Return whether all bytes of uint8 data are characters of base64, tabs or line ends."""
    call = native.function("plsc_is_base64", (c_void_p, c_int64))
    if call is None:
        return not data.tobytes().translate(None, _ALPHABET)
    return bool(call(data.ctypes.data, len(data)))


def decode_base64(text: bytes, pads: bool = False) -> bytes:
    """Return the bytes of base64, also of a data URI, in indented lines, or in the URL-safe alphabet.

    pads: add missing padding; in a file, it means missing data. Raises DataError with the reason.
    """
    try:  # the usual case; the validating decoder is the faster one
        return pybase64.b64decode(text, validate=True)
    except ValueError:
        text = _DATA_URI.sub(b"", text, count=1)  # only at the start: a search takes quadratic time
        is_torn = _WITHIN_LINE.search(text)  # these blanks may have been "+"
        text = text.translate(_STANDARD, b"\r\n" if is_torn else b" \t\r\n")
    try:
        return pybase64.b64decode(text + b"=" * (-len(text) % 4 * pads), validate=True)
    except ValueError as error:
        raise DataError(f"the image is not base64 ({error}); fix the text", kind="base64") from None


def _has_base64(text: np.ndarray) -> bool:
    """Do what `is_base64` does, but accept what `decode_base64` does; in pieces, as a line may be long."""
    if is_base64(text):
        return True
    head = text[:_LONGEST_URI].tobytes()
    pieces = range(len(head) - len(_DATA_URI.sub(b"", head, count=1)), len(text), _PIECE_BYTES)
    return not any(text[at : at + _PIECE_BYTES].tobytes().translate(None, _ALPHABET + b"-_") for at in pieces)


def read_lines(
    data: np.ndarray,
    begin: int,
    newlines: np.ndarray,
    name: str,
    first_number: int,
    skip_bad: bool = False,
    is_strict: bool = False,
) -> Lines:
    """Return the samples whose lines start at `begin` and end at the newlines.

    Args:
        data: uint8, contiguous.
        newlines: int64, ascending. `len(data)` may stand for a missing last newline.
        name: file name for messages.
        first_number: number of the first line in the file.
        skip_bad: leave out bad lines; otherwise the first one raises DataError.
        is_strict: a line with other characters than base64 is bad. Slow: pass False if `is_base64(data)`.
    """
    found = native.read_lines(data, begin, newlines, first_number, MAX_LINE_BYTES)
    rows, suspects = found or _cut_reference(data, begin, newlines, first_number)
    starts, ends, tabs, labels, numbers = rows
    blanks = len(newlines) - len(starts)
    lines = Lines(data, starts, ends, tabs, labels, numbers, blanks, [])
    if suspects or is_strict:
        _parse_suspects(lines, np.flatnonzero((lines.tabs < 0) | is_strict), name, skip_bad, is_strict)
    if first_number == 1 and (len(lines) or lines.skipped):
        first = slice(np.searchsorted(lines.numbers, _FIRST + 1))
        texts = zip(lines.starts[first].tolist(), lines.tabs[first].tolist(), strict=True)
        if not any(_has_base64(data[start:tab]) for start, tab in texts):
            raise DataError(f"{name}: no line of the first {_FIRST} is '<base64>TAB<label>'; fix the file")
    return lines


def _cut_reference(
    data: np.ndarray, begin: int, newlines: np.ndarray, first_number: int
) -> tuple[np.ndarray, int]:
    """Do what `native.read_lines` does, but leave every line to `parse_line` by setting its tab to -1."""
    starts = np.append(begin, newlines[:-1] + 1)[: len(newlines)]
    ends = newlines - ((newlines > starts) & (data[newlines - 1] == 13))
    numbers = np.arange(first_number, first_number + len(starts))
    rows = np.stack([starts, ends, np.full_like(ends, -1), np.zeros_like(ends), numbers])
    rows = rows[:, ends > starts]
    return rows, rows.shape[1]


def _parse_suspects(lines: Lines, suspects: np.ndarray, name: str, skip_bad: bool, is_strict: bool) -> None:
    keep = np.ones(len(lines), dtype=bool)
    for index in suspects.tolist():
        start, end, tab = (int(one[index]) for one in (lines.starts, lines.ends, lines.tabs))
        try:
            if end - start > MAX_LINE_BYTES:
                raise DataError(f"the line is longer than {MAX_LINE_BYTES} bytes; is it base64 of an image?")
            line = lines.data[start:end]
            parsed = (tab - start, lines.labels[index]) if tab >= 0 else parse_line(line.tobytes())
            if parsed and is_strict and not _has_base64(line[: parsed[0]]):
                raise DataError("the text before the tab is not base64")
        except DataError as problem:
            message = f"{name}:{lines.numbers[index]}: {problem}"
            if not skip_bad:
                raise DataError(f"{message}; fix or remove the line") from None
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


def parse_line(line: bytes) -> tuple[int, int] | None:
    """Return (end of the base64, label) of a line, None if it is blank; DataError describes a bad line.

    The reference implementation, used for lines that the fast parser does not accept: blanks after the label,
    and bad lines.
    """
    text = line.rstrip(b" \t\r")
    if not text:
        return None
    data, _, label = text.rpartition(b"\t")
    if not data or b"\t" in data or b"\r" in data:
        raise DataError("expected '<base64>TAB<label>' in one line, as of base64 -w0")
    return len(data), parse_label(label)


def anonymous(size: int) -> np.ndarray:
    """Return uint8 memory of the system, which gets it back when the array is deleted.

    malloc keeps freed blocks of up to 32 MiB, so that the next long line would be in memory together with the
    remains of the last one. Pages that are never written take no memory.
    """
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)


class Stream(Protocol):
    """The input of `LineReader`: a raw file, a decompressor, a remote file."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the buffer from its start; return the number of bytes, 0 at the end."""
        ...


class Buffers:
    """A fixed number of buffers that are reused; they bound the memory of a reader.

    Each has 2 * block_bytes of uint8: the stream fills the second half, and the first half has room for the
    start of a line from the block before. longest: largest number of bytes of a single long line.
    """

    def __init__(self, count: int, block_bytes: int, longest: int = MAX_LINE_BYTES) -> None:
        self.block_bytes = block_bytes
        self.longest = longest
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(np.empty(2 * block_bytes, dtype=np.uint8))

    def take(self) -> np.ndarray:
        """Return a free buffer; wait if there is none."""
        return self._free.get()

    def give_back(self, buffer: np.ndarray) -> None:
        """Return a buffer for reuse; nothing read into it may be needed any more."""
        if len(buffer) == 2 * self.block_bytes:  # not the memory of one long line
            self._free.put(buffer)


class LineReader:
    """Iterate over a stream, block by block; a line longer than a block is yielded alone, in its own memory.

    The `data` of Lines must be given back to `buffers`. Raises DataError for the first bad line (or
    one that is too long), unless `skip_bad`.

    Args:
        on_bytes: called with each piece of the stream (uint8) and its offset in the content; returns
            `is_strict` of `read_lines`, from this piece on.
        start: offset in the content where the stream begins; line numbers count from there.
    """

    def __init__(
        self,
        stream: Stream,
        name: str,
        buffers: Buffers,
        on_bytes: OnBytes | None = None,
        skip_bad: bool = False,
        start: int = 0,
    ) -> None:
        self._stream = stream
        self._name = name
        self._buffers = buffers
        self._on_bytes = on_bytes
        self._skip_bad = skip_bad
        self._behind = np.empty(0, dtype=np.uint8)  # bytes read after a long line
        self.offset = start  # offset in the content of the next bytes
        self.base = 0  # add to positions in the `data` of the latest Lines to get positions in the content
        self._is_strict = False

    def __iter__(self) -> Iterator[Lines]:
        block = self._buffers.block_bytes
        carry, number, is_last = np.empty(0, dtype=np.uint8), 1, False
        while not is_last:
            is_first = self.offset == 0
            data = self._buffers.take()
            begin, end = block - len(carry), block + self._fill(data[block:])
            data[begin:block] = carry
            is_last = end < 2 * block
            self.base = self.offset - end
            if is_first:
                head = data[begin : min(end, begin + 4)].tobytes()
                begin += len(head) - len(without_mark(head, self._name))
            newlines = find_newlines(data[block:end]) + block
            if is_last and begin < end and (len(newlines) == 0 or newlines[-1] != end - 1):
                newlines = np.append(newlines, end)  # the last newline is missing
            if len(newlines) == 0 and not is_last:
                self.base += begin
                data, carry = self._read_long(data, begin, number), data[:0]
                begin, newlines = 0, np.array([len(data) - (data[-1] == ord("\n"))])
            else:
                rest = int(newlines[-1]) + 1 if len(newlines) else begin
                carry = data[rest:end].copy()
            lines = read_lines(data, begin, newlines, self._name, number, self._skip_bad, self._is_strict)
            number += len(newlines)
            yield lines
            del lines, data  # free the memory; the next line may be as long

    def _read_long(self, buffer: np.ndarray, begin: int, number: int) -> np.ndarray:
        """Return the line that fills `buffer` from `begin`, read to its end.

        Of a line that is too long, only enough to detect that is kept. Its end is searched only if bad lines
        are skipped.
        """
        fresh, length = buffer[: self._buffers.block_bytes], len(buffer) - begin
        line = anonymous(MAX_LINE_BYTES + len(buffer) + len(fresh))
        line[:length] = buffer[begin:]
        while True:
            piece = fresh[: self._fill(fresh)]
            found = find_newlines(piece)
            stop = int(found[0]) + 1 if len(found) else len(piece)
            is_too_long = length > MAX_LINE_BYTES + len("\r\n")
            if not is_too_long:
                line[length : length + stop] = piece[:stop]
                length += stop
            if self._buffers.longest < length <= MAX_LINE_BYTES:
                raise DataError(
                    f"{self._name}:{number}: the line is longer than {self._buffers.longest} bytes"
                )
            if len(found) or len(piece) < len(fresh) or (is_too_long and not self._skip_bad):
                self._behind = piece[stop:].copy()
                self.offset -= len(self._behind)
                self._buffers.give_back(buffer)
                return line[:length]

    def _fill(self, fresh: np.ndarray) -> int:
        """Fill `fresh` from the stream; return the number of bytes, less than requested only at its end."""
        got = len(self._behind)
        fresh[:got], self._behind = self._behind, self._behind[:0]
        self.offset += got
        while got < len(fresh):
            piece = fresh[got : got + _PIECE_BYTES]
            count = self._stream.readinto(piece.data)
            if not count:
                break
            if self._on_bytes is not None:
                self._is_strict = self._on_bytes(piece[:count], self.offset)
            got += count
            self.offset += count
        return got
