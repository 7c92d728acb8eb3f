"""Read samples from lines of text: CSV (RFC 4180, with a header), JSON lines (jsonlines.org), and base64."""

from __future__ import annotations

import csv
import itertools
import json
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.decode import MAX_FILE_BYTES
from plsc.data.files import Shards, load_or_build, read_file_list
from plsc.data.lines import Buffers, LineReader, decode_base64
from plsc.data.sources.base import IMAGE_START, IndexedSource, printable, read_image
from plsc.data.sources.columns import (
    IMAGE_COLUMNS,
    ColumnSource,
    Label,
    LabelReader,
    choose_column,
)
from plsc.errors import DataError, OptionError, naming
from plsc.storage.blocks import Bytes, BytesFile, buffered, text_lines
from plsc.storage.regular import parse_json
from plsc.storage.urls import base_name, is_url, located, parent_of, place_of, shown

KIND = "base64-3"
_BLOCK = 4 * 2**20
_QUOTE = b'"'
_MAX_LINES = 2**20  # per row
MAX_LINE_BYTES = MAX_FILE_BYTES * 4 // 3 + 2**16  # the largest image in base64, and some more


class RowSource(ColumnSource):
    """The rows of one text file, local or remote, with a column of images and one of labels.

    An image is a path (`located`), relative to `root`, or base64; the first row decides which (`is_base64`).
    Labels are integers, or class names, whose ids are their ranks in sorted order or come from `label_map`;
    in a column ``class_name`` all are names. The file is read once; the index is stored (`load_or_build`).
    `class_names` has the sorted names, or None.

    image_folder: folder or URL of the images; by default that of the file. allowed: as of `located`.

    A format implements the methods that find and parse rows.
    """

    _most_stored = MAX_LINE_BYTES
    _header_rows = 0
    _kind: str  # of the index

    def __init__(
        self,
        location: str | Path,
        *,
        image_column: str | None = None,
        label_column: str | None = None,
        label_map: str | Path | None = None,
        image_folder: str | Path | None = None,
        allowed: Sequence[str] = (),
    ) -> None:
        self._place = allowed, str(location)
        self.root = parent_of(str(location)) if image_folder is None else str(image_folder)
        if image_folder is not None and not is_url(self.root) and not Path(self.root).is_dir():
            raise DataError(f"the image_folder {self.root} does not exist; expected the folder of the images")
        super().__init__(location, image_column=image_column, label_column=label_column, label_map=label_map)

    def _open(
        self, location: str, image: str | None, label: str | None, labels: LabelReader
    ) -> Mapping[str, np.ndarray]:
        self._title = base_name(shown(location))
        self._files = Shards([location])
        expected = f"expected one line per sample{' below the header' * self._header_rows}"
        _, _, first = next(self._rows(), (1, 0, b""))
        if not first:
            raise DataError(f"{shown(location)} is empty; {expected}")
        try:
            self._columns = self._columns_in(first.removesuffix(b"\n"))
            self._image = choose_column(image, self._columns, IMAGE_COLUMNS, "image")
            self._label = labels.choose_column(label, self._columns)
        except (DataError, OptionError) as error:
            raise type(error)(f"{shown(location)}: the first line: {error}") from error
        kind = f"{self._kind} {json.dumps([self._label, labels.names_wanted])}"
        index = load_or_build([location], kind, lambda: self._build(labels, expected))
        self._offsets, self._lengths, self._lines = (index[name] for name in ("offsets", "lengths", "lines"))
        with naming(self.name, 0):
            self.is_base64 = _is_base64(self._image_text(self._stored_at(0)))
        return index

    @abstractmethod
    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (first line, offset, row) of each row, including a header; rows may end with their LF."""

    @abstractmethod
    def _columns_in(self, first: bytes) -> list[str]:
        """Return the column names from the first row; DataError if it is invalid."""

    @abstractmethod
    def _label_in(self, row: bytes) -> Label:
        """Return the label of a row; DataError if the row is invalid."""

    @abstractmethod
    def _image_text(self, row: bytes) -> str:
        """Return the image column of a row; DataError if it is missing."""

    def name(self, index: int) -> str:
        """Return ``train.csv:12``: the file and the line in it."""
        return f"{self._title}:{self._lines[index]}"

    def path(self, index: int) -> str:
        """Return the path or URL of an image that is no base64, which stays its own in another order."""
        path = self._located(self._image_text(self._stored_at(index)))
        return place_of(self.root if is_url(self.root) else str(Path(self.root).absolute()), path)

    def paths(self) -> list[str]:
        """Return the location of each image, as `located`; DataError if one may not be opened."""
        found = []
        for line, _, row in itertools.islice(self._rows(), self._header_rows, None):
            with naming("{}:{}".format, self._title, line):
                found.append(self._located(self._image_text(row.removesuffix(b"\n"))))
        return found

    def _stored_many(self, indices: np.ndarray) -> Iterator[bytes | None]:
        return super()._stored_many(indices) if self.is_base64 else itertools.repeat(None)

    def _image_in(self, stored: bytes) -> bytes:
        text = self._image_text(stored)
        if self.is_base64:
            return decode_base64(text.encode())
        return read_image(self._located(text), self.root, self.root)

    def _located(self, path: str) -> str:
        return located(path, self.root, *self._place)

    def _build(self, labels: LabelReader, expected: str) -> dict[str, np.ndarray]:
        places = array("q")  # offset, length and first line of each row
        name = shown(self._files.locations[0])

        def found() -> Iterator[Label]:
            for line, offset, row in itertools.islice(self._rows(), self._header_rows, None):
                row = row.removesuffix(b"\n")
                places.extend((offset, len(row), line))
                with naming("{}:{}".format, name, line):
                    label = self._label_in(row)
                yield label

        labels.extend(found(), lambda _: f"{name}:{places[-1]}")
        if not places:
            raise DataError(f"{name} contains no samples; {expected}")
        offsets, lengths, lines = np.frombuffer(places, np.int64).reshape(-1, 3).T
        return {"offsets": offsets, "lengths": lengths, "lines": lines, **labels.arrays()}


def _lines(data: Bytes) -> Iterator[tuple[int, int, bytes]]:
    return text_lines(buffered(data), shown(data.location), MAX_LINE_BYTES)


def _is_base64(text: str) -> bool:
    start = "".join(text[:500].split())[:60]  # enough to show the type of an image
    with suppress(DataError):
        return len(start) == 60 and IMAGE_START.match(decode_base64(start.encode())) is not None
    return start[:5].lower() == "data:"


class CsvSource(RowSource):
    """A CSV or TSV file with a header; see `RowSource` for images and labels.

    The separator is the most frequent one of comma, semicolon, tab and bar in the header. Fields may be
    quoted and then contain line ends. CRLF, blank lines and a byte order mark are accepted.

    Raises:
        OptionError: a column is missing.
        DataError: names the line of a row with too many or too few fields, or with an invalid label.
    """

    _header_rows = 1
    _kind = "csv-3"

    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        return _whole_rows(self._files[0])

    def _columns_in(self, first: bytes) -> list[str]:
        self._delimiter = max(",;\t|", key=first.decode("utf-8", "replace").count)
        return [name.strip() for name in self._split(first)]

    def _split(self, row: bytes) -> list[str]:
        """Return the fields of a row; DataError if it is not UTF-8, or its quotes do not close."""
        try:
            text = row.decode()
            if _QUOTE not in row:
                return text.removesuffix("\r").split(self._delimiter)
            # The csv module's limit is global: only raise it, never lower it.
            csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
            rows = list(csv.reader([text], delimiter=self._delimiter, strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"not CSV in UTF-8: {error}") from error
        return rows[0] if rows else []

    def _field(self, row: bytes, column: str) -> str:
        fields = self._split(row)
        if len(fields) != len(self._columns):
            raise DataError(
                f"{len(fields)} fields, but the header has {len(self._columns)}: '{printable(row[:100])}'"
            )
        return fields[self._columns.index(column)]

    def _label_in(self, row: bytes) -> Label:
        return self._field(row, self._label)

    def _image_text(self, row: bytes) -> str:
        return self._field(row, self._image).strip()


def _whole_rows(data: Bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (first line, offset, row) of all rows but blank ones; a row continues while a quote is open."""
    held = bytearray()  # a row whose quote is still open
    first = start = 0
    for number, offset, line in _lines(data):
        has_odd_quotes = line.count(_QUOTE) % 2 == 1
        if held or has_odd_quotes:
            if not held:
                first, start = number, offset
            elif has_odd_quotes:
                yield first, start, bytes(held + line)
                held.clear()
                continue
            held += line
            if len(held) > MAX_LINE_BYTES or number - first > _MAX_LINES:
                break
        elif not line.isspace():
            yield number, offset, line
    if held:
        raise DataError(f"{shown(data.location)}:{first}: a quote opened here is not closed; fix it")


class JsonLinesSource(RowSource):
    """A file of JSON objects, one per line; see `RowSource` for images and labels.

    Blank lines, CRLF and a byte order mark are accepted.

    Raises:
        OptionError: the first object lacks a name.
        DataError: names a line that is not an object, or lacks the label.
    """

    _kind = "json-3"

    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        return (found for found in _lines(self._files[0]) if not found[2].isspace())

    def _columns_in(self, first: bytes) -> list[str]:
        return list(_object(first))

    def _label_in(self, row: bytes) -> Label:
        label: Label = _value(row, self._label, (int, str))
        return label

    def _image_text(self, row: bytes) -> str:
        image: str = _value(row, self._image, (str,))
        return image.strip()


def _object(line: bytes) -> dict[str, Any]:
    try:
        return dict(parse_json(line.decode()).items())
    except (ValueError, AttributeError, RecursionError) as error:
        reason = str(error)[:100]
        raise DataError(f"expected one JSON object, got '{printable(line[:60])}' ({reason})") from error


def _value(line: bytes, name: str, kinds: tuple[type, ...]) -> Any:
    value = _object(line).get(name)
    if type(value) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise DataError(f"{name!r} is missing, or not {expected}")
    return value


# Base64.


class Base64Source(IndexedSource):
    """The samples of the files that ``file_list`` names, in its order, in a local folder or at an fsspec URL.

    All files are read once, to index the lines and labels; the index is stored (`load_or_build`). Blank lines
    are ignored.

    Args:
        files: paths or URLs to use instead of those in the list.
        allowed: as of `located`.

    Raises:
        DataError: names file and line of a missing label, a label that is not an integer of 0 or more, or,
            when a sample is read, invalid base64.
    """

    _most_stored = MAX_LINE_BYTES

    def __init__(
        self,
        data_dir: str | Path,
        file_list: str = "file_list.txt",
        files: Sequence[str] | None = None,
        *,
        allowed: Sequence[str] = (),
    ) -> None:
        self.locations = list(files) if files else read_file_list(data_dir, file_list, allowed=allowed)
        self._files = Shards(self.locations, str(data_dir))
        index = load_or_build(self.locations, KIND, self._build)
        self._offsets, self._lengths = index["offsets"], index["lengths"]
        self._labels, self._lines = index["labels"], index["lines"]
        self._firsts = index["firsts"]

    def name(self, index: int) -> str:
        """Return ``part_3.txt:12``: the file and the line."""
        file = self._file_numbers(np.array([index])).item()
        return f"{base_name(shown(self.locations[file]))}:{self._lines[index]}"

    @property
    def lines_per_file(self) -> np.ndarray:
        """Number of samples per file, int64; ranks that each read a part need equal numbers."""
        return np.diff(self._firsts)

    def _file_numbers(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._firsts, indices, side="right") - 1

    def _image_in(self, stored: bytes) -> bytes:
        return decode_base64(stored)

    def _build(self) -> dict[str, np.ndarray]:
        """Read all files; return the place, base64 length, label and line number of each sample."""
        buffers = Buffers(1, _BLOCK)
        found: list[tuple[np.ndarray, ...]] = []
        firsts = [0]  # first sample of each file
        for number, location in enumerate(self.locations):
            stream = BytesFile(self._files[number])
            reader = LineReader(stream, base_name(shown(location)), buffers)
            firsts.append(firsts[-1])
            for lines in reader:
                lengths = (lines.tabs - lines.starts).astype(np.uint32)
                numbers = lines.numbers.astype(np.uint32)
                found.append((lines.starts + reader.base, lengths, lines.labels, numbers))
                firsts[-1] += len(lines)
                buffers.give_back(lines.data)
        if not firsts[-1]:
            raise DataError(f"{shown(self.locations[0])} contains no samples, '<base64>TAB<label>'")
        names = ("offsets", "lengths", "labels", "lines")
        columns = map(np.concatenate, zip(*found, strict=True))
        return {**dict(zip(names, columns, strict=True)), "firsts": np.array(firsts, np.int64)}
