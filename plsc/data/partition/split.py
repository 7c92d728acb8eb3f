"""Byte ranges of inputs, cut at lines, so that many tasks can read one file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from plsc.data.partition.inputs import Input

SPLIT_BYTES = 64 * 2**20
_LOOK = 2**16  # bytes at a time, in search of a newline


@dataclass(frozen=True)
class Split:
    """The lines of input `number` that start in bytes [begin, end); all of them if it is compressed."""

    source: Input
    number: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        """What messages call it: line numbers in it count from its beginning."""
        return f"{self.source.name} from byte {self.begin}" if self.begin else self.source.name


def split_inputs(inputs: list[Input], split_bytes: int = SPLIT_BYTES) -> list[Split]:
    """Return the splits of all inputs, in the order of their lines."""
    splits = []
    for number, one in enumerate(inputs):
        step = max(1, one.size) if one.compression else split_bytes
        for begin in range(0, max(1, one.size), step):
            splits.append(Split(one, number, begin, min(one.size, begin + step)))
    return splits


def split_at_lines(inputs: list[Input], split_bytes: int | None) -> list[Split]:
    """Return splits of plain inputs that begin where lines do; whole files without `split_bytes`.

    Reads a little of the files; where a line is longer than a split, all of the line, once.
    """
    splits = []
    for number, one in enumerate(inputs):
        begin = 0
        with one.open() as stream:
            for position in range(split_bytes or one.size, one.size, split_bytes or one.size or 1):
                if position > begin:
                    end = _start_of_line(stream, position, one.size)
                    splits.append(Split(one, number, begin, end))
                    begin = end
        if begin < one.size or one.size == 0:
            splits.append(Split(one, number, begin, one.size))
    return splits


@contextmanager
def open_split(split: Split) -> Iterator[tuple[Any, int]]:
    """Yield (a stream of the lines of a split, its offset in the content of the file)."""
    with split.source.open() as stream:
        if split.source.compression:
            yield stream, 0
            return
        begin = _start_of_line(stream, split.begin, split.source.size)
        end = _start_of_line(stream, split.end, split.source.size)
        stream.seek(begin)
        yield _Bounded(stream, end - begin), begin


def _start_of_line(stream: Any, position: int, size: int) -> int:
    """Return where the first line starts that starts at `position` or after it."""
    if position == 0 or position >= size:
        return min(position, size)
    stream.seek(position - 1)
    buffer = bytearray(_LOOK)
    at = position - 1
    while count := stream.readinto(memoryview(buffer)):
        found = buffer.find(b"\n", 0, count)
        if found >= 0:
            return at + found + 1
        at += count
    return size


@dataclass
class _Bounded:
    """The next `left` bytes of a stream."""

    stream: Any
    left: int

    def readinto(self, buffer: memoryview, /) -> int | None:
        wanted = min(len(buffer), self.left)
        count = self.stream.readinto(buffer[:wanted]) if wanted else 0
        self.left -= count or 0
        return count
