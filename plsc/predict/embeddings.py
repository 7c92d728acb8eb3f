"""The folder that `predict` writes: numbered shards of rows, as .npy, and ``_index.json``.

A shard is ``<number>-<crc32>.npy``, a structured array with one field per column. It appears under its name
when it is complete.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
from safetensors.torch import load_file

from plsc.checkpoint import load_weights, read_manifest
from plsc.checkpoint.manifest import checksum
from plsc.errors import CheckpointError, DataError, kind_and_line, printable
from plsc.export.folder import WEIGHTS_NAME, check_file, checksum_of, read_about
from plsc.predict.network import find_model
from plsc.storage.disk import HIDDEN, Size, Text, read_record, replacing

INDEX_NAME = "_index.json"
FORMAT, VERSION = "plsc-embeddings", 1
EMBEDDINGS, NAMES = "embeddings", "names"  # columns
_MOST_INDEX, _MOST_FILE, _MOST_SHARD, _MOST_AXES = 2**28, 2**33, 2**31, 32  # bytes; axes of a column
_SHARD = re.compile(r"(\d{5,})-([0-9a-f]{8})\.npy")
Columns = Mapping[str, np.ndarray]


class _Index(TypedDict):
    format: Literal["plsc-embeddings"]
    version: Literal[1]


class _Column(TypedDict):
    dtype: Literal["float32", "int64", "object"]
    shape: list[Annotated[int, (0, 2**40)]]


class _Shard(TypedDict):
    file: Annotated[str, _SHARD.pattern]
    rows: Size


class _Model(TypedDict):
    checkpoint: Text
    step: Any
    name: Any
    weights: Text


class _Complete(TypedDict):
    complete: Literal[True]
    model: _Model
    input: dict[str, Any]
    columns: dict[str, _Column]
    count: Annotated[int, (0, 2**40)]
    shards: list[_Shard]


def open_embeddings(
    folder: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> Embeddings:
    """Open the folder that ``predict`` wrote; its index is checked now, each shard when it is first read.

    Args:
        folder: the output of ``predict``.
        checkpoint: compare the network of this checkpoint (folder or URL), or folder of
            `Entry.convert_for_prediction`, with the network that computed the embeddings.

    Raises:
        DataError: there is no such folder, or it is incomplete or damaged; also when rows are read.
        CheckpointError: the checkpoint has other weights or another image shape.
    """
    embeddings = Embeddings(Path(folder))
    if checkpoint is not None:
        embeddings.check(checkpoint)
    return embeddings


class NoColumn(DataError, KeyError):
    """There is no column of this name, as after ``plsc predict --field`` of another output."""

    __str__ = Exception.__str__


class Embeddings:
    """The columns of a folder, by name; nothing is read before a column is indexed.

    ``found["embeddings"][:100]`` is float32 [100, D]. The rows have the order of the dataset.

    Attributes:
        index: the contents of ``_index.json``: model, input, flip, columns, count and shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder)
        if self.index.get("complete") is False:
            raise DataError(f"{folder} is incomplete; run the same predict again, which resumes")
        index = read_record(_Complete, self.index, folder / INDEX_NAME, DataError)
        if not _is_sound(index, {path.name for path in folder.iterdir()}):
            raise DataError(f"{folder / INDEX_NAME} is damaged, or names missing shards; predict again")
        self.intact: set[Path] = set()  # shards whose checksums were compared

    def __len__(self) -> int:
        return int(self.index["count"])

    def __getitem__(self, name: str) -> Column:
        """Return a column. Raises NoColumn, a KeyError, if there is none of this name."""
        if name not in self.index["columns"]:
            raise NoColumn(f"{self.folder} has no {name!r}; known: {', '.join(self.index['columns'])}")
        return Column(self, name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the columns."""
        return iter(self.index["columns"])

    def check(self, checkpoint: str | os.PathLike[str]) -> None:
        """Raise CheckpointError unless the network of a checkpoint computed the embeddings."""
        path, is_export = find_model(checkpoint)
        if is_export:
            about = read_about(path)
            check_file(path, WEIGHTS_NAME, about.get("weights"))
            options, weights = about["options"], load_file(path / WEIGHTS_NAME)
        else:
            options, weights = read_manifest(path).options, load_weights(path)
        model, shape = self.index["model"], self.index["input"].get("shape")
        for what, ours, theirs in (
            ("weights", model["weights"], checksum_of(weights)),
            ("image shape", shape, ["batch", *options["model"]["image_shape"]]),
        ):
            if ours != theirs:
                source = printable(f"step {model['step']} of {model['checkpoint']}")
                raise CheckpointError(
                    f"{self.folder} was computed at {source}, and {path} has different {what}: "
                    f"{theirs!s:.16}, not {printable(f'{ours!s:.16}')}"
                )


class Column:
    """A column of several shards as one array; indexing returns a numpy array.

    Indices are integers, slices, arrays of integers, or bool [N].
    """

    def __init__(self, embeddings: Embeddings, name: str) -> None:
        about, shards = embeddings.index["columns"][name], embeddings.index["shards"]
        self._files = [embeddings.folder / shard["file"] for shard in shards]
        self._starts = np.cumsum([0, *(shard["rows"] for shard in shards)])
        self._name, self._intact = name, embeddings.intact
        self.dtype = np.dtype(about["dtype"])
        self.shape = (int(self._starts[-1]), *about["shape"])
        self._part = functools.cache(self._open)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: Any) -> Any:
        """Return a row, or a new array of the chosen rows."""
        if isinstance(index, slice):
            numbers = np.arange(*index.indices(len(self)))
        else:
            numbers = np.asarray(index)
            numbers = np.flatnonzero(numbers) if numbers.dtype == bool else numbers
        outside = (numbers < -len(self)) | (numbers >= len(self))
        if np.any(outside):
            raise IndexError(f"{index} is outside the {len(self)} rows of {self._name}")
        numbers = numbers % max(1, len(self))
        shards = np.searchsorted(self._starts, numbers, side="right") - 1
        parts = {shard: self._part(shard) for shard in np.unique(shards).tolist()}
        rows = np.empty((*numbers.shape, *self.shape[1:]), self.dtype)
        for shard, part in parts.items():
            chosen = shards == shard
            rows[chosen] = part[numbers[chosen] - self._starts[shard]]
        return rows if numbers.ndim else rows[()]

    def shards(self) -> Iterator[np.ndarray]:
        """Yield the column of each shard in order, memory-mapped."""
        return map(self._open, range(len(self._files)))

    def _open(self, shard: int) -> np.ndarray:
        file, shape = self._files[shard], (np.diff(self._starts)[shard], *self.shape[1:])
        try:
            if file not in self._intact and not is_intact(file):
                raise ValueError("its name has another checksum")
            self._intact.add(file)
            column = read_column(file, self._name, shape[0])
            if (column.dtype, column.shape) != (self.dtype, shape):
                raise ValueError(f"{self._name} is {column.dtype} {column.shape}, not {self.dtype} {shape}")
        except Exception as error:  # a damaged file fails in many ways
            raise DataError(
                f"{file} is damaged ({kind_and_line(error):.300}); delete it, and predict again"
            ) from error
        return column


def read_index(folder: Path) -> dict[str, Any]:
    """Return the contents of ``_index.json``. Raises DataError if it is missing or of another format."""
    return dict(read_record(_Index, folder / INDEX_NAME, folder / INDEX_NAME, DataError, _MOST_INDEX))


def _is_sound(index: _Complete, names: set[str]) -> bool:
    """Return whether the parts of a complete index agree; names: of the files in the folder."""
    columns, shards = index["columns"], index["shards"]
    shapes = [about["shape"] for about in columns.values()]
    if max(map(len, shapes), default=0) > _MOST_AXES:
        return False
    row = 8 * sum(map(math.prod, shapes))
    order = [int(shard["file"].partition("-")[0]) for shard in shards]
    return (
        columns.get(NAMES) == {"dtype": "object", "shape": []}
        and all(name == NAMES or about["dtype"] != "object" for name, about in columns.items())
        and all(shard["file"] in names and 0 < shard["rows"] * row <= _MOST_SHARD for shard in shards)
        and all(first < second for first, second in itertools.pairwise(order))  # empty ones are left out
        and sum(shard["rows"] for shard in shards) == index["count"]
    )


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write ``_index.json``, or replace it."""
    with replacing(folder / INDEX_NAME) as temporary:
        temporary.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def write_shard(folder: Path, number: int, names: Sequence[str], columns: Columns) -> str:
    """Write the rows of a shard, and return the name of the file."""
    content = _as_npy(names, columns)
    file = f"{number:05d}-{zlib.crc32(content):08x}.npy"
    with replacing(folder / file) as temporary:
        temporary.write_bytes(content)
    return file


def find_shards(folder: Path) -> dict[int, str]:
    """Return the files of all shards by number; remove unfinished files of killed processes."""
    files = {}
    for path in sorted(folder.iterdir()):
        if HIDDEN.fullmatch(path.name):
            path.unlink()
        elif path.is_file() and not path.is_symlink() and (match := _SHARD.fullmatch(path.name)):
            files[int(match[1])] = path.name
    return files


def is_intact(path: Path) -> bool:
    """Return whether the contents of a shard have the checksum in its name."""
    match = _SHARD.fullmatch(path.name)
    if match is None or path.stat().st_size > _MOST_FILE:
        return False
    return checksum(path).crc32 == int(match[2], 16)


def read_column(path: Path, name: str, rows: int | None = None) -> np.ndarray:
    """Return a column of a shard, memory-mapped; ValueError if it has not `rows` rows."""
    table = np.lib.format.open_memmap(path, mode="r")  # np.load would also read other formats
    if rows not in (None, len(table)):  # before a list of names fills the memory
        raise ValueError(f"it has {len(table)} rows; expected {rows}")
    if name != NAMES:
        return table[name]
    return np.array([encoded.decode("utf-8", "surrogateescape") for encoded in table[name]], dtype=object)


def _as_npy(names: Sequence[str], columns: Columns) -> bytes:
    encoded = np.array([name.encode("utf-8", "surrogateescape") for name in names])
    everything = {**columns, NAMES: encoded}
    fields = [(name, column.dtype, column.shape[1:]) for name, column in everything.items()]
    rows = np.zeros(len(names), np.dtype(fields, align=True))  # zeros also between the fields
    for name, column in everything.items():
        rows[name] = column
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return file.getvalue()
