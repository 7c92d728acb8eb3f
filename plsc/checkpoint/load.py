"""Load a checkpoint: into tensors of a training run, or selected tensors on the CPU."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint.manifest import (
    BACKBONE,
    CALLBACK,
    CLASS_WEIGHTS,
    EMA,
    MANIFEST_NAME,
    PIECE_BYTES,
    Manifest,
    Part,
    Role,
    TensorInfo,
    bytes_of,
    checksum,
    read_header,
    read_manifest,
)
from plsc.checkpoint.save import ShardedTensor, Tensors, info_of, local_of, name_roles
from plsc.data.class_names import ClassNames
from plsc.errors import CheckpointError
from plsc.heads.weights import decode_rows
from plsc.parallel.failure import on_every_rank, own_result
from plsc.parallel.world import World
from plsc.storage.disk import open_regular


def load_tensors(path: str | os.PathLike[str], tensors: Tensors, world: World) -> Manifest:
    """Load ``tensors`` in place from ``path``; return its manifest. Collective.

    Each requested tensor must be in the checkpoint with the same global shape and dtype; others are ignored.
    The number of ranks, and which tensors are sharded, may differ from the run that saved it. Everything
    is checked before the first tensor changes; each rank compares the checksums of its share of the files.

    Raises:
        CheckpointError: on all ranks.
        DistributedError: the connection to another rank was lost.
    """
    folder = Path(path)
    doing = f"load checkpoint {folder}"

    def check() -> OpenCheckpoint:
        checkpoint = OpenCheckpoint(folder)
        _check_requested(folder, checkpoint.manifest, tensors)
        names = sorted(checkpoint.manifest.files)[world.rank :: world.size]
        check_checksums(folder, checkpoint.manifest, names)
        return checkpoint

    def read() -> None:
        with torch.no_grad():
            for role, value in tensors.items():
                local = local_of(value)
                start = value.start if isinstance(value, ShardedTensor) else 0
                checkpoint.tensors[role.key].read_into(local if local.ndim else local[None], start)

    checkpoint = own_result(world, doing, check)
    on_every_rank(world, doing, read)
    return checkpoint.manifest


def load_weights(
    path: str | os.PathLike[str], kind: str = BACKBONE, averaged: bool = True
) -> dict[str, Tensor]:
    """Return the network's state dict from a checkpoint, or other tensors by name, on the CPU.

    Sharded tensors are joined. For one process; not a collective. Only the files with such tensors are read.

    Args:
        path: the checkpoint folder.
        kind: ``backbone``; ``class_weights``: ``weight`` [classes, D], or [classes, sub-centres, D], and
            ``bias`` [classes] of a softmax; ``head_statistics``: statistics of AdaFace and CurricularFace.
        averaged: of the network's weights, return the moving average if the checkpoint has one
            (`optim.ema_decay`).

    Raises:
        CheckpointError: no such checkpoint, no such tensor in it, or it is damaged.
    """
    opened = OpenCheckpoint(path)
    tensors = {role: tensor for role, tensor in opened.select((kind,)).items() if not role.of}
    if not tensors or (kind == CLASS_WEIGHTS and Role(kind, "weight") not in tensors):
        raise missing_weights(path, opened.manifest, kind)
    return {
        role.name: decode_rows(tensor.read()) if tensor.is_coded else tensor.read()
        for role, tensor in (opened.averaged(tensors) if averaged else tensors).items()
    }


def missing_weights(
    path: str | os.PathLike[str], manifest: Manifest, kind: str = CLASS_WEIGHTS
) -> CheckpointError:
    """Return the error about a checkpoint without tensors of a kind."""
    return CheckpointError(
        f"{path} has no {kind.replace('_', ' ')} ({manifest.head.class_num} classes); if they are in "
        "head.weights_file, use the result of `plsc checkpoint copy`"
    )


def read_class_names(folder: Path, manifest: Manifest) -> ClassNames | None:
    """Return the class names; None if there are none.

    Raises CheckpointError if they are damaged. Checksums are not compared.
    """
    keys = [role.key for role in name_roles()]
    if not manifest.tensors.keys() >= set(keys):
        return None
    weight = manifest.tensors.get(Role(CLASS_WEIGHTS, "weight").key)
    infos = [manifest.tensors[key] for key in keys]
    is_sound = [info.dtype for info in infos] == ["uint8", "int64"]
    if is_sound and weight is not None and infos[1].shape == weight.shape[:1]:
        opened = OpenCheckpoint(folder, manifest)
        text, ends = (opened.tensors[key].read().numpy() for key in keys)
        names = ClassNames(text, ends)
        if names.is_sound():
            return names
    raise CheckpointError(f"{folder}: its class names are damaged")


class StoredTensor:
    """A tensor of an open checkpoint; its rows, possibly in several files, are read on request.

    shape: of the whole tensor; a scalar counts as one row. shard: name of the file with its first part.
    is_coded: its rows are 8-bit class weights, see `plsc.heads.weights.encode_rows`.
    """

    def __init__(self, info: TensorInfo, parts: list[Part]) -> None:
        self.key = info.role.key
        self.shape = info.shape
        self.dtype: torch.dtype = getattr(torch, info.dtype)
        self.is_coded = info.role.kind == CLASS_WEIGHTS and self.dtype is torch.int8
        self.shard = parts[0].path.name if parts else ""
        self._row_bytes = math.prod(info.shape[1:]) * self.dtype.itemsize
        self._parts = [part for part in parts if part.stop > part.start]
        self._stops = [part.stop for part in self._parts]

    @property
    def rows_per_piece(self) -> int:
        """Number of rows read at a time."""
        return max(1, PIECE_BYTES // max(1, self._row_bytes))

    def read(self) -> Tensor:
        """Return the whole tensor."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(whole if self.shape else whole[None], 0)
        return whole

    def read_into(self, target: Tensor, start: int) -> None:
        """Fill `target` [n, ...] with the rows from `start`; no extra copy if it is contiguous on the CPU."""
        if target.is_cpu and target.is_contiguous():
            raw = bytes_of(target).numpy().reshape(len(target), self._row_bytes)
            self._read_run(start, raw)
            return
        for first, piece in self.pieces(start, start + len(target)):
            target[first - start : first - start + len(piece)].copy_(piece)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows [start, stop) in order, a few MiB at a time, each with its first row's index."""
        for first in range(start, stop, self.rows_per_piece):
            rows = min(self.rows_per_piece, stop - first)
            piece = np.empty((rows, self._row_bytes), np.uint8)
            self._read_run(first, piece)
            yield first, self._as_rows(piece)

    def bytes(self) -> Iterator[memoryview]:
        """Yield all bytes in pieces."""
        for _, piece in self.pieces(0, self._stops[-1] if self._stops else 0):
            yield bytes_of(piece).numpy().data

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the bytes of `rows`, uint8 [n, bytes per row]; zeros where an index is -1."""
        out = np.zeros((len(rows), self._row_bytes), dtype=np.uint8)
        # Consecutive rows are read at once.
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
            if low < high and rows[low] >= 0:
                self._read_run(int(rows[low]), out[low:high])
        return out

    def values(self, rows: np.ndarray) -> Tensor:
        """Return `rows` as float64 [n, ...], decoded; zeros where an index is -1."""
        stored = self._as_rows(self.take(rows))
        return (decode_rows(stored) if self.is_coded else stored).double()

    def _as_rows(self, raw: np.ndarray) -> Tensor:
        return torch.from_numpy(raw.reshape(-1)).view(self.dtype).view(len(raw), *self.shape[1:])

    def _read_run(self, first: int, out: np.ndarray) -> None:
        last = first + len(out)
        index = bisect.bisect_right(self._stops, first)
        while first < last:
            part = self._parts[index]
            stop = min(last, part.stop)
            rows = out[: stop - first].reshape(-1).data
            with open_regular(part.path, part.path.parent) as file:
                file.seek(part.begin + (first - part.start) * self._row_bytes)
                if file.readinto(rows) < rows.nbytes:
                    raise CheckpointError(f"{part.path} became shorter while being read")
            out, first, index = out[stop - first :], stop, index + 1


class OpenCheckpoint:
    """A checkpoint whose files match its manifest.

    Raises CheckpointError as `read_manifest` and `check_files` do. manifest: if it was read already.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.folder = Path(path)
        self.manifest = read_manifest(self.folder) if manifest is None else manifest
        self._parts = check_files(self.folder, self.manifest)
        self.tensors = {
            key: StoredTensor(info, self._parts[key]) for key, info in self.manifest.tensors.items()
        }

    def select(self, kinds: Collection[str], rank: int = 0, ranks: int = 1) -> dict[Role, StoredTensor]:
        """Return the tensors of some kinds of roles, after comparing the checksums of their files.

        Each of `ranks` ranks compares its share of the files. Raises CheckpointError.
        """
        roles = {info.role: key for key, info in self.manifest.tensors.items() if info.role.kind in kinds}
        names = sorted({part.path.name for key in roles.values() for part in self._parts[key]})
        check_checksums(self.folder, self.manifest, names[rank::ranks])
        return {role: self.tensors[key] for role, key in roles.items()}

    def averaged(self, tensors: dict[Role, StoredTensor]) -> dict[Role, StoredTensor]:
        """Return the tensors, those of the network replaced by their moving averages if they exist."""
        averages = self.select((CALLBACK,)) if any(role.kind == BACKBONE for role in tensors) else {}
        return {
            role: averages.get(Role(CALLBACK, role.name, EMA), tensor) if role.kind == BACKBONE else tensor
            for role, tensor in tensors.items()
        }


def check_checksums(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read the named data files; CheckpointError if a checksum differs from the manifest's."""
    for name in names:
        if checksum(folder / name) != manifest.files[name]:
            raise CheckpointError(f"{folder / name} is damaged: its checksum differs from the saved one")


def check_files(folder: Path, manifest: Manifest) -> dict[str, list[Part]]:
    """Check that the files and their headers match the manifest; return each tensor's parts, sorted by row.

    No tensor data are read.

    Raises:
        CheckpointError: a file is missing, unknown or damaged; a tensor or row is missing or doubled.
    """
    try:
        if unknown := {path.name for path in folder.iterdir()} - manifest.files.keys() - {MANIFEST_NAME}:
            raise CheckpointError(f"{folder / min(unknown)} is not in the manifest; remove it")
        for name, file in manifest.files.items():
            open_regular(folder / name, folder, file.bytes).close()
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    parts: dict[str, list[Part]] = {key: [] for key in manifest.tensors}
    for name in manifest.shards:
        for part in read_header(folder / name):
            parts.setdefault(part.key, []).append(part)
    for key, info in manifest.tensors.items():
        parts[key].sort(key=lambda part: (part.start, part.stop))
        filled = [part for part in parts[key] if part.stop > part.start]  # a rank may have no rows
        starts, stops = [0, *(part.stop for part in filled)], [part.start for part in filled]
        kinds = {(part.dtype, len(part.shape), part.shape[1:]) for part in parts[key]}
        if (
            not (info.sharded or len(parts[key]) == 1)
            or kinds - {(info.dtype, len(info.shape), info.shape[1:])}
            or starts != [*stops, info.shape[0] if info.shape else 1]
        ):
            raise CheckpointError(
                f"{folder}: a part of tensor {key!r:.80}, {info.dtype} {list(info.shape)}, is missing, "
                "stored twice or of another kind"
            )
    return parts


def _check_requested(folder: Path, manifest: Manifest, tensors: Tensors) -> None:
    for role, value in tensors.items():
        want, have = info_of(role, value), manifest.tensors.get(role.key)
        if have is None or (want.shape, want.dtype) != (have.shape, have.dtype):
            state = "missing" if have is None else f"{have.dtype} {list(have.shape)}"
            raise CheckpointError(
                f"{role.key!r} in {folder} is {state}, but this run needs {want.dtype} {list(want.shape)}; "
                "use the network and options it was saved with"
            )
