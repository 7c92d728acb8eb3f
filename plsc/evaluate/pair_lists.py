"""Read text lists of verification pairs: two paths and a flag per line, or the pairs.txt of LFW.

A line is ``<path> <path> <flag>``, separated by tabs or commas, or by blanks if no path contains one. The
flag is 1 or True for the same class; 0, -1 or False for different ones. Column names in the first line are
ignored. In the layout of LFW, the first line has one or two integers (folds and pairs per fold), and each
other line is ``<name> <n> <n>`` or ``<name> <n> <name> <n>``. Image n of a name is
``<name>/<name>_000n.jpg``. Blank lines, CRLF and a UTF-8 byte order mark are accepted. A first line
``# images: <folder>`` tells where the images are, for a list that lies elsewhere.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.data.decode import IMAGE_SUFFIXES
from plsc.data.files import PathTable
from plsc.data.sources.base import FileSource, printable
from plsc.data.sources.image_folders import listed_path
from plsc.errors import DataError
from plsc.storage.blocks import streamed, text_lines
from plsc.storage.urls import base_name, exists, is_url, join, local_path, located, parent_of, shown

_MAX_LINE_BYTES = 16384
IMAGES = "# images: "
_EXPECTED = "expected '<path> <path> <0 or 1>', or tabs between them if a path contains a blank"
_FLAGS = {b"1": b"1", b"true": b"1", b"0": b"0", b"-1": b"0", b"false": b"0"}
_COLUMN_NAMES = re.compile(rb"[^\W\d]\w*([\t,; ]+[^\W\d]\w*){2}")
_EXPECTED_LFW = (
    "expected '<name> <n> <n>' or '<name> <n> <name> <n>', as the first line is that of LFW's list"
)


@dataclass(frozen=True)
class PairList:
    """P pairs of the images of a source, each image once; ``pairs``: int64 [P, 2]; ``is_same``: bool [P]."""

    images: ListedImages
    pairs: np.ndarray
    is_same: np.ndarray

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.is_same)


class ListedImages(FileSource):
    """The images of a list, below a folder or URL; `lines` has the first line that names each."""

    def __init__(self, root: Path | str, paths: PathTable, lines: np.ndarray, title: str) -> None:
        super().__init__(root, paths, np.full(len(lines), -1))
        self._lines = lines
        self._title = title

    def name(self, index: int) -> str:
        """Return ``a.jpg (pairs.txt:12)``."""
        return f"{super().name(index)} ({self._title}:{self._lines[index]})"

    def listed(self, index: int) -> str:
        """Return the path as in the list."""
        return super().name(index)

    def check(self) -> None:
        """Raise DataError for the first image that is missing; images at a URL are not checked."""
        if isinstance(self.root, str):
            return
        for index in range(len(self)):
            place = str(self.path(index))
            if not is_url(place) and not os.path.isfile(place):  # noqa: PTH113 - False for a long name
                raise DataError(
                    f"{self.name(index)}: there is no such image in {self.root}; fix the line, or give the "
                    "folder of the images",
                    kind="missing",
                )


def read_pair_list(
    path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None, allowed: Sequence[str] = ()
) -> PairList:
    """Read a list of pairs, at a path or URL.

    Args:
        path: the text file.
        folder: folder or URL of the images; by default that of the first line, or of the list. allowed: as of
            `located`.

    Raises:
        DataError: the list cannot be read, a line is invalid, or an image is missing; it names the line.
    """
    place = local_path(os.fspath(path))
    title = base_name(shown(place))
    root = parent_of(place) if folder is None else os.fspath(folder)
    paths, numbers = PathTable(), dict[bytes, int]()
    first_lines, pairs, flags = array("q"), array("q"), array("b")
    lfw: _Lfw | None = None
    for number, line in lines_of(place):
        if number == 1 and line.startswith(IMAGES.encode()):
            named = os.fsdecode(line).removeprefix(IMAGES)
            root = located(named, root, allowed, place) if folder is None else root
            continue
        if lfw is None and not flags and _is_lfw_header(line):
            lfw = _Lfw(line, root)
            continue
        try:
            *both, flag = lfw.parse(line) if lfw is not None else _parse(line)
            for one in both:
                one = listed_path(one, root, allowed, place)
                if one not in numbers:
                    numbers[one] = len(paths)
                    paths.append(one)
                    first_lines.append(number)
                pairs.append(numbers[one])
        except (ValueError, DataError) as problem:
            if number == 1 and _COLUMN_NAMES.fullmatch(line):
                continue
            raise DataError(f"{shown(place)}:{number}: {problem}; fix the line") from None
        flags.append(flag == b"1")
    if not flags:
        raise DataError(f"{shown(place)} contains no pairs; {_EXPECTED}")
    if lfw is not None and lfw.pairs != len(flags):
        raise DataError(
            f"{shown(place)} has {len(flags):,} pairs, but its first line announces {lfw.pairs:,}; it is "
            "truncated or damaged"
        )
    images = ListedImages(root if is_url(root) else Path(root), paths, np.array(first_lines), title)
    images.check()
    return PairList(images, np.array(pairs).reshape(-1, 2), np.array(flags, dtype=bool))


def lines_of(place: str) -> Iterator[tuple[int, bytes]]:
    """Yield number and text of each line that is not blank."""
    with streamed(place) as file:
        for number, _, line in text_lines(file, shown(place), _MAX_LINE_BYTES):
            if line := line.strip(b" \r\n"):
                yield number, line


def _parse(line: bytes) -> list[bytes]:
    """Return both paths and the flag; ValueError describes a bad line."""
    fields = [one.strip() for one in line.split(b"\t")] if b"\t" in line else line.split()
    by_comma = [one.strip(b'" ') for one in re.split(b"[,;]", line)]
    if len(by_comma) == 3 and by_comma[2].lower() in _FLAGS:  # else a path may contain a comma
        fields = by_comma
    if len(fields) != 3 or not all(fields) or fields[2].lower() not in _FLAGS:
        raise ValueError(f"{_EXPECTED}, got '{printable(line[:200])}'")
    return [*fields[:2], _FLAGS[fields[2].lower()]]


def _is_lfw_header(line: bytes) -> bool:
    fields = line.split()
    return len(fields) in (1, 2) and all(one.isdigit() and len(one) <= 6 for one in fields)


class _Lfw:
    """Lines in the layout of LFW; the suffix is that of the first image found. pairs: number announced."""

    def __init__(self, header: bytes, root: str) -> None:
        folds, count = (1, *map(int, header.split()))[-2:]
        self.pairs = 2 * folds * count  # as many same pairs as different ones
        self._root = root
        self._suffix = b""

    def parse(self, line: bytes) -> list[bytes]:
        """Return both paths and the flag; ValueError describes a bad line."""
        fields = [one.strip() for one in (line.split(b"\t") if b"\t" in line else line.split())]
        is_same = len(fields) == 3
        if is_same:
            fields.insert(2, fields[0])
        if len(fields) != 4 or not all(one.isdigit() and len(one) <= 6 for one in fields[1::2]):
            raise ValueError(f"{_EXPECTED_LFW}, got '{printable(line[:200])}'")
        return [self._path(*fields[:2]), self._path(*fields[2:]), b"1" if is_same else b"0"]

    def _path(self, name: bytes, number: bytes) -> bytes:
        stem = listed_path(b"%s/%s_%04d" % (name, name, int(number)), self._root)
        if not self._suffix:
            suffixes = (*IMAGE_SUFFIXES, *map(str.upper, IMAGE_SUFFIXES))
            places = {suffix: join(self._root, f"{os.fsdecode(stem)}{suffix}") for suffix in suffixes}
            found = next((suffix for suffix, place in places.items() if exists(place)), ".jpg")
            self._suffix = found.encode()
        return stem + self._suffix
