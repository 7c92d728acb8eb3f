"""Ways to save and load two sharded tensors, compared by benchmarks/checkpoint.py."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from plsc.checkpoint import (
    Manifest,
    ShardedTensor,
    Snapshot,
    load_tensors,
    save_checkpoint,
)
from plsc.checkpoint.manifest import BACKBONE, CLASS_OPTIMIZER, CLASS_WEIGHTS, HeadInfo, Role
from plsc.machine import BackgroundThread
from plsc.parallel.collectives import class_range, class_ranges
from plsc.parallel.world import World

Action = Callable[[Snapshot, Path, World], float]  # returns the seconds that training was blocked
_BLOCK = 4096  # rows filled or compared at once


@dataclass(frozen=True)
class Way:
    """One way. reads: the way whose files it loads."""

    name: str
    act: Action
    reads: str | None = None


def make_state(rows: int, dimension: int, world: World, *, fill: bool) -> Snapshot:
    """Return weight and momentum, float32 [rows, dimension], and a replicated tensor of 1 MB."""
    start, stop = class_range(rows, world.rank, world.size)
    tensors: dict[Role, Tensor | ShardedTensor] = {Role(BACKBONE, "w"): torch.ones(262_144)}
    weight = Role(CLASS_WEIGHTS, "weight")
    for role in (weight, Role(CLASS_OPTIMIZER, "momentum", weight.key)):
        local = torch.empty(stop - start, dimension).fill_(-1)  # touches every page
        if fill:
            for first in range(0, len(local), _BLOCK):
                part = local[first : first + _BLOCK]
                part.copy_(_rows_at(role.key, start + first, len(part), dimension))
        tensors[role] = ShardedTensor(local, rows, start)
    ranges = class_ranges(rows, world.size)
    manifest = Manifest("0", 1, 0, 1, world.size, dimension, {"": HeadInfo(rows, ranges)})
    return Snapshot(tensors, manifest)


def _whole(state: Snapshot) -> dict[str, Tensor]:
    return {role.key: one for role, one in state.tensors.items() if isinstance(one, Tensor)}


def _parts(state: Snapshot) -> dict[str, ShardedTensor]:
    found = state.tensors.items()
    return {role.key: one for role, one in found if isinstance(one, ShardedTensor)}


def check_state(state: Snapshot) -> None:
    """Raise ValueError unless the loaded rows are equal to the saved ones."""
    for key, part in _parts(state).items():
        for first in range(0, len(part.local), _BLOCK):
            block = part.local[first : first + _BLOCK]
            expected = _rows_at(key, part.start + first, len(block), block.shape[1])
            if not torch.equal(block, expected):
                raise ValueError(f"{key} differs after loading near {part.start + first}")


def _rows_at(key: str, first: int, count: int, dimension: int) -> Tensor:
    rows = torch.arange(first, first + count)[:, None] * 131
    columns = torch.arange(dimension) * 7 + len(key)
    return ((rows + columns) % 65_521).float()


def _save_ours(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    _write_ours(state, folder, world)
    return time.perf_counter() - began


def _write_ours(state: Snapshot, folder: Path, world: World) -> None:
    save_checkpoint(folder.parent, folder.name, state, world)


def _save_ours_asynchronously(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    copy = state.copy_to_host()
    thread = BackgroundThread("save")
    future = thread.submit(lambda: _write_ours(copy, folder, world.in_background(world.save_group)))
    waited = time.perf_counter() - began
    future.result()
    thread.close()
    return waited


def _load_ours(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    load_tensors(folder, state.tensors, world)
    return time.perf_counter() - began


def _save_gathered(state: Snapshot, folder: Path, world: World) -> float:
    """Gather all rows on rank 0 and write them with torch.save."""
    began = time.perf_counter()
    whole = _whole(state)
    for key, part in _parts(state).items():
        if world.rank:
            dist.send(part.local, 0)
            continue
        whole[key] = torch.empty(part.shape)
        whole[key][: len(part.local)] = part.local
        for rank in range(1, world.size):
            start, stop = class_range(part.rows, rank, world.size)
            dist.recv(whole[key][start:stop], rank)
    if world.is_main:
        folder.mkdir()
        with (folder / "state.pt").open("wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
    world.barrier()
    return time.perf_counter() - began


def _load_gathered(state: Snapshot, folder: Path, world: World) -> float:
    """Read everything on rank 0 with torch.load and scatter the rows."""
    began = time.perf_counter()
    whole = torch.load(folder / "state.pt", weights_only=True) if world.is_main else {}
    for key, part in _parts(state).items():
        if world.rank:
            dist.recv(part.local, 0)
            continue
        part.local.copy_(whole[key][: len(part.local)])
        for rank in range(1, world.size):
            start, stop = class_range(part.rows, rank, world.size)
            dist.send(whole[key][start:stop], rank)
    for key, tensor in _whole(state).items():
        if world.is_main:
            tensor.copy_(whole[key])
        if world.size > 1:
            dist.broadcast(tensor, 0)
    world.barrier()
    return time.perf_counter() - began


def _state_dict(state: Snapshot, world: World) -> dict[str, Any]:
    """Return a state dict for torch.distributed.checkpoint: tensors, and DTensors for sharded ones."""
    content: dict[str, Any] = dict(_whole(state))
    for key, part in _parts(state).items():
        content[key] = part.local
        if world.head_group is not None:
            mesh = DeviceMesh.from_group(world.head_group, "cpu")
            shape, strides = torch.Size(part.shape), (part.shape[1], 1)
            content[key] = DTensor.from_local(
                part.local, mesh, [Shard(0)], run_check=False, shape=shape, stride=strides
            )
    return content


def _save_dcp(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    content = _state_dict(state, world)
    dcp.save(content, checkpoint_id=folder, process_group=world.control_group)
    return time.perf_counter() - began


def _save_dcp_asynchronously(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    content = _state_dict(state, world)
    future = dcp.async_save(content, checkpoint_id=folder, process_group=world.save_group)
    waited = time.perf_counter() - began
    assert isinstance(future, Future)  # a result of another type is only for staging
    future.result()
    return waited


def _load_dcp(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    content = _state_dict(state, world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is one process
        dcp.load(
            content,
            checkpoint_id=folder,
            process_group=world.control_group,
            no_dist=world.size == 1,
        )
    return time.perf_counter() - began


OURS, TORCH, DCP = "plsc", "gather + torch.save", "torch.distributed.checkpoint"
SAVES = (
    Way(OURS, _save_ours),
    Way(TORCH, _save_gathered),
    Way(DCP, _save_dcp),
    Way(f"{OURS}, asynchronous", _save_ours_asynchronously),
    Way(f"{DCP}, asynchronous", _save_dcp_asynchronously),
)
LOADS = (
    Way(OURS, _load_ours, OURS),
    Way("torch.load + scatter", _load_gathered, TORCH),
    Way(DCP, _load_dcp, DCP),
)
