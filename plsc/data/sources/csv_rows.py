"""CSV files: an image column and a label column, by name (RFC 4180; a header line is needed)."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from plsc.data.sources.columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    Label,
    LabelReader,
    choose_column,
)
from plsc.data.sources.paths import printable
from plsc.data.sources.rows import MAX_LINE_BYTES, RowSource, text_lines
from plsc.errors import DataError, OptionError
from plsc.storage.blocks import Bytes, open_bytes
from plsc.storage.urls import shown

_QUOTE = b'"'
_MAX_LINES = 2**20  # of one row


class CsvSource(RowSource):
    """A CSV or TSV file with a header: see `RowSource` for images and labels.

    Columns are separated by the one of comma, semicolon, tab and bar that the header holds most of.
    Fields may be quoted, with line ends inside. CRLF, blank lines and a byte order mark are accepted.

    Raises OptionError for a column that is not there, DataError that names the line for a row with too
    many or too few fields, or with a label that is none.
    """

    def _open(
        self, location: str, image: str | None, label: str | None, labels: LabelReader
    ) -> Mapping[str, np.ndarray]:
        data = open_bytes(location)
        header = next((row for _, _, row in _whole_rows(data)), b"").removesuffix(b"\n")
        self._delimiter = max(b",;\t|".decode(), key=header.decode("utf-8", "replace").count)
        self._separator = self._delimiter.encode()
        try:
            self.columns = [name.strip() for name in self._split(header)]
            image = choose_column(image, self.columns, IMAGE_COLUMNS, "image")
            label = choose_column(label, self.columns, LABEL_COLUMNS, "label")
        except OptionError as error:
            raise OptionError(f"{shown(location)}: {error}") from error
        except DataError as error:
            raise DataError(
                f"{shown(location)}: the first line {error}; expected the columns' names"
            ) from error
        self._image, self._label = self.columns.index(image), self.columns.index(label)
        return self._load(data, f"csv-1-{self._label}", labels)

    def _split(self, row: bytes) -> list[str]:
        """Return the fields of a row; DataError if it is no UTF-8, or its quotes do not close."""
        try:
            text = row.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"is no UTF-8 text ({error.reason})") from error
        if _QUOTE not in row:
            return text.removesuffix("\r").split(self._delimiter)
        # The limit of the module is for the whole process: raised, never lowered.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
        try:
            rows = list(csv.reader([text], delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            raise DataError(f"is no CSV ({error})") from error
        return rows[0] if rows else []

    def _image_text(self, row: bytes) -> str:
        if _QUOTE in row:
            fields = self._split(row)
            if len(fields) > self._image:
                return fields[self._image].strip()
        else:  # the long field is cut out before it is decoded
            parts = row.removesuffix(b"\r").split(self._separator)
            if len(parts) > self._image:
                return parts[self._image].decode("utf-8", "surrogateescape").strip()
        raise DataError("the image column is missing; the file changed while it was in use")

    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        return itertools.islice(_whole_rows(self._data), 1, None)

    def _label_in(self, row: bytes, line: int) -> Label:
        name, wanted = shown(self.location), len(self.columns)
        try:
            fields: Sequence[Label] = (
                self._split(row)
                if _QUOTE in row
                else row.removesuffix(b"\r").split(self._separator)
            )
        except DataError as error:
            raise DataError(f"{name}:{line} {error}; fix the line") from error
        if len(fields) != wanted:
            raise DataError(
                f"{name}:{line} has {len(fields)} fields, the header {wanted}: "
                f"'{printable(row[:100])}'; fix the line"
            )
        return fields[self._label]


def _whole_rows(data: Bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (first line, offset, row) of all rows but blank ones: the lines up to where no quote is open."""
    held = bytearray()  # a row whose quote is still open
    first = start = 0
    for number, offset, line in text_lines(data):
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
        raise DataError(
            f"{shown(data.location)}:{first}: a quote that opens here does not close; fix it"
        )
