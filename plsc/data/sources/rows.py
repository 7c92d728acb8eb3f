"""What sources have in common whose samples are rows of a text file: CSV and JSON lines."""

from __future__ import annotations

import binascii
import itertools
import posixpath
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pybase64

from plsc.data.decode import MAX_FILE_BYTES
from plsc.data.sources.base import read_image_file
from plsc.data.sources.columns import ColumnSource, Label, LabelReader
from plsc.data.sources.index_store import load_or_build
from plsc.data.sources.limits import check_image_bytes
from plsc.data.sources.paths import printable
from plsc.data.sources.ranges import read_from
from plsc.errors import DataError
from plsc.storage.blocks import Bytes, buffered, open_bytes
from plsc.storage.urls import base_name, is_url, join, parent_of, shown

# How the base64 of JPEG, PNG, GIF, BMP, WEBP and TIFF files begins.
_BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "Qk", "UklGR", "SUkqA", "TU0AK")

MAX_LINE_BYTES = MAX_FILE_BYTES * 4 // 3 + 2**16  # the longest image in base64, and some more
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def text_lines(data: Bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number from 1, offset in bytes, the line with its LF) of each line, without a byte order mark.

    Raises DataError that names the line for one of over 85 MiB.
    """
    file, offset = buffered(data), 0
    for number in itertools.count(1):
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{shown(data.location)}:{number} is over {MAX_LINE_BYTES} bytes long; fix it"
            )
        mark = len(_BYTE_ORDER_MARK) if number == 1 and line.startswith(_BYTE_ORDER_MARK) else 0
        yield number, offset + mark, line[mark:]
        offset += len(line)


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

    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (first line, offset, row) of each sample; rows may have their LF at the end."""
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
        places = array("q")  # offset, length and first line of each row

        def found() -> Iterator[Label]:
            for line, offset, row in self._rows():
                row = row.removesuffix(b"\n")
                places.extend((offset, len(row), line))
                yield self._label_in(row, line)

        labels.extend(found(), lambda _: f"{shown(self.location)}:{places[-1]}")
        if not places:
            raise DataError(f"{shown(self.location)} holds no samples")
        offsets, lengths, lines = np.frombuffer(places, np.int64).reshape(-1, 3).T
        return {"offsets": offsets, "lengths": lengths, "lines": lines, **labels.arrays()}


def _is_base64(text: str) -> bool:
    return text.startswith(_BASE64_STARTS) and len(text) > 60


def _decode(text: str) -> bytes:
    try:
        image = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"the image is no base64 ({error}); fix the line", kind="base64") from error
    check_image_bytes(len(image))
    return image
