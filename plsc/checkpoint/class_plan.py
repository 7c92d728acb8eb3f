"""Which old class each new class is, the lists that define it, and the rows of class tensors after it.

The memory of a plan is proportional to the given list, not to the number of classes.
"""

from __future__ import annotations

import functools
import io
import operator
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint.load import StoredTensor
from plsc.checkpoint.manifest import Chunks, bytes_of
from plsc.errors import CheckpointError, DataError
from plsc.heads.softmax import normalised
from plsc.heads.weights import SCALE_BYTES, decode_rows, encode_rows, initial_rows
from plsc.storage.blocks import streamed
from plsc.storage.regular import without_mark

ClassNumbers = str | os.PathLike[str] | Sequence[int] | Mapping[int, int] | np.ndarray

_MAP_STEP = 1 << 16
_MAX_DIGITS = 18  # such numbers fit int64
_BLOCK = 4096  # rows that `initial_rows` draws at once


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
        return np.argsort(_none() if self.order is None else self.order)

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

    name: for messages.
    """

    name: str
    numbers: np.ndarray

    def wrong(self, row: int, what: str) -> DataError:
        """Return an error about a row, which is line row + 1 of a file."""
        return DataError(f"{self.name}:{row + 1}: {what}")


def make_plan(what: str, before: int, given: ClassNumbers | int) -> Plan:
    """Return the plan for a change of `before` classes.

    what, given: an argument of `change_classes` and its value. Raises DataError.
    """
    if what == "grow":
        count = operator.index(given)  # type: ignore[arg-type]
        if count < 1:
            raise DataError(f"grow is {count}; expected the number of new classes, 1 or more")
        return Plan(what, before, before + count)
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
        return Plan(what, before, before, order=numbers)
    removed = numbers[order]
    if what == "drop":
        return Plan(what, before, left, removed)
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
    return Plan(what, before, left, removed, joins, new[by_target], removed[by_target])


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
    flat = array("q")
    blank = 0  # the first blank line
    with file:
        for line_number, line in enumerate(file, start=1):
            words = (without_mark(line, name) if line_number == 1 else line).split()
            if not words:
                blank = blank or line_number
            elif (
                blank
                or len(words) != columns
                or not all(word.isdigit() and len(word) <= _MAX_DIGITS for word in words)
            ):
                expected = "a class number" if columns == 1 else "two class numbers, 'from to'"
                raise DataError(f"{name}:{blank or line_number}: expected {expected}, got {line[:60]!r}")
            else:
                flat.extend(map(int, words))
    class_list = ClassList(name, np.asarray(flat).reshape(-1, columns))
    outside = np.argwhere(class_list.numbers >= classes)
    if not flat:
        raise DataError(f"{name} is empty; expected one class per line")
    if len(outside):
        row, column = outside[0]
        value = class_list.numbers[row, column]
        raise class_list.wrong(int(row), f"class {value} is outside 0..{classes - 1}")
    return class_list


# Rows of a class tensor in the new numbering, piece by piece: kept, merged and new ones.


Change = Callable[[int, np.ndarray], None]
"""Change a piece in place. Arguments: index of its first new class, and its bytes, uint8 [n, row_bytes]."""


def rows_of(
    tensor: StoredTensor, plan: Plan, start: int, stop: int, changes: tuple[Change, ...] = ()
) -> Chunks:
    """Return the chunks of new classes start..stop - 1: old rows, zeros for new classes, then `changes`."""

    def pieces() -> Iterator[memoryview]:
        for first in range(start, stop, tensor.rows_per_piece):
            rows = tensor.take(plan.sources(first, min(stop, first + tensor.rows_per_piece)))
            for change in changes:
                change(first, rows)
            yield rows.data

    return pieces


def initialise_new(weight: StoredTensor, plan: Plan, seed: int) -> Change:
    """Return a change that initialises new rows as a new head would, for (seed, class)."""
    kept = plan.after - plan.added
    centers = weight.shape[1] if len(weight.shape) == 3 else 1

    @functools.lru_cache(maxsize=1)  # consecutive pieces share a block
    def block(number: int) -> Tensor:
        return initial_rows(seed, number * _BLOCK, (number + 1) * _BLOCK, dimension_of(weight), weight.dtype)

    def draw(first: int, rows: np.ndarray) -> None:
        low, high = max(first, kept) * centers, (first + len(rows)) * centers
        out = rows.reshape(len(rows) * centers, -1)
        for number in range(low // _BLOCK, -(-high // _BLOCK) if low < high else 0):
            begin, end = max(low, number * _BLOCK), min(high, (number + 1) * _BLOCK)
            drawn = block(number)[begin - number * _BLOCK : end - number * _BLOCK]
            out[begin - first * centers : end - first * centers] = _rows_as_bytes(drawn)

    return draw


def average_merged(tensor: StoredTensor, plan: Plan) -> Change:
    """Return a change that sets the row [D], or bias, of each merged class to the mean over its members.

    The direction of a row is the mean of the normalised rows, its norm the mean of the norms. If the
    directions cancel, the class keeps its own row. The change raises CheckpointError for values that are not
    finite.
    """
    is_bias = len(tensor.shape) == 1

    def summand(values: Tensor) -> Tensor:
        if is_bias:
            return values.clone()
        return torch.cat([_unit(values), values.norm(dim=-1, keepdim=True)], dim=-1)

    def average(first: int, rows: np.ndarray) -> None:
        joined, members = plan.joined_by(first, first + len(rows))
        if not len(joined):
            return
        targets, index, counts = np.unique(joined, return_inverse=True, return_counts=True)
        raw = torch.from_numpy(rows[targets - first].reshape(-1)).view(tensor.dtype)
        old = raw.view(len(targets), *tensor.shape[1:])
        own = _finite(tensor, (decode_rows(old) if tensor.is_coded else old).double())
        total = summand(own)
        for low in range(0, len(members), tensor.rows_per_piece):
            some = slice(low, low + tensor.rows_per_piece)
            values = _finite(tensor, tensor.values(members[some]))
            total.index_add_(0, torch.from_numpy(index[some]), summand(values))
        mean = total / torch.from_numpy(counts + 1.0).view(-1, *[1] * (own.ndim - 1))
        if not is_bias:
            direction, length = mean[..., :-1], mean[..., -1:]
            is_clear = direction.norm(dim=-1, keepdim=True) > 1e-6
            mean = torch.where(is_clear, _unit(direction) * length, own)
        rows[targets - first] = _rows_as_bytes(_stored(tensor, mean))

    return average


def _finite(tensor: StoredTensor, values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise CheckpointError(f"{tensor.key} contains rows that are not finite; choose another checkpoint")
    return values


def _unit(vectors: Tensor) -> Tensor:
    return normalised(vectors)[0]


def dimension_of(weight: StoredTensor) -> int:
    """Return the embedding size of class weights."""
    return weight.shape[-1] - (SCALE_BYTES if weight.is_coded else 0)


def _stored(tensor: StoredTensor, values: Tensor) -> Tensor:
    """Return values as the tensor stores them."""
    return encode_rows(values.float()) if tensor.is_coded else values.to(tensor.dtype)


def _rows_as_bytes(values: Tensor) -> np.ndarray:
    """Return the bytes of values [n, ...], uint8 [n, bytes]."""
    return bytes_of(values).numpy().reshape(len(values), -1)
