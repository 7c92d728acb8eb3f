"""Save a checkpoint: a fresh folder, its manifest last, then its name."""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from plsc.checkpoint.agree import on_every_rank, together
from plsc.checkpoint.layout import ShardedTensor, info_of, state_dict_of
from plsc.checkpoint.manifest import FileInfo, Manifest, TensorInfo
from plsc.checkpoint.remote import check_replaceable, finish_folder
from plsc.checkpoint.roles import EXTRA, Role
from plsc.checkpoint.shard_file import shard_name
from plsc.checkpoint.writer import ShardWriter
from plsc.errors import CheckpointError
from plsc.parallel.world import World
from plsc.storage.publish import hidden_name
from plsc.storage.store import Store

ADVICE = "nothing was published and earlier checkpoints are whole"


def save_checkpoint(
    save_dir: str | os.PathLike[str],
    name: str,
    tensors: Mapping[str, Tensor],
    sharded: Mapping[str, ShardedTensor],
    manifest: Manifest,
    world: World,
    *,
    is_shared: bool = True,
) -> Path:
    """Save to ``save_dir / name`` and return that path. Collective.

    tensors: whole; where several ranks give a key, the lowest rank's value is saved, so what differs
    between ranks needs a key for each. sharded: this rank's rows, every key on every rank. An older
    checkpoint of the same name is replaced. The manifest's files and tensors are filled in here; the
    roles of tensors are taken from it.
    is_shared: all ranks see one file system; without, every machine keeps the files of its own ranks.

    Raises:
        CheckpointError: on all ranks alike; nothing was published, earlier checkpoints are whole.
        DistributedError: another rank was lost; as far as this rank goes the same holds.
    """
    if not name or Path(name).name != name or name.startswith("."):
        raise CheckpointError(
            f"a checkpoint cannot be named {name!r}; expected a plain folder name"
        )
    folder = Path(save_dir) / name
    doing = f"save checkpoint {folder}"
    state: dict[str, Any] = {}

    def prepare() -> dict[str, TensorInfo]:
        whole, parts = _separate(tensors, sharded)
        state.update(state_dict_of(whole, parts, world))
        roles = {key: info.role for key, info in manifest.tensors.items()}
        return {
            key: info_of(value, roles.get(key, Role(EXTRA, key)))
            for part in (tensors, sharded)
            for key, value in part.items()
        }

    def begin() -> Path:
        hidden = folder.with_name(hidden_name(name))
        if world.is_main:
            _make(hidden, folder, manifest.run_id)
        return hidden

    temporary = on_every_rank(world, doing, begin, ADVICE)[0]
    is_owner = world.is_main
    try:
        is_owner = on_every_rank(
            world,
            doing,
            lambda: _find(temporary, folder, manifest.run_id, world, is_shared),
            ADVICE,
        )[world.rank]
        infos = on_every_rank(world, doing, prepare, ADVICE)
        writer = ShardWriter(temporary, shard_name(world.rank, f"step{manifest.step}"))
        together(world, doing, lambda: _write(state, writer, world), ADVICE)
        files = on_every_rank(world, doing, lambda: writer.written, ADVICE)

        def finish() -> None:
            if is_owner:
                text = _complete(manifest, infos, files).to_json().encode()
                finish_folder(Store(folder.parent), temporary.name, name, text)

        on_every_rank(world, doing, finish, ADVICE)
    finally:
        if is_owner:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _make(temporary: Path, folder: Path, run_id: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_replaceable(Store(folder.parent), folder.name, run_id)
    temporary.mkdir()


def _find(temporary: Path, folder: Path, run_id: str, world: World, is_shared: bool) -> bool:
    """Return whether this rank is the one of its machine that publishes what lies there."""
    if world.is_main or temporary.is_dir():
        return world.is_main
    if is_shared:
        raise CheckpointError(
            f"{folder.parent} is not the folder that rank 0 sees; save to a file system that all machines "
            "share, or to a store (set_model_save_dir with a URL)"
        )
    if world.local_rank == 0:
        _make(temporary, folder, run_id)
        return True
    return False


def _separate(
    tensors: Mapping[str, Tensor], sharded: Mapping[str, ShardedTensor]
) -> tuple[dict[str, Tensor], dict[str, ShardedTensor]]:
    """Return the tensors contiguous, each with memory of its own: safetensors refuses tied weights."""
    seen: set[int] = set()

    def own(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        if memory in seen:
            tensor = tensor.clone()
        seen.add(memory)
        return tensor

    whole = {key: own(tensor) for key, tensor in tensors.items()}
    parts = {key: dataclasses.replace(part, local=own(part.local)) for key, part in sharded.items()}
    return whole, parts


def _write(state: dict[str, Any], writer: ShardWriter, world: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is one process
        dcp.save(
            state,
            storage_writer=writer,
            # To the lowest rank: by default equal keys of several ranks are spread over them, and what
            # differs by accident (buffers) would come back as a mixture.
            planner=dcp.DefaultSavePlanner(
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
                dedup_save_to_lowest_rank=True,
            ),
            process_group=world.control_group,
            no_dist=world.size == 1,
        )


def _complete(
    manifest: Manifest, infos: list[dict[str, TensorInfo]], files: list[dict[str, FileInfo]]
) -> Manifest:
    tensors: dict[str, TensorInfo] = {}
    for rank, part in enumerate(infos):
        for key, info in part.items():
            if tensors.setdefault(key, info) != info:
                raise ValueError(f"{key} is {info} on rank {rank}, {tensors[key]} on a lower one")
    merged = {name: info for part in files for name, info in part.items()}
    return dataclasses.replace(manifest, tensors=tensors, files=merged)
