"""Read samples from lines of text: CSV (RFC 4180, with a header), JSON lines (jsonlines.org), and base64."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.decode import MAX_FILE_BYTES
from plsc.data.files import PathTable, Shards, listed_path, load_or_build, read_file_list
from plsc.data.lines import Buffers, LineReader, decode_base64
from plsc.data.sources.base import FileSource, IndexedSource, printable
from plsc.data.sources.columns import (
    IMAGE_COLUMNS,
    ColumnSource,
    Label,
    LabelReader,
    choose_column,
)
from plsc.errors import DataError, OptionError, naming
from plsc.storage.blocks import BytesFile, buffered, open_bytes, text_lines
from plsc.storage.regular import parse_json
from plsc.storage.urls import base_name, is_url, parent_of, shown

KIND = "base64-3"
_BLOCK = 4 * 2**20
_MAX_ROW_BYTES = 64 * 2**20
MAX_LINE_BYTES = MAX_FILE_BYTES * 4 // 3 + 2**16  # the largest image in base64, and some more

TextLines = Iterator[tuple[int, int, bytes]]
"""As `text_lines` yields them."""
Choose = Callable[[list[str]], tuple[str, str]]
"""Return the image and the label column among all columns."""


class RowSource(FileSource, ColumnSource):
    """The rows of one text file, local or remote, with a column of image paths and one of labels.

    A path (`located`) is relative to `root`. Labels are integers, or class names, whose ids are their ranks
    in sorted order or come from `label_map`; in a column ``class_name`` all are names. The file is read once;
    the index is stored (`load_or_build`).

    image_folder: folder or URL of the images; by default that of the file. allowed: as of `located`.

    A format implements `_cells`. Raises OptionError if a column is missing, and DataError that names the line
    of a row that is invalid.
    """

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
        root = parent_of(str(location)) if image_folder is None else str(image_folder)
        if image_folder is not None and not is_url(root) and not Path(root).is_dir():
            raise DataError(f"the image_folder {root} does not exist; expected the folder of the images")
        self._place = root, allowed, str(location)
        ColumnSource.__init__(
            self, location, image_column=image_column, label_column=label_column, label_map=label_map
        )
        super().__init__(root if is_url(root) else Path(root), self._paths, self._labels)

    def _open(
        self, location: str, image: str | None, label: str | None, labels: LabelReader
    ) -> Mapping[str, np.ndarray]:
        self._title = base_name(shown(location))
        how = json.dumps([image, label, labels.names_wanted, *self._place[:2]])
        kind = f"{self._kind} {hashlib.sha256(how.encode()).hexdigest()}"  # URLs may have secrets
        index = load_or_build(Shards([location]), kind, lambda: self._build(location, image, label, labels))
        self._paths, self._lines = PathTable(index["text"], index["ends"]), index["lines"]
        return index

    @abstractmethod
    def _cells(self, lines: TextLines, name: str, choose: Choose) -> Iterator[tuple[int, str, Label]]:
        """Yield the line number, path and label of each row of `text_lines`; name: of the file."""

    def name(self, index: int) -> str:
        """Return ``train.csv:12``: the file and the line in it."""
        return f"{self._title}:{self._lines[index]}"

    def _build(
        self, location: str, image: str | None, label: str | None, labels: LabelReader
    ) -> dict[str, np.ndarray]:
        name = shown(location)
        paths, lines = PathTable(), array("q")

        def choose(columns: list[str]) -> tuple[str, str]:
            try:
                found = choose_column(image, columns, IMAGE_COLUMNS, "image")
                return found, labels.choose_column(label, columns)
            except OptionError as error:
                raise OptionError(f"{name}: the first line: {error}") from error

        def found() -> Iterator[Label]:
            rows = text_lines(buffered(open_bytes(location)), name, _MAX_ROW_BYTES)
            for line, path, value in self._cells(rows, name, choose):
                with naming("{}:{}".format, name, line):
                    paths.append(listed_path(path.encode("utf-8", "surrogatepass"), *self._place))
                lines.append(line)
                yield value

        labels.extend(found(), lambda _: f"{name}:{lines[-1]}")
        if not lines:
            raise DataError(f"{name} contains no samples; expected one line per sample")
        text, ends = paths.arrays()
        return {"text": text, "ends": ends, "lines": np.frombuffer(lines, np.int64), **labels.arrays()}


class CsvSource(RowSource):
    """A CSV or TSV file with a header; see `RowSource` for images and labels.

    The separator is the most frequent one of comma, semicolon, tab and bar in the header. Fields may be
    quoted and then contain line ends. CRLF, blank lines and a byte order mark are accepted.
    """

    _kind = "csv-4"

    def _cells(self, lines: TextLines, name: str, choose: Choose) -> Iterator[tuple[int, str, Label]]:
        rows = _csv_rows(lines, name)
        columns = [column.strip() for column in next(rows, (0, []))[1]]
        image, label = map(columns.index, choose(columns))
        for line, fields in rows:
            if len(fields) != len(columns):
                raise DataError(f"{name}:{line}: {len(fields)} fields, but the header has {len(columns)}")
            yield line, fields[image].strip(), fields[label]


def _csv_rows(lines: TextLines, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the fields of each row but blank ones."""
    start = seen = 0

    def decoded() -> Iterator[str]:
        nonlocal seen
        for seen, _, line in lines:  # noqa: B007 - read below
            yield line.decode()

    try:
        texts = decoded()
        header = next(filter(str.strip, texts), "")
        delimiter = max(",;\t|", key=header.count)
        start = seen
        for fields in csv.reader(itertools.chain([header], texts), delimiter=delimiter, strict=True):
            if len(fields) > 1 or "".join(fields).strip():
                yield start, fields
            start = seen + 1
    except (csv.Error, UnicodeDecodeError) as error:  # also for a quote that is not closed
        raise DataError(f"{name}:{start}: not CSV in UTF-8: {error}") from error


class JsonLinesSource(RowSource):
    """A file of JSON objects, one per line; see `RowSource` for images and labels.

    Blank lines, CRLF and a byte order mark are accepted.
    """

    _kind = "json-4"

    def _cells(self, lines: TextLines, name: str, choose: Choose) -> Iterator[tuple[int, str, Label]]:
        columns = None
        for number, _, line in lines:
            if line.isspace():
                continue
            with naming("{}:{}".format, name, number):
                row = _object(line)
                columns = columns or choose(list(row))
                path, label = _value(row, columns[0], (str,)), _value(row, columns[1], (int, str))
            yield number, path.strip(), label


def _object(line: bytes) -> dict[str, Any]:
    try:
        return dict(parse_json(line.decode()).items())
    except (ValueError, AttributeError, RecursionError) as error:
        reason = str(error)[:100]
        raise DataError(f"expected one JSON object, got '{printable(line[:60])}' ({reason})") from error


def _value(row: dict[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    if type(row.get(name)) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise DataError(f"{name!r} is missing, or not {expected}")
    return row[name]


# Base64.


class Base64Source(IndexedSource):
    """The samples of the files that ``file_list`` names, in its order, in a local folder or at an fsspec URL.

    All files are read once, to index the lines and labels; the index is stored (`load_or_build`). Blank lines
    are ignored.

    Args:
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
        *,
        allowed: Sequence[str] = (),
    ) -> None:
        self.locations = read_file_list(data_dir, file_list, allowed=allowed)
        self._files = Shards(self.locations, str(data_dir))
        index = load_or_build(self._files, KIND, self._build)
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
