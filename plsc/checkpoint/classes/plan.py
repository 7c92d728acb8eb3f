"""Plans for changing classes: the old number of each new class; and the lists that define them.

The memory of a plan is proportional to the given list, not to the number of classes.
"""

from __future__ import annotations

import hashlib
import operator
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from plsc.errors import DataError, OptionError
from plsc.storage.regular import open_regular, without_mark

ClassNumbers = str | os.PathLike[str] | Sequence[int] | Mapping[int, int] | np.ndarray

_MAP_STEP = 1 << 16
_MAX_DIGITS = 18  # such numbers fit int64


def _none() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Plan:
    """The mapping from `before` old classes to `after` new ones. All arrays are int64.

    Attributes:
        removed: old classes that have no new number, ascending. The others keep their order and are numbered
            densely; new classes follow up to `after`.
        joins: for each of `removed` the old class that it is merged into, -1 for none.
        joined: new numbers of merge targets, ascending, once per merged class.
        members: for each of `joined` the old class that is merged into it.
        order: for `reorder`, the old number of each new class.
    """

    what: str
    before: int
    after: int
    removed: np.ndarray = field(default_factory=_none)
    joins: np.ndarray = field(default_factory=_none)
    joined: np.ndarray = field(default_factory=_none)
    members: np.ndarray = field(default_factory=_none)
    order: np.ndarray | None = None

    @property
    def added(self) -> int:
        """Number of new classes."""
        return self.after - (self.before - len(self.removed))

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Return the old number of each new class in start..stop - 1; -1 if it is new."""
        if self.order is not None:
            return self.order[start:stop]
        new = np.arange(start, stop)
        # removed[i] shifts all new numbers from removed[i] - i.
        below = self.removed - np.arange(len(self.removed))
        old = new + np.searchsorted(below, new, side="right")
        return np.where(old < self.before, old, -1)

    def numbers(self, old: np.ndarray) -> np.ndarray:
        """Return the new numbers of old classes; -1 if dropped."""
        if self.order is not None:
            return self._inverse[old]
        if not len(self.removed):
            return old
        place = np.searchsorted(self.removed, old)
        is_removed = self.removed[np.minimum(place, len(self.removed) - 1)] == old
        if not len(self.joins):
            return np.where(is_removed, -1, old - place)
        stays = np.where(is_removed, self.joins[np.minimum(place, len(self.removed) - 1)], old)
        return stays - np.searchsorted(self.removed, stays)

    @cached_property
    def _inverse(self) -> np.ndarray:
        assert self.order is not None
        inverse = np.empty_like(self.order)
        inverse[self.order] = np.arange(len(inverse))
        return inverse

    def joined_by(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the entries of (joined, members) whose new class is in start..stop - 1."""
        low, high = np.searchsorted(self.joined, [start, stop])
        return self.joined[low:high], self.members[low:high]

    def label_map(self) -> Iterator[bytes]:
        """Yield the lines ``old<TAB>new`` in pieces; dropped classes have no line."""
        for start in range(0, self.before, _MAP_STEP):
            old = np.arange(start, min(self.before, start + _MAP_STEP))
            new = self.numbers(old)
            pairs = zip(old[new >= 0].tolist(), new[new >= 0].tolist(), strict=True)
            yield "".join(f"{a}\t{b}\n" for a, b in pairs).encode()


def plan_grow(before: int, count: int) -> Plan:
    """Return the plan for appending `count` classes; OptionError if it is less than 1."""
    if count < 1:
        raise OptionError(f"grow is {count}; expected the number of new classes, 1 or more")
    return Plan("grow", before, before + count)


def plan_drop(before: int, listed: ClassList) -> Plan:
    """Return the plan for dropping classes. listed: [n, 1]. Raises DataError."""
    dropped = listed.numbers[:, 0]
    check_distinct(listed, dropped)
    after = _check_enough(listed, before - len(dropped), before)
    return Plan("drop", before, after, np.sort(dropped))


def plan_merge(before: int, listed: ClassList) -> Plan:
    """Return the plan for merging classes. listed: [n, 2], from and to. Raises DataError."""
    joining, targets = listed.numbers[:, 0], listed.numbers[:, 1]
    check_distinct(listed, joining, " as a class to merge")
    order = np.argsort(joining)
    removed, joins = joining[order], targets[order]
    place = np.minimum(np.searchsorted(removed, targets), len(removed) - 1)
    wrong = np.flatnonzero(removed[place] == targets)
    if len(wrong):
        row = int(wrong[0])
        source, target, end = joining[row], targets[row], joins[place[row]]
        raise listed.wrong(row, f"class {source} is merged into {target}, which is merged into {end}")
    after = _check_enough(listed, before - len(removed), before)
    new = joins - np.searchsorted(removed, joins)
    by_target = np.argsort(new, kind="stable")
    return Plan("merge", before, after, removed, joins, new[by_target], removed[by_target])


def plan_reorder(before: int, listed: ClassList) -> Plan:
    """Return the plan for a new order. listed: [n, 1], the old number of each new class.

    Raises DataError unless it has every class once.
    """
    order = listed.numbers[:, 0]
    check_distinct(listed, order)
    if len(order) != before:
        raise DataError(f"{listed.name} has {len(order)} of {before} classes; expected every class once")
    return Plan("reorder", before, before, order=order)


def _check_enough(listed: ClassList, after: int, before: int) -> int:
    if after < 2:
        raise DataError(f"{listed.name} leaves {after} of {before} classes; a classifier needs at least two")
    return after


# Lists of classes, from files or from Python.


@dataclass(frozen=True)
class ClassList:
    """Class numbers, int64 [n, columns], each in 0..classes - 1.

    name: for messages. sha256: of the file, or of the lines that a file with these numbers would have.
    """

    name: str
    numbers: np.ndarray
    sha256: str

    def wrong(self, row: int, what: str) -> DataError:
        """Return an error about a row, which is line row + 1 of a file."""
        return DataError(f"{self.name}:{row + 1}: {what}")


def read_class_list(given: ClassNumbers, what: str, columns: int, classes: int) -> ClassList:
    """Read class numbers from a file or a Python value; what: name of the argument, for messages.

    A file has `columns` numbers per line, separated by white space. Blank lines are allowed only at the end.
    It needs 8 bytes of memory per number.

    Raises:
        DataError: a missing file, an invalid line, a class out of range, or an empty list.
    """
    if isinstance(given, (str, os.PathLike)):
        name = os.fspath(given)
        flat, sha256 = _read(Path(name), columns)
        numbers = np.asarray(flat).reshape(-1, columns)
    else:
        name = what
        numbers = _from_python(given, columns)
        lines = "".join(" ".join(map(str, row)) + "\n" for row in numbers.tolist())
        sha256 = hashlib.sha256(lines.encode()).hexdigest()
    class_list = ClassList(name, numbers, sha256)
    if not len(numbers):
        raise DataError(f"{name} is empty; expected one class per line")
    outside = np.flatnonzero(((numbers < 0) | (numbers >= classes)).any(axis=1))
    if len(outside):
        row = numbers[outside[0]]
        value = row[(row < 0) | (row >= classes)][0]
        raise class_list.wrong(int(outside[0]), f"class {value} is outside 0..{classes - 1}")
    return class_list


def check_distinct(listed: ClassList, values: np.ndarray, what: str = "") -> None:
    """Raise DataError if `values`, one per row, are not unique; what: follows the class in the message."""
    order = np.argsort(values, kind="stable")
    same = np.flatnonzero(values[order[1:]] == values[order[:-1]])
    if len(same):
        # Of all repeated values, the first in the file.
        second = int(order[same + 1].min())
        first = int(np.flatnonzero(values == values[second])[0])
        raise listed.wrong(second, f"class {values[second]} is repeated{what}; its first line is {first + 1}")


def _read(path: Path, columns: int) -> tuple[array[int], str]:
    try:
        with open_regular(path) as file:
            return _parse(path, file, columns)
    except OSError as error:
        raise DataError(f"the list of classes {path} cannot be read: {error.strerror}") from error


def _parse(path: Path, file: BinaryIO, columns: int) -> tuple[array[int], str]:
    numbers = array("q")
    digest = hashlib.sha256()
    blank = 0  # the first blank line
    for line_number, line in enumerate(file, start=1):
        digest.update(line)
        words = (without_mark(line, str(path)) if line_number == 1 else line).split()
        if not words:
            blank = blank or line_number
        elif (
            blank
            or len(words) != columns
            or not all(word.isdigit() and len(word) <= _MAX_DIGITS for word in words)
        ):
            expected = "a class number" if columns == 1 else "two class numbers, 'from to'"
            got = ascii(line.decode("utf-8", "replace").rstrip("\r\n")[:60])
            raise DataError(
                f"{path}:{blank or line_number}: expected {expected}, got {'a blank line' if blank else got}"
            )
        else:
            numbers.extend(map(int, words))
    return numbers, digest.hexdigest()


def _from_python(given: Sequence[int] | Mapping[int, int] | np.ndarray, columns: int) -> np.ndarray:
    values: Iterable[Any] = given.items() if isinstance(given, Mapping) else given
    numbers = array("q")
    for row in values:
        part = [row] if columns == 1 else [*row]
        if len(part) != columns:
            raise DataError(f"{part} has {len(part)} classes; expected {columns}")
        numbers.extend(map(operator.index, part))
    return np.asarray(numbers, np.int64).reshape(-1, columns)
