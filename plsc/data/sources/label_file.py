"""The original's layout: a folder with images and a ``label.txt`` of ``<path> <label>`` lines."""

from __future__ import annotations

import os
import posixpath
from array import array
from bisect import bisect_right
from pathlib import Path

import numpy as np

from plsc.data.sources.base import FileSource
from plsc.data.sources.paths import PathTable, printable
from plsc.errors import DataError

_MAX_LINE_BYTES = 8192
_MAX_LABEL_DIGITS = 18  # all such numbers fit int64


class LabelFileSource(FileSource):
    """``label.txt``: a path and a label a line, separated by spaces or a tab.

    A path may hold spaces: the line is split at its last run of blanks. Paths are relative to the
    folder, or to its ``images/`` if the first line's file is found only there. Blank lines, CRLF and
    a UTF-8 byte order mark are accepted. Raises DataError that names the line otherwise.
    """

    def __init__(self, dataset_dir: str | Path) -> None:
        folder = Path(dataset_dir)
        self._blank_lines = array("q")  # how many samples precede each blank line
        paths, labels = self._read(folder / "label.txt")
        root = folder
        first = os.fsdecode(paths[0])
        if not (folder / first).exists() and (folder / "images" / first).exists():
            root = folder / "images"
        self._prefix = "" if root == folder else "images/"
        super().__init__(root, paths, labels)

    def line(self, index: int) -> int:
        """Return the number of the sample's line in label.txt, from 1."""
        return index + 1 + bisect_right(self._blank_lines, index)

    def name(self, index: int) -> str:
        """Return ``images/a.jpg (label.txt:12)``."""
        return f"{self._prefix}{super().name(index)} (label.txt:{self.line(index)})"

    def _read(self, label_file: Path) -> tuple[PathTable, np.ndarray]:
        paths, labels = PathTable(), array("q")
        number = 0
        try:
            with label_file.open("rb") as lines:
                # readline with a bound: a file without line ends must not fill the memory
                while line := lines.readline(_MAX_LINE_BYTES):
                    number += 1
                    if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
                        raise DataError(
                            f"label.txt:{number} is over {_MAX_LINE_BYTES} bytes long; fix it"
                        )
                    if number == 1:
                        line = line.removeprefix(b"\xef\xbb\xbf")
                    line = line.strip()
                    if line:
                        path, label = _parse(line, number)
                        paths.append(path)
                        labels.append(label)
                    else:
                        self._blank_lines.append(len(paths))
        except OSError as error:
            raise DataError(f"{label_file} cannot be read: {error.strerror}") from error
        if len(paths) == 0:
            raise DataError(f"{label_file} holds no samples; expected lines of '<path> <label>'")
        return paths, np.frombuffer(labels, dtype=np.int64)


def _parse(line: bytes, number: int) -> tuple[bytes, int]:
    parts = line.rsplit(None, 1)
    if len(parts) == 1:
        raise _error(number, "expected '<path> <label>', the label is missing in", line)
    path, label = parts
    if not label.isdigit():
        if label[:1] == b"-" and label[1:].isdigit():
            raise _error(number, "a label must be 0 or more, got", label)
        raise _error(number, "a label must be a whole number, got", label)
    if len(label) > _MAX_LABEL_DIGITS:
        raise _error(number, "the label is too large:", label)
    if path[:1] == b"/":
        raise _error(number, "a path must be relative to the dataset folder, got", path)
    if b"\0" in path:
        raise _error(number, "a path must not hold a zero byte, got", path)
    if b".." in path:
        path = posixpath.normpath(path)
        if path == b".." or path.startswith(b"../"):
            raise _error(number, "the path leaves the dataset folder:", path)
    return path, int(label)


def _error(number: int, problem: str, text: bytes) -> DataError:
    return DataError(f"label.txt:{number}: {problem} '{printable(text[:200])}'; fix the line")
