"""Which old class, or none, each class of the new numbering comes from.

The memory of a plan grows with the list that was given, not with the number of classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from plsc.checkpoint.classes.lists import ClassList, check_distinct
from plsc.errors import DataError, OptionError

_MOST_CLASSES = 2**40
_MAP_STEP = 1 << 16


def _none() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Plan:
    """From `before` classes to `after`. Numbers are int64.

    Classes that stay keep their order and are numbered densely, `removed` (ascending) being left out; what
    follows them up to `after` is new. Or `order` says which old class each new one is.

    joined: new numbers of classes that others joined, ascending, with repetitions; members: the old number
    of the one that joined, for each. joins: for each of `removed` the old class that it joined, -1 for none.
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
        """Count the classes that were none before."""
        return self.after - (self.before - len(self.removed))

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Return the old number of each new class of start..stop - 1; -1: it is new."""
        if self.order is not None:
            return self.order[start:stop]
        new = np.arange(start, stop)
        # The i-th removed class is passed by the new numbers from removed[i] - i.
        below = self.removed - np.arange(len(self.removed))
        old = new + np.searchsorted(below, new, side="right")
        return np.where(old < self.before, old, -1)

    def numbers(self, old: np.ndarray) -> np.ndarray:
        """Return the new number of old classes; -1: dropped."""
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
        """Yield lines ``old<TAB>new``, in pieces; dropped classes have none."""
        for start in range(0, self.before, _MAP_STEP):
            old = np.arange(start, min(self.before, start + _MAP_STEP))
            new = self.numbers(old)
            pairs = zip(old[new >= 0].tolist(), new[new >= 0].tolist(), strict=True)
            yield "".join(f"{a}\t{b}\n" for a, b in pairs).encode()


def plan_grow(before: int, count: int) -> Plan:
    """Return the plan for `count` new classes behind the others; OptionError if that is no count."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_CLASSES:
        raise OptionError(f"grow is {count!r}; expected the number of new classes, 1 or more")
    return Plan("grow", before, before + count)


def plan_drop(before: int, found: ClassList) -> Plan:
    """Return the plan for leaving classes out. found: [n, 1]. Raises DataError."""
    dropped = found.numbers[:, 0]
    check_distinct(found, dropped)
    after = _enough(found, before - len(dropped), before)
    return Plan("drop", before, after, np.sort(dropped))


def plan_merge(before: int, found: ClassList) -> Plan:
    """Return the plan for classes that join others. found: [n, 2], from and to. Raises DataError."""
    joining, targets = found.numbers[:, 0], found.numbers[:, 1]
    check_distinct(found, joining, " as one that joins another")
    order = np.argsort(joining)
    removed, joins = joining[order], targets[order]
    place = np.minimum(np.searchsorted(removed, targets), len(removed) - 1)
    wrong = np.flatnonzero(removed[place] == targets)
    if len(wrong):
        row = int(wrong[0])
        source, target, end = joining[row], targets[row], joins[place[row]]
        if source == target:
            raise found.wrong(row, f"class {source} joins itself")
        raise found.wrong(
            row,
            f"class {source} joins {target}, which itself joins {end}; name where it ends, once",
        )
    after = _enough(found, before - len(removed), before)
    new = joins - np.searchsorted(removed, joins)
    by_target = np.argsort(new, kind="stable")
    return Plan("merge", before, after, removed, joins, new[by_target], removed[by_target])


def plan_reorder(before: int, found: ClassList) -> Plan:
    """Return the plan for another order. found: [n, 1], the old class that becomes class 0, 1, ...

    Raises DataError unless it names every class once.
    """
    order = found.numbers[:, 0]
    check_distinct(found, order)
    if len(order) != before:
        is_there = np.zeros(before, dtype=bool)
        is_there[order] = True
        raise DataError(
            f"{found.name} has {len(order)} classes of {before}; an order names each of them, the first "
            f"that it lacks is {int(np.argmin(is_there))}"
        )
    return Plan("reorder", before, before, order=order)


def _enough(found: ClassList, after: int, before: int) -> int:
    if after < 2:
        raise DataError(
            f"{found.name} leaves {after} of {before} classes; a classifier needs two or more"
        )
    return after
