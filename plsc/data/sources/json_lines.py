"""JSON lines: one object a line, with an image and a label by name (jsonlines.org)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from plsc.data.sources.columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    Label,
    LabelReader,
    choose_column,
)
from plsc.data.sources.paths import printable
from plsc.data.sources.rows import RowSource, text_lines
from plsc.errors import DataError, OptionError
from plsc.storage.blocks import open_bytes
from plsc.storage.urls import shown


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode


class JsonLinesSource(RowSource):
    """A file of JSON objects, one a line: see `RowSource` for images and labels.

    Blank lines, CRLF and a byte order mark are accepted. Raises OptionError for a name that the first
    object does not have, DataError that names the line for one that is no object, or lacks the label.
    """

    def _open(
        self, location: str, image: str | None, label: str | None, labels: LabelReader
    ) -> Mapping[str, np.ndarray]:
        data = open_bytes(location)
        first = next((line for _, _, line in text_lines(data) if not line.isspace()), b"{}")
        try:
            columns = list(_object(first))
            self._image = choose_column(image, columns, IMAGE_COLUMNS, "image")
            self._label = choose_column(label, columns, LABEL_COLUMNS, "label")
        except OptionError as error:
            raise OptionError(f"{shown(location)}: {error}") from error
        except DataError as error:
            raise DataError(f"{shown(location)}: the first line {error}; fix the line") from error
        # A hash of the name, which may hold what a file's name may not.
        return self._load(data, f"json-1-{self._label.encode().hex()[:40]}", labels)

    def _image_text(self, row: bytes) -> str:
        image = _object(row).get(self._image)
        if not isinstance(image, str):
            raise DataError(f"{self._image!r} is {_kind(image)}; expected a path or base64")
        return image.strip()

    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        return (found for found in text_lines(self._data) if not found[2].isspace())

    def _label_in(self, row: bytes, line: int) -> Label:
        try:
            label = _object(row).get(self._label)
            if type(label) is not int and not isinstance(label, str):
                raise DataError(
                    f"the label {self._label!r} is {_kind(label)}; expected a number or a name"
                )
        except DataError as error:
            raise DataError(f"{shown(self.location)}:{line}: {error}; fix the line") from error
        return label


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = _decode(line.decode())
    except (ValueError, RecursionError) as error:
        reason = str(error).split(": ", 1)[0]
        raise DataError(
            f"is no JSON ({reason}): '{printable(line[:60])}'; expected one object a line"
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"is {_kind(found)}; expected an object")
    return found


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
