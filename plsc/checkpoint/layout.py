"""How tensors lie in a checkpoint folder, and whether its files hold what the manifest says.

Tensor data is written and read by torch.distributed.checkpoint in its safetensors form: one file a
rank, with whole tensors in rank 0's and the rows of sharded tensors in each rank's own. A header says at
which row a part begins, so any number of ranks can read what any other number wrote. No pickle is
involved. What its reader does not check is checked here: it lets missing rows, other types and
wrong offsets pass in silence.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from plsc.checkpoint.check import Checker
from plsc.checkpoint.manifest import MANIFEST_NAME, FileInfo, Manifest, TensorInfo
from plsc.checkpoint.roles import Role
from plsc.data.crc import crc32
from plsc.errors import CheckpointError
from plsc.parallel.collectives import class_range
from plsc.parallel.world import World

_PIECE_BYTES = 1 << 20  # read at once for a checksum: stays in the processor's cache
MAP_NAME = "classes.tsv"  # where the classes went; see plsc.checkpoint.classes.map
# torch's writer notes the place of each part under these names in a file's header.
PLACES_KEY = "DCP_SHARDING_INFO"
OFFSETS_KEY = "saved_offsets"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class ShardedTensor:
    """This rank's rows of a tensor whose rows are split over the ranks by `class_range`.

    local: [rows here, ...], possibly none. rows: of the whole tensor. start: number of the first local row.
    mesh: where the rows are split over groups of ranks that each have all of them, the ranks as a mesh
    [groups, ranks of a group]; None: over all ranks.
    """

    local: Tensor
    rows: int
    start: int
    mesh: DeviceMesh | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return (self.rows, *self.local.shape[1:])


def info_of(value: Tensor | ShardedTensor, role: Role) -> TensorInfo:
    """Return the manifest's entry for a tensor.

    Raises:
        CheckpointError: a type that checkpoints do not hold.
    """
    sharded = isinstance(value, ShardedTensor)
    dtype = value.local.dtype if isinstance(value, ShardedTensor) else value.dtype
    if dtype not in DTYPES.values():
        raise CheckpointError(f"tensors of {dtype} cannot be kept in a checkpoint")
    return TensorInfo(tuple(value.shape), str(dtype).removeprefix("torch."), sharded, role)


def state_dict_of(
    tensors: Mapping[str, Tensor], sharded: Mapping[str, ShardedTensor], world: World
) -> dict[str, Any]:
    """Return what torch.distributed.checkpoint takes: tensors, and DTensors for the sharded ones.

    Raises:
        ValueError: a key that is in both, or local rows that are not this rank's `class_range`; on one rank
            alone perhaps, so the caller lets the ranks agree.
    """
    both = tensors.keys() & sharded.keys()
    if both:
        raise ValueError(f"keys both whole and sharded: {sorted(both)}")
    state: dict[str, Any] = {key: tensor.detach() for key, tensor in tensors.items()}
    for key, part in sharded.items():
        place, places = world.rank, world.size
        if part.mesh is not None:
            place, places = part.mesh.get_local_rank(1), part.mesh.size(1)
        start, stop = class_range(part.rows, place, places)
        if (part.start, len(part.local)) != (start, stop - start):
            raise ValueError(
                f"{key}: local rows {part.start} to {part.start + len(part.local)}, expected {start} "
                f"to {stop} at place {place} of {places}"
            )
        state[key] = part.local.detach() if world.size == 1 else _as_dtensor(part, world)
    return state


def _as_dtensor(part: ShardedTensor, world: World) -> DTensor:
    local = part.local.detach()
    placements: list[Placement] = [Shard(0)]
    if part.mesh is None:
        assert world.head_group is not None
        mesh = DeviceMesh.from_group(world.head_group, local.device.type)
    else:  # the same ranks, but a copy of the rows may be in other memory than training has them
        mesh = DeviceMesh.from_group(
            part.mesh.get_all_groups(),
            local.device.type,
            mesh=part.mesh.mesh,
            mesh_dim_names=part.mesh.mesh_dim_names,
        )
        placements = [Replicate(), *placements]
    shape = torch.Size(part.shape)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)


def checksum(path: Path) -> FileInfo:
    """Return the size and CRC-32 of a file."""
    size, crc = 0, 0
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            size, crc = size + count, crc32(buffer[:count], crc)
    return FileInfo(size, crc)


def check_checksums(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read the named data files whole and compare them with the manifest.

    Raises:
        CheckpointError: a file's bytes are not those that were saved.
    """
    for name in names:
        if checksum(folder / name) != manifest.files[name]:
            raise CheckpointError(
                f"{folder / name} is damaged: its checksum is not the saved one; choose another checkpoint"
            )


def check_files(folder: Path, manifest: Manifest) -> dict[str, list[str]]:
    """See that the folder has the files of the manifest alone, and their headers its tensors, every row once.

    Returns the names of the files that hold parts of each tensor. Reads no tensor data.

    Raises:
        CheckpointError: a file is missing, strange, damaged or one too many; a tensor or a row is missing.
    """
    parts: dict[str, list[tuple[int, int, str]]] = {key: [] for key in manifest.tensors}
    try:
        found = {path.name for path in folder.iterdir()} - {MANIFEST_NAME}
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {folder}: {error.strerror}") from error
    if manifest.format_version == 1:
        found -= {MAP_NAME} - manifest.files.keys()
    if found != manifest.files.keys():
        odd = min(found ^ manifest.files.keys())
        raise CheckpointError(
            f"{folder / odd} is {'not in the manifest' if odd in found else 'missing'}; choose another "
            "checkpoint, or remove what does not belong there"
        )
    for name, info in manifest.files.items():
        _check_regular(folder / name, info.bytes)
    for name in manifest.shards:
        for key, first, last in _parts_in(folder / name, manifest):
            parts[key].append((first, last, name))
    check = Checker(str(folder))
    for key, pieces in parts.items():
        _check_rows(check, key, manifest.tensors[key], pieces)
    return {key: sorted({name for _, _, name in pieces}) for key, pieces in parts.items()}


def _check_regular(path: Path, size: int) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"{path} is no regular file; a checkpoint holds neither links nor devices"
        )
    if status.st_size != size:
        raise CheckpointError(
            f"{path} has {status.st_size} bytes, {size} were saved; choose another checkpoint"
        )


def _parts_in(path: Path, manifest: Manifest) -> list[tuple[str, int, int]]:
    """Return (key, first row, last row + 1) of each part in a file; a scalar is one row."""
    check = Checker(str(path))
    parts = []
    try:
        with safe_open(path, framework="pt") as file:
            places = check.mapping(
                json.loads((file.metadata() or {}).get(PLACES_KEY, "null")), PLACES_KEY
            )
            for key in file.keys():  # noqa: SIM118 -- not a dictionary
                if key not in manifest.tensors:
                    raise check.wrong(f"tensor {key!r} is not in the manifest")
                view = file.get_slice(key)
                shape, dtype = view.get_shape(), view.get_dtype()
                place = check.mapping(check.item(places, key), f"the place of {key!r}")
                offsets = check.listing(check.item(place, OFFSETS_KEY), f"the place of {key!r}")
                offsets = [check.integer(offset, f"the place of {key!r}") for offset in offsets]
                _check_part(check, key, manifest.tensors[key], shape, dtype, offsets)
                first = offsets[0] if offsets else 0
                parts.append((key, first, first + (shape[0] if shape else 1)))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no whole safetensors file: {error}; choose another checkpoint"
        ) from error
    return parts


def _check_part(
    check: Checker, key: str, info: TensorInfo, shape: list[int], dtype: str, offsets: list[int]
) -> None:
    if str(DTYPES.get(dtype)).removeprefix("torch.") != info.dtype:
        raise check.wrong(f"tensor {key!r} is {dtype}, the manifest says {info.dtype}")
    fits = (
        len(shape) == len(offsets) == len(info.shape)
        and not any(offsets[1:])
        and tuple(shape[1:]) == info.shape[1:]
    )
    if not fits:
        raise check.wrong(
            f"tensor {key!r} has a part {shape} at {offsets}, which is no part of {list(info.shape)}"
        )


def _check_rows(
    check: Checker, key: str, info: TensorInfo, pieces: list[tuple[int, int, str]]
) -> None:
    if not info.sharded and len(pieces) != 1:
        raise check.wrong(f"tensor {key!r} is in {len(pieces)} files, expected 1")
    rows = info.shape[0] if info.shape else 1
    reached = 0
    for first, last, name in sorted(pieces):
        if first == last:
            continue  # the share of a rank that has no rows
        if first != reached:
            raise check.wrong(
                f"rows {min(reached, first)} to {max(reached, first)} of {key!r} are "
                f"{'missing' if first > reached else 'there twice'} at {name}"
            )
        reached = last
    if reached != rows:
        raise check.wrong(f"tensor {key!r} has {reached} rows, the manifest says {rows}")
