"""The folder that `predict` writes: numbered shards of rows, as .npy or Parquet, and ``_index.json``.

A shard is ``<number>-<crc32>.npy``, a structured array with one field per column, or the same with the suffix
.parquet. It appears under its name when it is complete.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file

from plsc.checkpoint import load_weights
from plsc.checkpoint.remote import fetch
from plsc.errors import CheckpointError, DataError
from plsc.export.folder import MODEL_NAME, WEIGHTS_NAME, checksum_of, read_about
from plsc.parallel.world import World
from plsc.storage.publish import HIDDEN, replacing
from plsc.storage.urls import is_url
from plsc.train.directories import open_checkpoint

INDEX_NAME = "_index.json"  # readers of Parquet folders skip names with an underscore
FORMAT, VERSION = "plsc-embeddings", 1
NAMES = "names"
_SHARD = re.compile(r"(\d{5,})-([0-9a-f]{8})\.(npy|parquet)")
Columns = Mapping[str, np.ndarray]


def open_embeddings(
    folder: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> Embeddings:
    """Open the folder that ``predict`` wrote.

    Args:
        folder: the output of ``predict``.
        checkpoint: compare the network of this checkpoint (folder or URL), or folder of
            `Entry.convert_for_prediction`, with the network that computed the embeddings.

    Raises:
        DataError: there is no such folder, or it is incomplete.
        CheckpointError: the checkpoint has other weights or another image shape.
    """
    found = Embeddings(Path(folder))
    if checkpoint is not None:
        found.check(checkpoint)
    return found


class Embeddings:
    """The columns of a folder, by name; nothing is read before a column is indexed.

    ``found["embeddings"][:100]`` is float32 [100, D]. The rows have the order of the dataset.

    Attributes:
        index: the contents of ``_index.json``: model, input, flip, columns, count and shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder)
        if not self.index["complete"]:
            raise DataError(f"{folder} is incomplete; run the same predict again, which resumes")

    def __len__(self) -> int:
        return int(self.index["count"])

    def __getitem__(self, name: str) -> Column:
        """Return a column. Raises KeyError if there is none of this name."""
        if name not in self.index["columns"]:
            raise KeyError(f"{name!r}; known: {', '.join(self.index['columns'])}")
        files = [self.folder / one["file"] for one in self.index["shards"]]
        return Column(files, [one["rows"] for one in self.index["shards"]], name, self.index["columns"][name])

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the columns."""
        return iter(self.index["columns"])

    def check(self, checkpoint: str | os.PathLike[str]) -> None:
        """Raise CheckpointError unless the network of a checkpoint computed the embeddings."""
        place = os.fspath(checkpoint)
        path = fetch(place, World.single("cpu")) if is_url(place) else Path(place)
        if (path / MODEL_NAME).is_file():
            options, weights = read_about(path)["options"], load_file(path / WEIGHTS_NAME)
        else:
            options, weights = open_checkpoint(path).options, load_weights(path)
        model, shape = self.index["model"], self.index["input"]["shape"][1:]
        for what, ours, theirs in (
            ("weights", model["weights"], checksum_of(weights)),
            ("image shape", shape, list(options["model"]["image_shape"])),
        ):
            if ours != theirs:
                raise CheckpointError(
                    f"{self.folder} was computed by {model['name']} of {model['checkpoint']} (step "
                    f"{model['step']}), but {path} has different {what}: {theirs!s:.16}, not {ours!s:.16}; "
                    "use that checkpoint, or predict again"
                )


class Column:
    """A column of several shards as one array; indexing returns a numpy array.

    Indices are integers, slices, arrays of integers, or bool [N].
    """

    def __init__(self, files: Sequence[Path], rows: Sequence[int], name: str, about: dict[str, Any]) -> None:
        self._files = files
        self._starts = np.cumsum([0, *rows])
        self._name = name
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
        rows = np.empty((*numbers.shape, *self.shape[1:]), self.dtype)
        for shard in np.unique(shards):
            chosen = shards == shard
            rows[chosen] = self._part(int(shard))[numbers[chosen] - self._starts[shard]]
        return rows if numbers.ndim else rows[()]

    def shards(self) -> Iterator[np.ndarray]:
        """Yield the column of each shard in order, memory-mapped if it is .npy."""
        return map(self._open, range(len(self._files)))

    def _open(self, shard: int) -> np.ndarray:
        column = read_column(self._files[shard], self._name)
        return column if self._name == NAMES else column.reshape(-1, *self.shape[1:])


def read_index(folder: Path) -> dict[str, Any]:
    """Return the contents of ``_index.json``. Raises DataError if it is missing or of another format."""
    try:
        index = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} has no {INDEX_NAME} of predict ({error}); choose another folder"
        ) from error
    if not isinstance(index, dict) or (index.get("format"), index.get("version")) != (FORMAT, VERSION):
        raise DataError(
            f"{folder / INDEX_NAME} is not an index of {FORMAT}, version {VERSION}; choose another folder"
        )
    return index


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write ``_index.json``, or replace it."""
    with replacing(folder / INDEX_NAME) as temporary:
        temporary.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def write_shard(folder: Path, number: int, names: Sequence[str], columns: Columns, suffix: str) -> str:
    """Write the rows of a shard, and return the name of the file."""
    encode = _as_parquet if suffix == "parquet" else _as_npy
    content = encode(names, columns)
    file = f"{number:05d}-{zlib.crc32(content):08x}.{suffix}"
    with replacing(folder / file) as temporary:
        temporary.write_bytes(content)
    return file


def find_shards(folder: Path) -> dict[int, str]:
    """Return the files of all shards by number; remove unfinished files of killed processes."""
    found = {}
    for path in sorted(folder.iterdir()):
        if HIDDEN.fullmatch(path.name):
            path.unlink()
        elif match := _SHARD.fullmatch(path.name):
            found[int(match[1])] = path.name
    return found


def is_intact(path: Path) -> bool:
    """Return whether the contents of a shard have the checksum in its name."""
    match = _SHARD.fullmatch(path.name)
    return match is not None and f"{zlib.crc32(path.read_bytes()):08x}" == match[2]


def read_column(path: Path, name: str) -> np.ndarray:
    """Return a column of a shard, memory-mapped if it is .npy; names as strings."""
    if path.suffix == ".parquet":
        column = pq.read_table(path, columns=[name], memory_map=True)[name].combine_chunks()
        if name == NAMES:
            return np.array(column.to_pylist(), dtype=object)
        return (column.flatten() if hasattr(column, "flatten") else column).to_numpy()
    rows = np.load(path, mmap_mode="r")[name]
    if name != NAMES:
        return rows
    return np.array([one.decode("utf-8", "surrogateescape") for one in rows], dtype=object)


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


def _as_parquet(names: Sequence[str], columns: Columns) -> bytes:
    arrays = {
        name: pa.array(column)
        if column.ndim == 1
        else pa.FixedSizeListArray.from_arrays(pa.array(column.reshape(-1)), math.prod(column.shape[1:]))
        for name, column in columns.items()
    }
    readable = [name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for name in names]
    file = io.BytesIO()
    pq.write_table(pa.table({**arrays, NAMES: pa.array(readable, pa.string())}), file, compression="none")
    return file.getvalue()
