"""What sources have in common whose samples are rows of a text file: CSV and JSON lines."""

from __future__ import annotations

import binascii
import functools
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pybase64

from plsc.data.native.rows import MOST_ROWS, FoundRows
from plsc.data.sources.base import read_image_file
from plsc.data.sources.columns import ColumnSource, Label, LabelReader
from plsc.data.sources.index_store import load_or_build
from plsc.data.sources.limits import check_image_bytes
from plsc.data.sources.lines import Block
from plsc.data.sources.paths import printable
from plsc.data.sources.ranges import read_from
from plsc.errors import DataError
from plsc.storage.blocks import Bytes, open_bytes
from plsc.storage.urls import base_name, is_url, join, parent_of, shown

# How the base64 of JPEG, PNG, GIF, BMP, WEBP and TIFF files begins.
_BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "Qk", "UklGR", "SUkqA", "TU0AK")


class Rows(NamedTuple):
    """Some rows: where they are in the file, in bytes, and their first lines from 1: int64 [n] each.

    next_line: the line behind them. texts: returns their labels as they are written; numbers: as int64 [n],
    if all are whole numbers of 0 or more.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    lines: np.ndarray
    next_line: int
    texts: Callable[[], Sequence[Label]]
    numbers: np.ndarray | None = None


class RowSource(ColumnSource):
    """Samples that are rows of one text file, local or remote: a column of images, and one of labels.

    An image is a path below the file's folder, or base64; the first row shows which. Labels are whole
    numbers; or names, whose ids are their ranks in sorted order, or those of `label_map`. The file is
    read through once; the index is kept (`index_store`). `class_names` has the sorted names, or None.

    A format gives the methods that find rows and labels, and `_image_text`, which takes a row apart again.
    """

    def _load(self, data: Bytes, kind: str, labels: LabelReader) -> Mapping[str, np.ndarray]:
        """Load or build the index, of what `kind` says."""
        self.location = data.location
        self._title = base_name(shown(self.location))
        self._folder = parent_of(self.location)
        self._data = data
        kind = f"{kind}{'-names' if labels.names_wanted else ''}"
        index = load_or_build([self.location], kind, lambda: self._build(labels))
        self._offsets, self._lengths, self._lines = (
            index[name] for name in ("offsets", "lengths", "lines")
        )
        try:
            self._is_base64 = _is_base64(self._text(0))
        except DataError as error:
            raise error.at(self.name(0)) from error
        return index

    def _blocks(self, data: Bytes) -> Iterator[Block]:
        """Yield blocks of whole rows."""
        raise NotImplementedError

    def _find_rows(self, block: Block, position: int) -> FoundRows | None:
        """Return the usual rows from a position on, up to one that is not; None if it cannot be done."""
        raise NotImplementedError

    def _row_end(self, block: Block, start: int) -> int:
        """Return where the row that begins at `start` ends."""
        raise NotImplementedError

    def _label_in(self, row: bytes, line: int) -> Label:
        """Return the label of a row; DataError that names the line if the row is not sound."""
        raise NotImplementedError

    def _image_text(self, row: bytes) -> str:
        """Return the image column of a row; DataError if it is not there."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return ``train.csv:12``: the file and the line in it."""
        return f"{self._title}:{self._lines[index]}"

    def _place(self, lines: np.ndarray, position: int) -> str:
        return f"{shown(self.location)}:{lines[position]}"

    def _text(self, index: int) -> str:
        return self._image_text(self._stored_at(index))

    def _stored_at(self, index: int) -> bytes:
        return self._data.read_at(self._offsets.item(index), self._lengths.item(index))

    def _stored_many(self, indices: np.ndarray) -> Iterator[bytes | None]:
        if not self._is_base64:
            return super()._stored_many(indices)
        return read_from(
            [self._data] * len(indices), self._offsets[indices], self._lengths[indices]
        )

    def _image_in(self, stored: bytes) -> bytes:
        text = self._image_text(stored)
        return _decode(text) if self._is_base64 else self._read_file(text)

    def _read_file(self, path: str) -> bytes:
        normal = posixpath.normpath(path)
        if not path or "\0" in path or normal.startswith(("/", "../")) or normal == "..":
            raise DataError(
                f"the image '{printable(path[:200])}' is not below the folder of {self._title}; "
                "expected a relative path that stays in it"
            )
        if not is_url(self._folder):
            return read_image_file(Path(self._folder, path))
        data = open_bytes(join(self._folder, normal))
        check_image_bytes(data.size)
        return data.read_at(0, data.size)

    def _build(self, labels: LabelReader) -> dict[str, np.ndarray]:
        parts: list[tuple[np.ndarray, ...]] = []
        line = 1
        for block in self._blocks(self._data):
            line += block.lines_before
            for rows in self._rows_in(block, line):
                if rows.numbers is None or not labels.extend_numbers(rows.numbers):
                    labels.extend(rows.texts(), functools.partial(self._place, rows.lines))
                parts.append(rows[:3])
                line = rows.next_line
        if not len(labels):
            raise DataError(f"{shown(self.location)} holds no samples")
        names = ("offsets", "lengths", "lines")
        places = map(np.concatenate, zip(*parts, strict=True))
        return {**dict(zip(names, places, strict=True)), **labels.arrays()}

    def _rows_in(self, block: Block, line: int) -> Iterator[Rows]:
        """Yield the rows of a block whose first line is `line`: found by C, or one by one where not usual."""
        position, slow = 0, 1
        while position <= block.end:
            found = self._find_rows(block, position)
            if found is not None:
                rows = _of_found(found, block, line)
                yield rows
                position, line = found.position, rows.next_line
                # Rows that are not usual are seldom alone: each time twice as many are taken.
                slow = 1 if len(found) > slow else min(2 * slow, MOST_ROWS)
                if len(found) == MOST_ROWS:
                    continue
            else:
                slow = MOST_ROWS
            if position <= block.end:
                rows, position = self._rows_one_by_one(block, position, line, slow)
                yield rows
                line = rows.next_line

    def _rows_one_by_one(
        self, block: Block, position: int, line: int, most: int
    ) -> tuple[Rows, int]:
        """Return some rows from a position on, and where it goes on: the plain way."""
        places: list[tuple[int, int, int]] = []
        labels: list[Label] = []
        while position <= block.end and len(labels) < most:
            end = self._row_end(block, position)
            row = block.text[position:end]
            if row and not row.isspace():
                places.append((block.offset + position, len(row), line))
                labels.append(self._label_in(row, line))
            position, line = end + 1, line + 1 + row.count(b"\n")
        offsets, lengths, lines = np.array(places, np.int64).reshape(-1, 3).T
        return Rows(offsets, lengths, lines, line, lambda: labels), position


def _of_found(found: FoundRows, block: Block, line: int) -> Rows:
    def texts() -> list[Label]:
        starts, lengths = found.label_starts.tolist(), found.label_lengths.tolist()
        return [block.text[start : start + n] for start, n in zip(starts, lengths, strict=True)]

    numbers = found.numbers if len(found) and found.numbers.min() >= 0 else None
    offsets, lines = block.offset + found.starts, line + found.lines
    return Rows(offsets, found.lengths, lines, line + found.lines_passed, texts, numbers)


def _is_base64(text: str) -> bool:
    return text.startswith(_BASE64_STARTS) and len(text) > 60


def _decode(text: str) -> bytes:
    try:
        image = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"the image is no base64 ({error}); fix the line", kind="base64") from error
    check_image_bytes(len(image))
    return image
