"""Lines of ``<base64>TAB<label>``: cut from bytes, checked and read without a Python step per line.

Blank lines, CRLF, a UTF-8 byte order mark and a missing last newline are accepted. Everything else that is
not base64, one tab and a whole number is a bad line, named by file and line. `plsc/data/native/lines.c` reads
the usual lines; `parse_line` the others, and all where the library is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plsc.data import native
from plsc.errors import DataError

MAX_LABEL_DIGITS = 18  # all such numbers fit int64
MAX_LINE_BYTES = (
    64 * 2**20 * 4 // 3 + MAX_LABEL_DIGITS + 4
)  # base64 of the largest image, tab, label
BOM = b"\xef\xbb\xbf"

_EXCERPT = 60


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
