"""What sources have in common whose samples are rows of a text file: CSV and JSON lines."""

from __future__ import annotations

import binascii
import functools
import itertools
import posixpath
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pybase64

from plsc.data.sources.base import IndexedSource, read_image_file
from plsc.data.sources.columns import Label, LabelReader, class_names_of, with_label_map
from plsc.data.sources.index_store import load_or_build
from plsc.data.sources.limits import check_image_bytes
from plsc.data.sources.paths import printable
from plsc.data.sources.ranges import read_from
from plsc.errors import DataError
from plsc.storage.blocks import Bytes, open_bytes
from plsc.storage.names import base_name, join, parent_of
from plsc.storage.urls import is_url, shown

# How the base64 of JPEG, PNG, GIF, BMP, WEBP and TIFF files begins.
_BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "Qk", "UklGR", "SUkqA", "TU0AK")


@dataclass(frozen=True)
class Rows:
    """Some rows: where they are in the file, in bytes, their first lines from 1, and their labels."""

    offsets: list[int]
    lengths: list[int]
    lines: list[int]
    labels: list[Label]


class RowSource(IndexedSource):
    """Samples that are rows of one text file, local or remote: a column of images, and one of labels.

    An image is a path below the file's folder, or base64; the first row shows which. Labels are whole
    numbers; or names, whose ids are their ranks in sorted order, or those of `label_map`. The file is
    read through once; the index is kept (`index_store`). `class_names` has the sorted names, or None.

    A format gives `_rows`, which reads the file, and `_image_text`, which takes a row apart again.
    """

    kind = ""

    def __init__(self, data: Bytes, label_map: str | Path | None) -> None:
        self.location = data.location
        self._title = base_name(self.location)
        self._folder = parent_of(self.location)
        self._data = data
        kind = f"{self.kind}{'-names' if label_map is not None else ''}"
        index = load_or_build(
            [self.location], kind, lambda: self._build(names_wanted=label_map is not None)
        )
        self._offsets, self._lengths, self._lines = (
            index[name] for name in ("offsets", "lengths", "lines")
        )
        self.class_names = class_names_of(index)
        self._labels = with_label_map(index["labels"], self.class_names, label_map)
        try:
            self._is_base64 = _is_base64(self._text(0))
        except DataError as error:
            raise error.at(self.name(0)) from error

    def _rows(self, data: Bytes) -> Iterator[Rows]:
        """Yield the rows, in blocks; DataError that names the line for one that is not sound."""
        raise NotImplementedError

    def _image_text(self, row: bytes) -> str:
        """Return the image column of a row; DataError if it is not there."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return ``train.csv:12``: the file and the line in it."""
        return f"{self._title}:{self._lines[index]}"

    def _place(self, lines: list[int], position: int) -> str:
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

    def _build(self, names_wanted: bool) -> dict[str, np.ndarray]:
        offsets, lengths, lines = array("q"), array("q"), array("q")
        labels = LabelReader(names_wanted)
        for rows in self._rows(self._data):
            labels.extend(rows.labels, functools.partial(self._place, rows.lines))
            offsets.extend(rows.offsets)
            lengths.extend(rows.lengths)
            lines.extend(rows.lines)
        if not offsets:
            raise DataError(f"{shown(self.location)} holds no samples")
        places = {"offsets": offsets, "lengths": lengths, "lines": lines}
        found = {name: np.frombuffer(values, np.int64) for name, values in places.items()}
        return {**found, **labels.arrays()}


def starts_of(offset: int, lines: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Return (where each line begins, its bytes) for the lines of a block at `offset`."""
    lengths = list(map(len, lines))
    ends = itertools.accumulate(lengths, lambda start, n: start + n + 1, initial=offset)
    return list(ends)[:-1], lengths


def _is_base64(text: str) -> bool:
    return text.startswith(_BASE64_STARTS) and len(text) > 60


def _decode(text: str) -> bytes:
    try:
        image = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"the image is no base64 ({error}); fix the line", kind="base64") from error
    check_image_bytes(len(image))
    return image
