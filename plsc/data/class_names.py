"""Class names by class number, packed into two arrays, also in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from plsc.data.files import name_key
from plsc.data.sources.base import Source, printable

_STEP = 2**16  # names processed at a time


@dataclass(frozen=True)
class ClassNames:
    """The name of class i is ``text[ends[i - 1]:ends[i]]``; an empty name means that the class has none.

    text: UTF-8 (or the raw bytes of file names), uint8 [bytes]. ends: int64 [classes], ascending.
    """

    text: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, names: Sequence[str]) -> ClassNames:
        """Return the class names for a list of strings."""
        text = bytearray()
        ends = np.empty(len(names), np.int64)
        for number, name in enumerate(names):
            text += name.encode("utf-8", "surrogateescape")
            ends[number] = len(text)
        return cls(np.frombuffer(text, np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        """Return a name as one line of text; '' for a class without a name."""
        start = self.ends[number - 1] if number else 0
        return printable(self.text[start : self.ends[number]].tobytes())

    def is_sound(self) -> bool:
        """Return whether the ends are ascending and match the text; needed for data from a file."""
        is_rising = len(self) and self.ends.min() >= 0 and self.lengths().min() >= 0
        return bool(is_rising and self.ends[-1] == len(self.text))

    def lengths(self) -> np.ndarray:
        """Return the length of each name in bytes, int64 [classes]."""
        return np.diff(self.ends, prepend=0)

    def take(self, numbers: np.ndarray) -> ClassNames:
        """Return the names of the classes `numbers`, int64 [n], in this order; -1 gives an empty name."""
        ends = np.where(numbers >= 0, self.ends[numbers], 0)
        lengths = np.where(numbers >= 0, self.lengths()[numbers], 0)
        text = [np.empty(0, np.uint8)]
        for low in range(0, len(numbers), _STEP):
            some = lengths[low : low + _STEP]
            moved = np.repeat(ends[low : low + _STEP] - np.cumsum(some), some)
            text.append(self.text[moved + np.arange(len(moved))])
        return ClassNames(np.concatenate(text), np.cumsum(lengths))

    def resized(self, classes: int) -> ClassNames:
        """Return the names for `classes` classes: cut, or extended by empty names."""
        numbers = np.arange(classes)
        return self.take(np.where(numbers < len(self), numbers, -1))

    def numbers_of(self, names: ClassNames) -> np.ndarray:
        """Return the class number of each of `names`, int64 [n], by `name_key`; -1 if no class has it."""
        if np.array_equal(self.ends, names.ends) and np.array_equal(self.text, names.text):
            return np.arange(len(names))
        own, other = self._keys(), names._keys()
        mine, theirs = own._hashes(), other._hashes()
        order = np.argsort(mine, kind="stable")
        mine, found, left = mine[order], np.full(len(theirs), -1), np.arange(len(theirs))
        place = np.searchsorted(mine, theirs)
        while len(left):  # once, and again for different names of equal hashes
            left = left[place[left] < len(mine)]
            left = left[mine[place[left]] == theirs[left]]
            candidates = order[place[left]]
            same = own._equal(candidates, other, left)
            found[left[same]] = candidates[same]
            left = left[~same]
            place[left] += 1
        return found

    def numbered(self, names: ClassNames) -> np.ndarray:
        """Return a distinct class number for each of `names`, int64 [n]: the existing one if there is one.

        Other names get the numbers of classes without a name, in order, and then new numbers after the last.
        """
        numbers = np.where(names.lengths() > 0, self.numbers_of(names), -1)
        new = np.flatnonzero(numbers < 0)
        free = np.flatnonzero(self.lengths() == 0)[: len(new)]
        numbers[new] = np.append(free, np.arange(len(self), len(self) + len(new) - len(free)))
        return numbers

    def with_names(self, names: ClassNames, numbers: np.ndarray) -> ClassNames:
        """Return a copy with `names` for the classes `numbers`, int64 [names]."""
        both = ClassNames(
            np.concatenate([self.text, names.text]), np.concatenate([self.ends, names.ends + len(self.text)])
        )
        source = np.arange(len(self))
        source[numbers] = np.arange(len(self), len(both))
        return both.take(source)

    def _keys(self) -> ClassNames:
        if self.text.max(initial=0) < 128:
            return self
        return ClassNames.of([name_key(name.decode("utf-8", "surrogateescape")) for name in self._each()])

    def _equal(self, numbers: np.ndarray, others: ClassNames, rows: np.ndarray) -> np.ndarray:
        """Return whether the name of class numbers[i] is that of class rows[i] of `others`, bool [n]."""
        same = self.lengths()[numbers] == others.lengths()[rows]
        one, other = self.take(numbers[same]), others.take(rows[same])
        differing = np.searchsorted(one.ends, np.flatnonzero(one.text != other.text), side="right")
        same[np.flatnonzero(same)[differing]] = False
        return same

    def _hashes(self) -> np.ndarray:
        return np.fromiter(map(hash, self._each()), np.int64, len(self))

    def _each(self) -> Iterator[bytes]:
        start = 0
        for low in range(0, len(self), _STEP):
            ends = self.ends[low : low + _STEP].tolist()
            text, begin = self.text[start : ends[-1]].tobytes(), start
            for end in ends:
                yield text[start - begin : end - begin]
                start = end


def class_names_of(source: Source) -> ClassNames | None:
    """Return the class names of a source whose labels are names; None if labels are numbers."""
    names = getattr(source, "class_names", None)
    return None if names is None else ClassNames.of(names)


def first_and_last_class(source: Source, names: ClassNames) -> str:
    """Return number and name of the first and last class with samples, each with the location of a sample."""
    labels = source.labels()
    shown = (
        f"{labels[index]} is '{names[labels.item(index)]}' ({source.name(index)})"
        for index in (int(labels.argmin()), int(labels.argmax()))
    )
    return ", ".join(shown)
