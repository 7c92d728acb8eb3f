"""Read rows and bytes of a checkpoint's tensors as they are asked for: never a whole head in memory."""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from plsc.checkpoint.check import Checker
from plsc.checkpoint.layout import DTYPES, OFFSETS_KEY, PLACES_KEY
from plsc.checkpoint.manifest import Manifest
from plsc.checkpoint.shard_file import LARGEST_HEADER, PIECE_BYTES
from plsc.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """The rows first..last - 1 of a tensor (a scalar: one), `begin` bytes into an open file."""

    first: int
    last: int
    file: int
    descriptor: int
    begin: int


class StoredTensor:
    """One tensor of a checkpoint, whose rows are perhaps in several files.

    shape: of the whole. file: number of the file of its first part, in the order of names.
    """

    def __init__(
        self, key: str, shape: tuple[int, ...], dtype: torch.dtype, parts: list[Part], where: str
    ):
        self.key = key
        self.shape = shape
        self.dtype = dtype
        self.row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self.file = parts[0].file if parts else 0
        self._parts = sorted(
            (part for part in parts if part.last > part.first), key=lambda p: p.first
        )
        self._lasts = [part.last for part in self._parts]
        self._where = where

    @property
    def rows_a_piece(self) -> int:
        """How many rows are read at a time."""
        return max(1, PIECE_BYTES // max(1, self.row_bytes))

    def bytes(self) -> Iterator[memoryview]:
        """Yield all of its bytes in pieces."""
        for part in self._parts:
            size = (part.last - part.first) * self.row_bytes
            for begin in range(0, size, PIECE_BYTES):
                piece = memoryview(bytearray(min(PIECE_BYTES, size - begin)))
                self._read(part, begin, piece)
                yield piece

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the bytes of rows, uint8 [n, row_bytes], zeros where a number is -1."""
        out = np.zeros((len(rows), self.row_bytes), dtype=np.uint8)
        if not out.size:
            return out
        # Runs of neighbours are read at once.
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
            if rows[low] >= 0:
                self._read_run(int(rows[low]), out[low:high])
        return out

    def values(self, rows: np.ndarray) -> torch.Tensor:
        """Return rows as numbers, float64 [n, ...]; those of -1 are zeros."""
        raw = torch.from_numpy(self.take(rows).reshape(-1)).view(self.dtype)
        return raw.view(len(rows), *self.shape[1:]).double()

    def _read_run(self, first: int, out: np.ndarray) -> None:
        last = first + len(out)
        index = bisect.bisect_right(self._lasts, first)
        while first < last:
            part = self._parts[index]
            stop = min(last, part.last)
            piece = out[: stop - first]
            self._read(part, (first - part.first) * self.row_bytes, piece.data.cast("B"))
            out, first, index = out[stop - first :], stop, index + 1

    def _read(self, part: Part, begin: int, out: memoryview) -> None:
        try:
            done = 0
            while done < len(out):
                count = os.preadv(part.descriptor, [out[done:]], part.begin + begin + done)
                if not count:
                    raise CheckpointError(f"{self._where} became shorter while it was read")
                done += count
        except OSError as error:
            raise CheckpointError(f"cannot read {self._where}: {error.strerror}") from error


class OpenCheckpoint:
    """The tensors of a checkpoint whose headers `check_files` has found sound; its files stay open."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._stack = contextlib.ExitStack()
        parts: dict[str, list[Part]] = {key: [] for key in manifest.tensors}
        try:
            for number, name in enumerate(manifest.shards):
                for key, part in self._open(folder / name, number):
                    parts[key].append(part)
        except BaseException:
            self._stack.close()
            raise
        self.files = len(manifest.shards)
        self.tensors = {
            key: StoredTensor(key, info.shape, getattr(torch, info.dtype), parts[key], str(folder))
            for key, info in manifest.tensors.items()
        }

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _open(self, path: Path, number: int) -> Iterator[tuple[str, Part]]:
        check = Checker(str(path))
        try:
            file = self._stack.enter_context(path.open("rb", buffering=0))
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(LARGEST_HEADER, size - 8):
                raise check.wrong(f"its header would be {length} bytes")
            header = check.mapping(json.loads(os.pread(file.fileno(), length, 8)), "the header")
            metadata = check.mapping(header.pop("__metadata__", None), "the metadata")
            places = check.mapping(json.loads(metadata[PLACES_KEY]), PLACES_KEY)
            for key, entry in header.items():
                first, rows, begin = _place(
                    check, entry, places[key][OFFSETS_KEY], size - 8 - length
                )
                yield key, Part(first, first + rows, number, file.fileno(), 8 + length + begin)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"cannot read the header of {path}: {error}") from error


def _place(check: Checker, entry: Any, offsets: list[int], size: int) -> tuple[int, int, int]:
    """Return the first row, the number of rows and the first byte of a part."""
    shape = entry["shape"]
    begin, end = entry["data_offsets"]
    if (
        not 0 <= begin <= end <= size
        or end - begin != math.prod(shape) * DTYPES[entry["dtype"]].itemsize
    ):
        raise check.wrong(f"a tensor {shape} at bytes {begin} to {end} does not fit")
    return (offsets[0] if offsets else 0), (shape[0] if shape else 1), begin
