"""Read Parquet files with an image column and a label column."""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from plsc.data.files import Shards, ranked, shard_files
from plsc.data.sources.columns import (
    IMAGE_COLUMNS,
    ColumnSource,
    LabelReader,
    check_class_name,
    choose_column,
    packed_names,
)
from plsc.errors import DataError, OptionError
from plsc.storage.blocks import BytesFile
from plsc.storage.urls import base_name, shown

CACHE_BYTES = 256 * 2**20
GROUP_BYTES = 2**30
_MOST_METADATA = 64 * 2**20  # bytes of a string in the description of a file
_MOST_OPEN = 16
# Exceptions of pyarrow for damaged files.
_FAULTS = (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError)


class ParquetSource(ColumnSource):
    """The samples of one or several Parquet files (`shard_files`), local or remote.

    The image column has encoded images: binary, or a struct with ``bytes``, as Hugging Face datasets write
    it. The label column has integers, or class names as in `RowSource`. Names of a ``ClassLabel`` feature of
    Hugging Face, in the metadata of the schema, are the names of the integers.

    A row group is decoded as a whole, and up to 256 MiB of decoded groups are cached. For fast reads use
    block order, or small groups.

    Raises:
        OptionError: a column is missing or of an unsupported type.
        DataError: a file is damaged, or a label is missing.
    """

    def _open(
        self, location: str, image: str | None, label: str | None, labels: LabelReader
    ) -> Mapping[str, np.ndarray]:
        self._groups = RowGroups(Shards(shard_files(location, ".parquet")))
        self._choose(image, label, labels)
        self._place_of_group: list[tuple[int, int]] = []  # (file, row group in it)
        self._ends: list[int] = []  # of each row group, in rows of the whole dataset
        self._first_rows: list[int] = []  # of each file
        rows = 0
        for shard in range(len(self._groups.shards.locations)):
            self._first_rows.append(rows)
            for number, count in enumerate(self._groups.rows(shard)):
                rows += count
                self._place_of_group.append((shard, number))
                self._ends.append(rows)
            self._read_labels(shard, labels)
        if not rows:
            raise DataError(f"{self._groups.title(0)} contains no rows")
        found = labels.arrays()
        if self._names and not labels.names_wanted:
            if (most := found["labels"].max()) >= len(self._names):
                raise DataError(f"{self._groups.title(0)}: label {most} has no name in its ClassLabel")
            found |= packed_names(self._names)
        return found

    def name(self, index: int) -> str:
        """Return ``train.parquet row 12``; rows count from 0 in their file."""
        shard = bisect_right(self._first_rows, index) - 1
        title = base_name(self._groups.title(shard))
        return f"{title} row {index - self._first_rows[shard]}"

    def _stored_at(self, index: int) -> bytes:
        group = bisect_right(self._ends, index)
        row = index - (self._ends[group - 1] if group else 0)
        image: bytes | None = self._groups.group(*self._place_of_group[group], self._leaf)[row].as_py()
        return image or b""

    def _choose(self, image_column: str | None, label_column: str | None, labels: LabelReader) -> None:
        schema = self._groups.schema(0)
        try:
            image = choose_column(image_column, schema.names, IMAGE_COLUMNS, "image")
            self._label = labels.choose_column(label_column, schema.names)
            self._leaf = _image_leaf(image, schema.field(image).type)
            kind = schema.field(self._label).type
            if not (kinds.is_integer(kind) or _is_text(kind)):
                raise OptionError(f"the label {self._label!r} is {kind}; expected integers or class names")
            self._names = _class_label_names(schema, self._label)
        except (DataError, OptionError) as error:
            raise type(error)(f"{self._groups.title(0)}: {error}") from error

    def _read_labels(self, shard: int, labels: LabelReader) -> None:
        def place(position: int) -> str:
            return f"{self._groups.title(shard)} row {start + position}"

        start = 0
        column = self._groups.column(shard, self._label)
        names = _class_label_names(self._groups.schema(shard), self._label)
        if not (kinds.is_integer(column.type) or _is_text(column.type)) or names != self._names:
            raise DataError(f"{self._groups.title(shard)}: its labels are unlike those of other files")
        mapped = dict(enumerate(names)) if labels.names_wanted else {}  # by a label map
        for chunk in column.chunks:
            values = ("" if label is None else mapped.get(label, label) for label in chunk.to_pylist())
            labels.extend(values, place)
            start += len(chunk)


def _class_label_names(schema: pa.Schema, column: str) -> list[str]:
    """Return the names of a column of Hugging Face's type ClassLabel; empty for other columns."""
    try:
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]["names"]
        is_named = kinds.is_integer(schema.field(column).type) and isinstance(names, list)
        if not is_named or len(ranked(names)[0]) != len(names):
            return []
        for name in names:
            check_class_name(name)
        return names
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return []


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if kinds.is_dictionary(kind) else kind
    return str(kind) in ("string", "large_string", "string_view")


def _is_bytes(kind: pa.DataType) -> bool:
    return str(kind).startswith(("binary", "large_binary", "fixed_size_binary"))


def _image_leaf(name: str, kind: pa.DataType) -> str:
    if _is_bytes(kind):
        return name
    if kinds.is_struct(kind) and kind.get_field_index("bytes") >= 0 and _is_bytes(kind.field("bytes").type):
        return f"{name}.bytes"
    raise OptionError(
        f"the image column {name!r} is {kind}; expected binary, or a struct with binary 'bytes'"
    )


def _checked_rows(column: pa.ChunkedArray, expected: int) -> pa.ChunkedArray:
    if len(column) != expected:
        raise ValueError(f"only {len(column)} of {expected} rows could be read")
    return column


class RowGroups:
    """The row groups of some files. Thread-safe, but one thread decodes at a time; picklable.

    Up to 256 MiB of decoded groups are cached. Raises DataError for a damaged file, and for a group of over 1
    GiB, which would have to be decoded for every single image in it.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._files: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._decoded: OrderedDict[tuple[int, int, str], pa.ChunkedArray] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def schema(self, shard: int) -> pa.Schema:
        """Return the schema of a file."""
        with self._lock, self._faults(shard):
            return self._open(shard).schema_arrow

    def rows(self, shard: int) -> list[int]:
        """Return the number of rows in each group of a file."""
        with self._lock, self._faults(shard):
            metadata = self._open(shard).metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            found = [(group.num_rows, group.total_byte_size) for group in groups]
            stored = self.shards[shard].size
        total = sum(rows for rows, _ in found)  # more than bytes are nulls: they would fill the memory
        if total > stored or not all(rows >= 0 and 0 <= size <= GROUP_BYTES for rows, size in found):
            raise DataError(
                f"{self.title(shard)} announces {total:,} images in {stored:,} bytes, or a row group of over "
                f"{GROUP_BYTES} bytes"
            )
        return [rows for rows, _ in found]

    def column(self, shard: int, name: str) -> pa.ChunkedArray:
        """Return a whole column of a file."""
        with self._lock, self._faults(shard):
            file = self._open(shard)
            found = file.read(columns=[name], use_threads=False).column(0)
            return _checked_rows(found, file.metadata.num_rows)

    def group(self, shard: int, number: int, leaf: str) -> pa.ChunkedArray:
        """Return one column of a group; leaf: its name, or ``struct.field``."""
        key = shard, number, leaf
        with self._lock:
            found = self._decoded.get(key)
            if found is not None:
                self._decoded.move_to_end(key)
                return found
            with self._faults(shard):
                found = self._decode(*key)
            self._decoded[key] = found
            self._bytes += found.nbytes
            while self._bytes > CACHE_BYTES and len(self._decoded) > 1:
                self._bytes -= self._decoded.popitem(last=False)[1].nbytes
            return found

    def title(self, shard: int) -> str:
        """Return the file's name for messages."""
        return shown(self.shards.locations[shard])

    def _decode(self, shard: int, number: int, leaf: str) -> pa.ChunkedArray:
        file = self._open(shard)
        column = file.read_row_group(number, columns=[leaf], use_threads=False).column(0)
        for name in leaf.split(".")[1:]:
            column = pc.struct_field(column, name)
        return _checked_rows(column, file.metadata.row_group(number).num_rows)

    def _open(self, shard: int) -> pq.ParquetFile:
        found, data = self._files.get(shard), self.shards[shard]  # which checks that it has not changed
        if found is None:
            source = pa.PythonFile(BytesFile(data), mode="r")
            found = self._files[shard] = pq.ParquetFile(
                source,
                pre_buffer=False,
                page_checksum_verification=True,
                thrift_string_size_limit=_MOST_METADATA,
                thrift_container_size_limit=10**6,
            )
            if len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)
        self._files.move_to_end(shard)
        return found

    @contextmanager
    def _faults(self, shard: int) -> Any:
        try:
            yield
        except _FAULTS as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{self.title(shard)} is damaged or not a Parquet file ({reason}); copy or write it again"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"shards": self.shards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["shards"])  # type: ignore[misc]
