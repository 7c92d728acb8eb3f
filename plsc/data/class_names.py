"""Class names by class number, packed into two arrays, also in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plsc.data.files import name_key
from plsc.errors import printable


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
        taken = self._array().take(pa.array(numbers, mask=numbers < 0)).fill_null(b"")
        _, offsets, text = taken.buffers()
        ends = np.frombuffer(offsets, np.int64)[1 : len(numbers) + 1].copy()
        return ClassNames(np.frombuffer(text or b"", np.uint8)[: ends.max(initial=0)].copy(), ends)

    def resized(self, classes: int) -> ClassNames:
        """Return the names for `classes` classes: cut, or extended by empty names."""
        numbers = np.arange(classes)
        return self.take(np.where(numbers < len(self), numbers, -1))

    def numbers_of(self, names: ClassNames) -> np.ndarray:
        """Return the class number of each of `names`, int64 [n], by `name_key`; -1 if no class has it."""
        if np.array_equal(self.ends, names.ends) and np.array_equal(self.text, names.text):
            return np.arange(len(names))
        found = pc.index_in(names._keys(), value_set=self._keys())
        return found.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)

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

    def _array(self) -> pa.LargeBinaryArray:
        buffers = [None, pa.py_buffer(np.append(0, self.ends)), pa.py_buffer(self.text)]
        return pa.Array.from_buffers(pa.large_binary(), len(self), buffers)

    def _keys(self) -> pa.LargeBinaryArray:
        if self.text.max(initial=0) < 128:
            return self._array()
        names = (name.decode("utf-8", "surrogateescape") for name in self._array().to_pylist())
        return ClassNames.of([*map(name_key, names)])._array()
