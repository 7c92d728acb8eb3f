"""CSV files: an image column and a label column, by name (RFC 4180; a header line is needed)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from plsc.data.sources.columns import IMAGE_COLUMNS, LABEL_COLUMNS, Label, choose_column
from plsc.data.sources.lines import MAX_LINE_BYTES, first_line, line_blocks
from plsc.data.sources.paths import printable
from plsc.data.sources.rows import Rows, RowSource, starts_of
from plsc.errors import DataError, OptionError
from plsc.storage.blocks import Bytes, open_bytes
from plsc.storage.urls import shown

_QUOTE = b'"'
_MAX_LINES = 2**20  # of one row: each is a Python object for a while


class CsvSource(RowSource):
    """A CSV or TSV file with a header: see `RowSource` for images and labels.

    Columns are separated by the one of comma, semicolon, tab and bar that the header holds most of.
    Fields may be quoted, with line ends inside. CRLF, blank lines and a byte order mark are accepted.

    Raises OptionError for a column that is not there, DataError that names the line for a row with too
    many or too few fields, or with a label that is none.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        image_column: str | None = None,
        label_column: str | None = None,
        label_map: str | Path | None = None,
    ) -> None:
        data = open_bytes(location)
        header = first_line(data)
        self._delimiter = max(b",;\t|".decode(), key=header.decode("utf-8", "replace").count)
        self._separator = self._delimiter.encode()
        try:
            self.columns = [name.strip() for name in self._split(header)]
            image = choose_column(image_column, self.columns, IMAGE_COLUMNS, "image")
            label = choose_column(label_column, self.columns, LABEL_COLUMNS, "label")
        except (DataError, OptionError) as error:
            raise type(error)(f"{shown(str(location))}: {error}") from error
        self._image, self._label = self.columns.index(image), self.columns.index(label)
        self.kind = f"csv-1-{self._label}"
        super().__init__(data, label_map)

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

    def _rows(self, data: Bytes) -> Iterator[Rows]:
        is_header = True
        for offset, line, text in _whole_rows(data):
            lines = text.split(b"\n")
            if is_header:  # and blank lines before it
                skipped = self._lines_of_header(lines)
                offset += sum(map(len, lines[:skipped])) + skipped
                line, lines = line + skipped, lines[skipped:]
                is_header = not skipped
            parts = None if _QUOTE in text else [row.split(self._separator) for row in lines]
            if parts is not None and set(map(len, parts)) == {len(self.columns)}:
                starts, lengths = starts_of(offset, lines)
                yield Rows(
                    starts, lengths, list(range(line, line + len(lines))), self._labels_in(parts)
                )
            elif lines:
                yield self._rows_one_by_one(offset, line, lines)

    def _labels_in(self, parts: list[list[bytes]]) -> list[Label]:
        label = self._label
        if label == len(self.columns) - 1:
            return [fields[label].removesuffix(b"\r") for fields in parts]
        return [fields[label] for fields in parts]

    def _lines_of_header(self, lines: list[bytes]) -> int:
        """Return how many lines go by until the header is read; 0 if it is not among them."""
        blank = next((i for i, row in enumerate(lines) if row and not row.isspace()), len(lines))
        quotes = 0
        for number, row in enumerate(lines[blank:], start=blank + 1):
            quotes += row.count(_QUOTE)
            if quotes % 2 == 0:
                return number
        return 0

    def _rows_one_by_one(self, offset: int, line: int, lines: list[bytes]) -> Rows:
        """Return the rows of a block that has blank lines, quoted fields or a fault."""
        rows = Rows([], [], [], [])
        position = 0
        while position < len(lines):
            start = position
            is_open = lines[position].count(_QUOTE) % 2
            while is_open and position + 1 < len(lines):
                position += 1
                is_open ^= lines[position].count(_QUOTE) % 2
            row = b"\n".join(lines[start : position + 1])
            if row and not row.isspace():
                rows.offsets.append(offset)
                rows.lengths.append(len(row))
                rows.lines.append(line + start)
                rows.labels.append(self._label_in(row, line + start))
            offset += len(row) + 1
            position += 1
        return rows

    def _label_in(self, row: bytes, line: int) -> str:
        name, wanted = shown(self.location), len(self.columns)
        try:
            fields = self._split(row)
        except DataError as error:
            raise DataError(f"{name}:{line} {error}; fix the line") from error
        if len(fields) != wanted:
            raise DataError(
                f"{name}:{line} has {len(fields)} fields, the header {wanted}: "
                f"'{printable(row[:100])}'; fix the line"
            )
        return fields[self._label]


def _whole_rows(data: Bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield blocks of lines as `line_blocks` does, that end where no quote is open."""
    held: list[bytes] = []
    start = first = quotes = held_bytes = held_lines = 0
    for offset, line, text in line_blocks(data):
        if not held:
            start, first = offset, line
        held.append(text)
        held_bytes += len(text)
        held_lines += text.count(b"\n")
        quotes += text.count(_QUOTE)
        if quotes % 2 == 0:
            yield start, first, held[0] if len(held) == 1 else b"\n".join(held)
            held, held_bytes, held_lines, quotes = [], 0, 0, 0
        elif held_bytes > MAX_LINE_BYTES or held_lines > _MAX_LINES:
            break
    if held:
        raise DataError(
            f"{shown(data.location)}: a quote that opens after line {first - 1} does not close; fix it"
        )
