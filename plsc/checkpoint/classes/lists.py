"""Lists of classes from files: one or two class numbers a line, checked, with the line that is wrong."""

from __future__ import annotations

import hashlib
import os
import stat
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from plsc.errors import DataError

Given = str | os.PathLike[str] | Sequence[int] | Mapping[int, int] | np.ndarray

_MAX_DIGITS = 18  # all such numbers fit int64
_LONGEST_LINE = 200  # bytes, of two numbers and much space
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ClassList:
    """Class numbers, int64 [n, columns], each in 0..classes - 1.

    name: what messages call it; sha256: of the file's bytes, or of the lines that the numbers would make.
    """

    name: str
    numbers: np.ndarray
    sha256: str

    def wrong(self, row: int, what: str) -> DataError:
        """Return the error about a row, which is line row + 1 of a file."""
        return DataError(f"{self.name}:{row + 1}: {what}")


def read_class_list(given: Given, what: str, columns: int, classes: int) -> ClassList:
    """Return the numbers of a file, or those given in Python; what: their name there.

    A file has `columns` numbers a line with white space between them; blank lines may only end it. It
    is read in memory of 8 bytes a number.

    Raises:
        DataError: no such file, a line that is not so, a class out of range, more lines than classes, none.
    """
    if isinstance(given, (str, os.PathLike)):
        name = os.fspath(given)
        flat, sha256 = _read(Path(name), columns, classes)
        numbers = np.asarray(flat).reshape(-1, columns)
    else:
        name = what
        numbers = _from_python(given, what, columns)
        sha256 = hashlib.sha256(_as_lines(numbers)).hexdigest()
    found = ClassList(name, numbers, sha256)
    if not len(numbers):
        raise DataError(f"{name} names no class; expected one a line")
    outside = np.flatnonzero(((numbers < 0) | (numbers >= classes)).any(axis=1))
    if len(outside):
        row = numbers[outside[0]]
        value = row[(row < 0) | (row >= classes)][0]
        raise found.wrong(int(outside[0]), f"class {value} is outside 0..{classes - 1}")
    return found


def check_distinct(found: ClassList, values: np.ndarray, what: str = "") -> None:
    """Raise DataError if a class comes twice among `values`, one for each row; what: is said behind it."""
    order = np.argsort(values, kind="stable")
    same = np.flatnonzero(values[order[1:]] == values[order[:-1]])
    if len(same):
        # Of all that come twice, the first in the file.
        second = int(order[same + 1].min())
        first = int(np.flatnonzero(values == values[second])[0])
        raise found.wrong(
            second, f"class {values[second]} comes again{what}, after line {first + 1}"
        )


def _read(path: Path, columns: int, classes: int) -> tuple[array[int], str]:
    try:
        with _open(path) as file:
            return _parse(path, file, columns, classes)
    except OSError as error:
        raise DataError(f"the list {path} cannot be read: {error.strerror}") from error


def _open(path: Path) -> BinaryIO:
    # Opening a named pipe without a writer would wait for ever; O_NONBLOCK does not.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"the list {path} is no plain file")
    return os.fdopen(descriptor, "rb")


def _parse(path: Path, file: BinaryIO, columns: int, classes: int) -> tuple[array[int], str]:
    numbers = array("q")
    digest = hashlib.sha256()
    blank = 0  # the first blank line
    for line_number, line in enumerate(_lines(file), start=1):
        digest.update(line)
        words = (line.removeprefix(_BOM) if line_number == 1 else line).split()
        if not words and len(line) < _LONGEST_LINE:
            blank = blank or line_number
            continue
        is_good = (
            len(line) < _LONGEST_LINE
            and len(words) == columns
            and all(word.isdigit() and len(word) <= _MAX_DIGITS for word in words)
        )
        if blank or not is_good:
            raise _bad_line(path, blank or line_number, b"" if blank else line, columns)
        if len(numbers) == classes * columns:
            raise DataError(f"{path} has more lines than there are classes ({classes})")
        numbers.extend(map(int, words))
    return numbers, digest.hexdigest()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines; of one that is too long, which is a bad line, the beginning."""
    while line := file.readline(_LONGEST_LINE):
        yield line


def _bad_line(path: Path, number: int, line: bytes, columns: int) -> DataError:
    expected = "a class number" if columns == 1 else "two class numbers, 'from to'"
    got = ascii(line.decode("utf-8", "replace").rstrip("\r\n")[:60]) if line else "a blank line"
    return DataError(f"{path}:{number}: expected {expected}, got {got}")


def _from_python(
    given: Sequence[int] | Mapping[int, int] | np.ndarray, what: str, columns: int
) -> np.ndarray:
    values = list(given.items()) if isinstance(given, Mapping) else given
    try:
        numbers = np.asarray(values)
    except ValueError:
        numbers = np.empty(0, dtype=object)
    wanted = 1 if columns == 1 else 2
    if numbers.size == 0 and isinstance(values, (list, tuple, np.ndarray)) and len(values) == 0:
        return np.empty((0, columns), dtype=np.int64)
    if numbers.dtype.kind not in "iu" or numbers.ndim != wanted or numbers.size % columns:
        expected = "a list of class numbers" if columns == 1 else "a mapping of class numbers"
        raise DataError(f"{what} is {str(given)[:60]!r}; expected a path, or {expected}")
    if numbers.dtype == np.uint64 and numbers.max() >= 2**63:
        raise DataError(f"{what} has the class {numbers.max()}, which no checkpoint has")
    return numbers.astype(np.int64).reshape(-1, columns)


def _as_lines(numbers: np.ndarray) -> bytes:
    return "".join(" ".join(map(str, row)) + "\n" for row in numbers.tolist()).encode()
