"""Lines of ``<base64>TAB<label>``: cut from bytes, checked and read without a Python step a line.

Blank lines, CRLF, a UTF-8 byte order mark and a missing last newline are accepted. Everything else that is
not base64, one tab and a whole number is a bad line, named by file and line. `plsc/data/native/lines.c` does
the same in one pass; what is here says what it must return, and is used where the library is not.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from plsc.data.native import lines as native
from plsc.errors import DataError

MAX_LABEL_DIGITS = 18  # all such numbers fit int64
MAX_LINE_BYTES = (
    64 * 2**20 * 4 // 3 + MAX_LABEL_DIGITS + 4
)  # base64 of the largest image, tab, label
BOM = b"\xef\xbb\xbf"

_SCAN_BYTES = 2**18  # of a piece that is searched for newlines: it and its mask stay in the cache
_FEW = 96  # newlines in a piece: from there on numpy is the faster one
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


class _Scratch(threading.local):
    """For each thread, room for the marks of a piece that is searched: as bytes, and as array."""

    def __init__(self) -> None:
        self.marks = bytearray(_SCAN_BYTES)
        self.array = np.frombuffer(self.marks, dtype=bool)


_scratch = _Scratch()


def find_newlines(data: np.ndarray) -> np.ndarray:
    """Return the positions of the newlines in uint8 data, int64."""
    functions = native.functions()
    if functions is not None:
        return native.find_newlines(functions[0], data)
    return find_newlines_plainly(data)


def find_newlines_plainly(data: np.ndarray) -> np.ndarray:
    """Do the same without the library."""
    found = [
        _find_in_piece(data[begin : begin + _SCAN_BYTES]) + begin
        for begin in range(0, len(data), _SCAN_BYTES)
    ]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def _find_in_piece(piece: np.ndarray) -> np.ndarray:
    """Mark the newlines, then look for the marks: one by one if they are few, else all at once."""
    size = len(piece)
    marks = _scratch.array[:size]
    np.equal(piece, 10, out=marks)
    find = _scratch.marks.find
    found: list[int] = []
    at = find(1, 0, size)
    while at >= 0:
        found.append(at)
        if len(found) == _FEW:
            return np.flatnonzero(marks)
        at = find(1, at + 1, size)
    return np.array(found, dtype=np.int64)


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
    functions = native.functions()
    if functions is None:
        rows, suspects = _cut_plainly(data, begin, newlines, first_number)
    else:
        rows, suspects = native.read_lines(
            functions[1], data, begin, newlines, first_number, MAX_LINE_BYTES
        )
    starts, ends, tabs, labels, numbers = rows
    blanks = len(newlines) - len(starts)
    lines = Lines(data, starts, ends, tabs, labels, numbers, blanks, [])
    if suspects:
        _look_closer(lines, np.flatnonzero(lines.tabs < 0), name, skip_bad)
    return lines


def _cut_plainly(
    data: np.ndarray, begin: int, newlines: np.ndarray, first_number: int
) -> tuple[list[np.ndarray], int]:
    """Return (starts, ends, tabs, labels, numbers of the lines that are not blank; how many tabs are -1)."""
    starts = np.empty(len(newlines), dtype=np.int64)
    starts[:1], starts[1:] = begin, newlines[:-1] + 1
    ends = newlines.astype(np.int64, copy=True)
    has_return = (ends > starts) & (data[ends - 1] == 13)
    ends -= has_return
    numbers = np.arange(first_number, first_number + len(starts))
    keep = ends > starts
    if not keep.all():
        starts, ends, numbers = starts[keep], ends[keep], numbers[keep]
    labels, tabs = _read_labels(data, starts, ends)
    tabs[(tabs <= starts) | (ends - starts > MAX_LINE_BYTES)] = -1
    return [starts, ends, tabs, labels, numbers], int((tabs < 0).sum())


def _read_labels(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (labels, tabs): the digits at the line's end and the tab before them; -1 where unlike that."""
    labels = np.zeros(len(starts), dtype=np.int64)
    tabs = np.full(len(starts), -1, dtype=np.int64)
    active = np.arange(len(starts))
    scale = 1
    for digits in range(MAX_LABEL_DIGITS + 1):
        at = ends[active] - 1 - digits
        is_inside = at >= starts[active]
        active, at = active[is_inside], at[is_inside]
        if not len(active):
            break
        characters = data[at]
        if digits:
            is_tab = characters == 9
            tabs[active[is_tab]] = at[is_tab]
        values = characters - np.uint8(48)  # wraps: what is no digit is over 9
        is_digit = values < 10
        active = active[is_digit]
        if digits < MAX_LABEL_DIGITS:
            labels[active] += values[is_digit].astype(np.int64) * scale
            scale *= 10
    return labels, tabs


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
    if not label.isdigit():
        if label[:1] == b"-" and label[1:].isdigit():
            raise ValueError(f"a label must be 0 or more, got {_excerpt(label)}")
        raise ValueError(f"a label must be a whole number, got {_excerpt(label)}")
    if len(label) > MAX_LABEL_DIGITS:
        raise ValueError(f"the label is too large: {_excerpt(label)}")
    return len(data), int(label)


def _excerpt(text: bytes) -> str:
    shown = text[:_EXCERPT].decode("ascii", "backslashreplace")
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    return f"'{shown}{'...' if len(text) > _EXCERPT else ''}'"
