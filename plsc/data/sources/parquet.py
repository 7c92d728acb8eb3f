"""Parquet files: an image column and a label column, by name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from plsc.data.sources.columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    ColumnSource,
    LabelReader,
    choose_column,
)
from plsc.data.sources.limits import check_image_bytes
from plsc.data.sources.parquet_groups import RowGroups
from plsc.data.sources.shards import Shards, shard_files
from plsc.errors import DataError, OptionError
from plsc.storage.urls import base_name


class ParquetSource(ColumnSource):
    """Samples of a Parquet file or of several (`shard_files`), local or remote.

    The image column holds encoded images: binary, or a struct with ``bytes`` (as Hugging Face's datasets
    write it). The label column, read alone, holds whole numbers; or names, as in `RowSource`.

    A row group is decoded as a whole, and 256 MiB of decoded groups are kept: read neighbours together
    (block order), or write small groups (`plsc data convert` does). Raises OptionError for a column that is
    not there or of another type, DataError for a damaged file and for a label that is missing.
    """

    def _open(
        self, location: str, image: str | None, label: str | None, labels: LabelReader
    ) -> Mapping[str, np.ndarray]:
        self._groups = RowGroups(Shards(shard_files(location, ".parquet")))
        self._choose(image, label)
        self._place_of_group: list[tuple[int, int]] = []  # (file, row group in it)
        self._ends: list[int] = []  # of each row group, in rows of the whole set
        self._first_rows: list[int] = []  # of each file
        rows = 0
        for shard in range(len(self._groups.shards.locations)):
            self._first_rows.append(rows)
            for number, count in enumerate(self._groups.rows(shard)):
                rows += count
                self._place_of_group.append((shard, number))
                self._ends.append(rows)
            self._read_labels(shard, labels)
            if len(labels) != rows:
                raise DataError(
                    f"{self._groups.title(shard)}: its row groups do not add up; write it anew"
                )
        if not rows:
            raise DataError(f"{self._groups.title(0)} holds no rows")
        return labels.arrays()

    def name(self, index: int) -> str:
        """Return ``train.parquet row 12``, counted from 0 in its file."""
        shard = bisect_right(self._first_rows, index) - 1
        title = base_name(self._groups.title(shard))
        return f"{title} row {index - self._first_rows[shard]}"

    def _image_at(self, index: int) -> bytes:
        group = bisect_right(self._ends, index)
        row = index - (self._ends[group - 1] if group else 0)
        image = self._groups.group(*self._place_of_group[group], self._leaf).value(row)
        if image is None:
            raise DataError("the image is missing; fill it in, or take the row out", kind="missing")
        check_image_bytes(len(image))
        return image

    def _choose(self, image_column: str | None, label_column: str | None) -> None:
        schema = self._groups.schema(0)
        try:
            image = choose_column(image_column, schema.names, IMAGE_COLUMNS, "image")
            self._label = choose_column(label_column, schema.names, LABEL_COLUMNS, "label")
            self._leaf = _image_leaf(image, schema.field(image).type)
            kind = schema.field(self._label).type
            if not (kinds.is_integer(kind) or kinds.is_string(_plain(kind))):
                raise OptionError(
                    f"the label column {self._label!r} is {kind}; expected whole numbers or names"
                )
        except OptionError as error:
            raise OptionError(f"{self._groups.title(0)}: {error}") from error

    def _read_labels(self, shard: int, labels: LabelReader) -> None:
        def place(position: int) -> str:
            return f"{self._groups.title(shard)} row {start + position}"

        start = 0
        column = self._groups.column(shard, self._label)
        if column.null_count:
            first = column.is_null().to_numpy().argmax()
            raise DataError(
                f"{place(int(first))}: the label {self._label!r} is missing ({column.null_count} are)"
            )
        if not (kinds.is_integer(column.type) or kinds.is_string(_plain(column.type))):
            raise DataError(f"{self._groups.title(shard)}: the labels are {column.type} here")
        for chunk in column.chunks:
            labels.extend(chunk.to_pylist(), place)
            start += len(chunk)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values: a dictionary's are behind its codes."""
    kind = kind.value_type if kinds.is_dictionary(kind) else kind
    return pa.string() if kinds.is_large_string(kind) else kind


def _image_leaf(name: str, kind: pa.DataType) -> str:
    if kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return name
    if kinds.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        field = kind.field("bytes").type
        if kinds.is_binary(field) or kinds.is_large_binary(field):
            return f"{name}.bytes"
    raise OptionError(
        f"the image column {name!r} is {kind}; expected binary, or a struct with binary 'bytes'"
    )
