"""Load a checkpoint: everything in place for training, or the weights alone for using the network."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plsc.checkpoint.agree import on_every_rank, together
from plsc.checkpoint.layout import (
    OFFSETS_KEY,
    PLACES_KEY,
    ShardedTensor,
    check_checksums,
    check_files,
    info_of,
    state_dict_of,
)
from plsc.checkpoint.manifest import Manifest, read_manifest
from plsc.checkpoint.roles import BACKBONE, EXTRA, Role
from plsc.errors import CheckpointError
from plsc.parallel.world import World


def load_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    sharded: Mapping[str, ShardedTensor],
    world: World,
) -> Manifest:
    """Fill ``tensors`` and the rows of ``sharded`` in place from ``path``; return its manifest. Collective.

    Everything asked for must be there with the same global shape and type; what else is there is left.
    Rows come out right whatever number of ranks saved them, and whether they were split then or are now.
    All is checked, checksums included (each rank reads its share of the files for that), before the first
    tensor is touched.

    Raises:
        CheckpointError: on all ranks alike.
        DistributedError: another rank was lost.
    """
    folder = Path(path)
    doing = f"load checkpoint {folder}"

    def check() -> Manifest:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        _check_wanted(folder, manifest, tensors, sharded)
        check_checksums(folder, manifest, sorted(manifest.files)[world.rank :: world.size])
        return manifest

    state = {}

    def prepare() -> None:
        state.update(state_dict_of(tensors, sharded, world))

    manifest = on_every_rank(world, doing, check)[world.rank]
    on_every_rank(world, doing, prepare)

    def read() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process is one process
            dcp.load(
                state,
                storage_reader=dcp.HuggingFaceStorageReader(str(folder)),
                planner=dcp.DefaultLoadPlanner(
                    flatten_state_dict=False, flatten_sharded_tensors=False
                ),
                process_group=world.control_group,
                no_dist=world.size == 1,
            )

    together(world, doing, read)
    return manifest


def load_weights(path: str | os.PathLike[str], kind: str = BACKBONE) -> dict[str, Tensor]:
    """Return the tensors of ``path`` of a kind of role by their names in it, on the CPU, sharded ones joined.

    For one process, without any collective. Only the files that hold such tensors are read.

    Raises:
        CheckpointError: no such checkpoint, no such tensor in it, or it is damaged.
    """
    found = read_parts(path, (kind,))
    if not found:
        raise CheckpointError(f"{path} holds no {kind} tensor; choose another checkpoint")
    return {
        role.name: parts[0] if len(parts) == 1 else torch.cat(parts)
        for role, parts in found.items()
    }


def read_parts(
    path: str | os.PathLike[str], kinds: Collection[str], rank: int = 0, ranks: int = 1
) -> dict[Role, list[Tensor]]:
    """Return the tensors of kinds of roles in parts, each some rows, in order.

    This rank's share of the files is compared with their checksums first.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    places = check_files(folder, manifest)
    wanted = [key for key, info in manifest.tensors.items() if info.role.kind in kinds]
    names = sorted({name for key in wanted for name in places[key]})
    parts: dict[str, list[tuple[int, Tensor]]] = {key: [] for key in wanted}
    try:
        check_checksums(folder, manifest, names[rank::ranks])
        for name in names:
            with safe_open(folder / name, framework="pt") as file:
                begins = json.loads(file.metadata()[PLACES_KEY])  # as check_files has seen
                for key in wanted:
                    if name in places[key]:
                        first = min(begins[key][OFFSETS_KEY][:1], default=0)
                        parts[key].append((first, file.get_tensor(key)))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {folder / name}: {error}") from error
    return {
        manifest.tensors[key].role: [part for _, part in sorted(pieces, key=lambda one: one[0])]
        for key, pieces in parts.items()
    }


def _check_wanted(
    folder: Path,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    sharded: Mapping[str, ShardedTensor],
) -> None:
    wanted: dict[str, Tensor | ShardedTensor] = {**tensors, **sharded}
    for key, value in wanted.items():
        want, have = info_of(value, Role(EXTRA, key)), manifest.tensors.get(key)
        if have is None:
            raise CheckpointError(
                f"{folder} has no tensor {key!r}; it was saved by another network or run"
            )
        if (want.shape, want.dtype) != (have.shape, have.dtype):
            raise CheckpointError(
                f"{key!r} in {folder} is {have.dtype} {list(have.shape)}, this run needs {want.dtype} "
                f"{list(want.shape)}; use the options that it was saved with"
            )
