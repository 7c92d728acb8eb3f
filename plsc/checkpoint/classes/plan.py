"""Plans for changing classes: the old number of each new class; and the lists that define them.

The memory of a plan is proportional to the given list, not to the number of classes.
"""

from __future__ import annotations

import hashlib
import io
import operator
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np

from plsc.errors import DataError
from plsc.storage.blocks import streamed
from plsc.storage.regular import without_mark

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


def make_plan(what: str, before: int, given: ClassNumbers | int) -> tuple[Plan, ClassList | None]:
    """Return the plan for a change of `before` classes, and the list that it is made from.

    what, given: an argument of `change_classes` and its value. Raises DataError.
    """
    if what == "grow":
        count = operator.index(given)  # type: ignore[arg-type]
        if count < 1:
            raise DataError(f"grow is {count}; expected the number of new classes, 1 or more")
        return Plan(what, before, before + count), None
    listed = read_class_list(given, what, 2 if what == "merge" else 1, before)  # type: ignore[arg-type]
    numbers = listed.numbers[:, 0]
    order = np.argsort(numbers, kind="stable")
    same = np.flatnonzero(numbers[order[1:]] == numbers[order[:-1]])
    if len(same):
        second = int(order[same + 1].min())  # of all repeated values, the first in the file
        first = int(np.flatnonzero(numbers == numbers[second])[0])
        raise listed.wrong(second, f"class {numbers[second]} is repeated; its first line is {first + 1}")
    is_reorder, left = what == "reorder", before - len(numbers)
    if left != 0 if is_reorder else left < 2:
        raise DataError(
            f"{listed.name} has {len(numbers)} of {before} classes; expected every class once"
            if is_reorder
            else f"{listed.name} leaves {left} of {before} classes; a classifier needs at least two"
        )
    if is_reorder:
        return Plan(what, before, before, order=numbers), listed
    removed = numbers[order]
    if what == "drop":
        return Plan(what, before, left, removed), listed
    targets = listed.numbers[:, 1]
    place = np.minimum(np.searchsorted(removed, targets), len(removed) - 1)
    wrong = np.flatnonzero(removed[place] == targets)
    if len(wrong):
        row = int(wrong[0])
        end = targets[order][place[row]]
        raise listed.wrong(
            row, f"class {numbers[row]} is merged into {targets[row]}, which is merged into {end}"
        )
    joins = targets[order]
    new = joins - np.searchsorted(removed, joins)
    by_target = np.argsort(new, kind="stable")
    return Plan(what, before, left, removed, joins, new[by_target], removed[by_target]), listed


def read_class_list(given: ClassNumbers, what: str, columns: int, classes: int) -> ClassList:
    """Read class numbers from a file or a Python value; what: name of the argument, for messages.

    A file has `columns` numbers per line, separated by white space. Blank lines are allowed only at the end.
    It needs 8 bytes of memory per number.

    Raises DataError for an invalid line, a class out of range, or an empty list.
    """
    file: BinaryIO
    if isinstance(given, (str, os.PathLike)):
        name, file = os.fspath(given), streamed(os.fspath(given))
    else:
        rows: Iterable[Any] = given.items() if isinstance(given, Mapping) else given
        lines = (" ".join(map(str, row if isinstance(row, Iterable) else [row])) for row in rows)
        name, file = what, io.BytesIO("".join(f"{line}\n" for line in lines).encode())
    flat, digest = array("q"), hashlib.sha256()
    blank = 0  # the first blank line
    with file:
        for line_number, line in enumerate(file, start=1):
            digest.update(line)
            words = (without_mark(line, name) if line_number == 1 else line).split()
            if not words:
                blank = blank or line_number
            elif (
                blank
                or len(words) != columns
                or not all(word.isdigit() and len(word) <= _MAX_DIGITS for word in words)
            ):
                expected = "a class number" if columns == 1 else "two class numbers, 'from to'"
                got = "a blank line" if blank else ascii(line.decode("utf-8", "replace").rstrip("\r\n")[:60])
                raise DataError(f"{name}:{blank or line_number}: expected {expected}, got {got}")
            else:
                flat.extend(map(int, words))
    class_list = ClassList(name, np.asarray(flat).reshape(-1, columns), digest.hexdigest())
    outside = np.argwhere(class_list.numbers >= classes)
    if not flat:
        raise DataError(f"{name} is empty; expected one class per line")
    if len(outside):
        row, column = outside[0]
        value = class_list.numbers[row, column]
        raise class_list.wrong(int(row), f"class {value} is outside 0..{classes - 1}")
    return class_list
