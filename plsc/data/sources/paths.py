"""Millions of paths in little memory."""

from __future__ import annotations

from array import array

import numpy as np


class PathTable:
    """A list of paths as one run of bytes and its offsets.

    Ten million paths as Python strings take over a gigabyte, and reading them in forked workers
    copies that memory again, because each use writes a reference count. Here they take their own
    length plus eight bytes each, and reading writes nothing.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("q", [0])

    def append(self, path: bytes) -> None:
        """Add a path at the end."""
        self._text += path
        self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of all paths, uint8, and where each ends in them, int64 [paths + 1], from 0.

        They are the table's own memory: nothing can be added to it while they are in use.
        """
        return np.frombuffer(self._text, np.uint8), np.frombuffer(self._ends, np.int64)

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        return bytes(self._text[self._ends[index] : self._ends[index + 1]])


def printable(text: bytes | str) -> str:
    """Return a path as one line of text that any terminal can show."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
