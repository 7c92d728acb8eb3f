"""The ways to save and load two sharded tensors that benchmarks/checkpoint.py compares."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from plsc.checkpoint import (
    Manifest,
    ShardedTensor,
    Snapshot,
    copy_to_host,
    load_tensors,
    save_checkpoint,
)
from plsc.checkpoint.layout import state_dict_of
from plsc.parallel.collectives import class_range, class_ranges
from plsc.parallel.machine import Background
from plsc.parallel.world import World

Action = Callable[[Snapshot, Path, World], float]  # returns the seconds that training waited
_BLOCK = 4096  # rows filled or looked at together


@dataclass(frozen=True)
class Way:
    """One way to do it. reads: the way whose files a load reads."""

    name: str
    act: Action
    reads: str | None = None


def make_state(rows: int, dimension: int, world: World, *, fill: bool) -> Snapshot:
    """Return a weight and a momentum, float32 [rows, dimension], and a megabyte that every rank has."""
    start, stop = class_range(rows, world.rank, world.size)
    parts = {}
    for key in ("head.weight", "rows.weight.momentum"):
        local = torch.empty(stop - start, dimension).fill_(-1)  # every page is there
        if fill:
            for first in range(0, len(local), _BLOCK):
                part = local[first : first + _BLOCK]
                part.copy_(_rows_at(key, start + first, len(part), dimension))
        parts[key] = ShardedTensor(local, rows, start)
    ranges = [list(pair) for pair in class_ranges(rows, world.size)]
    manifest = Manifest("0", 1, 0, 1, world.size, rows, dimension, ranges)
    return Snapshot({"backbone.w": torch.ones(262_144)}, parts, manifest)


def check_state(state: Snapshot) -> None:
    """Raise ValueError unless every row that was loaded is the one that was saved."""
    for key, part in state.sharded.items():
        for first in range(0, len(part.local), _BLOCK):
            block = part.local[first : first + _BLOCK]
            expected = _rows_at(key, part.start + first, len(block), block.shape[1])
            if not torch.equal(block, expected):
                raise ValueError(f"{key} came back with other rows near {part.start + first}")


def _rows_at(key: str, first: int, count: int, dimension: int) -> Tensor:
    rows = torch.arange(first, first + count)[:, None] * 131
    columns = torch.arange(dimension) * 7 + len(key)
    return ((rows + columns) % 65_521).float()


def _save_ours(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    _write_ours(state, folder, world)
    return time.perf_counter() - began


def _write_ours(state: Snapshot, folder: Path, world: World) -> None:
    save_checkpoint(folder.parent, folder.name, state.tensors, state.sharded, state.manifest, world)


def _save_ours_beside(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    copy = copy_to_host(state)
    thread = Background("save")
    future = thread.submit(lambda: _write_ours(copy, folder, world.beside(world.save_group)))
    waited = time.perf_counter() - began
    future.result()
    thread.close()
    return waited


def _load_ours(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    load_tensors(folder, state.tensors, state.sharded, world)
    return time.perf_counter() - began


def _save_gathered(state: Snapshot, folder: Path, world: World) -> float:
    """Rank 0 gathers all rows and writes them with torch.save."""
    began = time.perf_counter()
    whole = dict(state.tensors)
    for key, part in state.sharded.items():
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
    """Rank 0 reads everything with torch.load and hands out the rows."""
    began = time.perf_counter()
    whole = torch.load(folder / "state.pt", weights_only=True) if world.is_main else {}
    for key, part in state.sharded.items():
        if world.rank:
            dist.recv(part.local, 0)
            continue
        part.local.copy_(whole[key][: len(part.local)])
        for rank in range(1, world.size):
            start, stop = class_range(part.rows, rank, world.size)
            dist.send(whole[key][start:stop], rank)
    for key, tensor in state.tensors.items():
        if world.is_main:
            tensor.copy_(whole[key])
        if world.size > 1:
            dist.broadcast(tensor, 0)
    world.barrier()
    return time.perf_counter() - began


def _save_dcp(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    content = state_dict_of(state.tensors, state.sharded, world)
    dcp.save(content, checkpoint_id=folder, process_group=world.control_group)
    return time.perf_counter() - began


def _save_dcp_beside(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    content = state_dict_of(state.tensors, state.sharded, world)
    future = dcp.async_save(content, checkpoint_id=folder, process_group=world.save_group)
    waited = time.perf_counter() - began
    assert isinstance(future, Future)  # another response is for staging, which was not asked for
    future.result()
    return waited


def _load_dcp(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    content = state_dict_of(state.tensors, state.sharded, world)
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
    Way(f"{OURS}, asynchronous", _save_ours_beside),
    Way(f"{DCP}, asynchronous", _save_dcp_beside),
)
LOADS = (
    Way(OURS, _load_ours, OURS),
    Way("torch.load + scatter", _load_gathered, TORCH),
    Way(DCP, _load_dcp, DCP),
)
