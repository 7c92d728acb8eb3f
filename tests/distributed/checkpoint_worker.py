"""A rank of test_checkpoint.py, on four ranks and on smaller worlds of them: checkpoint_worker.py FOLDER"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from plsc.checkpoint import Manifest, ShardedTensor, Snapshot, load_tensors, save_checkpoint
from plsc.checkpoint.manifest import HeadInfo
from plsc.errors import CheckpointError
from plsc.parallel.collectives import class_range, class_ranges
from plsc.parallel.world import World
from tests.distributed.worker import run_worker, smaller_world
from tests.roles import role_of_key

ROW_COUNTS = (1, 2, 5, 9, 1001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def full_tensor(rows: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 3, 2, generator=generator, dtype=torch.float64) * 1e3).to(dtype)


def make_state(world: World, seed: int):
    tensors, sharded = {}, {}
    for dtype in DTYPES:
        tensors[f"scalar/{dtype}"] = full_tensor(1, dtype, seed)[0, 0, 0].clone()
        tensors[f"whole/{dtype}"] = full_tensor(4, dtype, seed).transpose(0, 1)  # not contiguous
        for rows in ROW_COUNTS:
            start, stop = class_range(rows, world.rank, world.size)
            local = full_tensor(rows, dtype, seed + rows)[start:stop]
            sharded[f"{rows}/{dtype}"] = ShardedTensor(local, rows, start)
    tensors["tied"] = tensors["whole/torch.float32"]
    tensors["empty"] = torch.zeros(0, 4)
    tensors[f"own/{world.rank}"] = torch.tensor([seed, world.rank])
    return tensors, sharded


def by_role(tensors):
    return {role_of_key(key): tensor for key, tensor in tensors.items()}


def make_manifest(world: World, step: int = 1) -> Manifest:
    ranges = class_ranges(5, world.size)
    return Manifest("0", step, 1, 0, world.size, 6, {"": HeadInfo(5, ranges)}, {"a": {"b": 1}}, {"loss": 0.5})


def save(world: World, folder: Path, name: str, seed: int) -> None:
    tensors, sharded = make_state(world, seed)
    # Replicas that differ: the value of the lowest rank must be saved.
    tensors["buffer"] = torch.full((3,), float(world.rank))
    tensors["buffer2"] = torch.full((3,), float(world.rank))
    state = by_role({**tensors, **sharded})
    save_checkpoint(folder, name, Snapshot(state, make_manifest(world)), world)


def load(world: World, folder: Path, name: str, seed: int) -> None:
    expected, expected_sharded = make_state(world, seed)
    if "own/0" in expected:
        expected["buffer"] = expected["buffer2"] = torch.zeros(3)
    tensors = {key: torch.zeros_like(value) for key, value in expected.items()}
    sharded = {
        key: ShardedTensor(torch.zeros_like(part.local), part.rows, part.start)
        for key, part in expected_sharded.items()
    }
    pointers = {key: value.data_ptr() for key, value in tensors.items()}
    manifest = load_tensors(folder / name, by_role({**tensors, **sharded}), world)
    assert manifest.options == {"a": {"b": 1}}
    for key, value in tensors.items():
        assert value.data_ptr() == pointers[key], f"{key} was not loaded in place"
        assert torch.equal(value, expected[key]), key
    for key, part in sharded.items():
        assert torch.equal(part.local, expected_sharded[key].local), key


def disagree(world: World, folder: Path) -> None:
    save(world, folder, "1", 5)
    tensors, _ = make_state(world, 5)
    last = world.size - 1
    if world.rank == last:
        tensors["absent"] = torch.zeros(1)
    try:
        load_tensors(folder / "1", by_role(tensors), world)
    except CheckpointError as error:
        assert f"rank {last}: " in str(error)  # noqa: PT017
        assert "'absent'" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a missing tensor was not noticed")


def run_cases(full: World, folder: Path) -> None:
    worlds = {ranks: smaller_world(full, ranks) for ranks in (1, 2, 3, 4)}

    def on(ranks: int, action: Callable[..., None], *args: object) -> None:
        world = worlds[ranks]
        if world is not None:
            action(world, *args)
        dist.barrier()

    def passed(case: str) -> None:
        if full.is_main:
            print(f"passed: {case}", flush=True)

    for saved_on in worlds:
        on(saved_on, save, folder / str(saved_on), "1", 4)
        on(saved_on, save, folder / str(saved_on), "1", 5)  # replaces it
        on(saved_on, load, folder / str(saved_on), "1", 5)
    passed("as many ranks")
    on(2, disagree, folder / "disagree")
    passed("disagree")


def main() -> None:
    world = World.from_environment("cpu", timeout_seconds=60)
    run_cases(world, Path(sys.argv[1]))
    world.close()


if __name__ == "__main__":
    run_worker(main)
