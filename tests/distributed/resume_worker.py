"""Save and resume on different numbers of ranks, in one launch of four: resume_worker.py DATASET FOLDER

Tests with fewer ranks use smaller worlds of the first one, two or three ranks.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plsc.checkpoint import Manifest, ShardedTensor, Snapshot, load_tensors, save_checkpoint
from plsc.checkpoint.manifest import EXTRA, RANK, HeadInfo, Role
from plsc.checkpoint.save import local_of
from plsc.errors import CheckpointError
from plsc.heads import ROW_OPTIMIZERS, ShardedHead, build_margin, sharded
from plsc.parallel.world import World, class_ranges
from plsc.train.callbacks import UserParts
from plsc.train.saving import collect_tensors
from tests.distributed.worker import run_worker, smaller_world
from tests.resuming import (
    Steady,
    compute_in_float64,
    different,
    joined,
    losses_of,
    options_of,
    saved_at,
    tensors_of,
    train,
)

RANKS = (1, 2, 3, 4)
CLASSES = 10  # on 4 ranks 3, 3, 3, 1; on 3 ranks 4, 4, 2
DIMENSION = 300

ROWS = {
    # name: margin, sub-centres per class, dtype of class weights, optimizer, dtype of its state
    "fp32-sgd": ("arcface", 1, "float32", "sgd", "float32"),
    "bf16-sgd": ("cosface", 1, "bfloat16", "sgd", "bfloat16"),
    "bf16-adamw": ("adaface", 3, "bfloat16", "adamw", "bfloat16"),
    "int8-adagrad": ("arcface", 3, "int8", "adagrad", "float32"),
    "fp32-adagrad": ("softmax", 1, "float32", "adagrad", "float32"),
}


def state_of_rows(world: World, is_filled: bool):
    """Return the tensors of all kinds of heads, filled with values that depend on the class, or zeros."""
    found = {}
    for name, (margin, centers, row_dtype, optimizer, state_dtype) in ROWS.items():
        head = ShardedHead(
            CLASSES, DIMENSION, build_margin(margin), centers=centers, row_dtype=row_dtype,
            group=world.head_group,
        )  # fmt: skip
        rows = ROW_OPTIMIZERS[optimizer](head, state_dtype=state_dtype)
        none = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        parts = collect_tensors(nn.Module(), head, none, rows)
        found |= {Role(EXTRA, f"{name}/{role.key}"): value for role, value in parts.items()}
    generator = torch.Generator().manual_seed(3)
    for part in found.values():
        if not isinstance(part, ShardedTensor):
            part.fill_(0.25 if is_filled else 0)
            continue
        values = torch.randint(-127, 128, part.shape, generator=generator)
        stop = part.start + len(part.local)
        part.local.copy_(values[part.start : stop] if is_filled else torch.zeros(()))
    return found


def check_rows(worlds: dict[int, World | None], folder: Path) -> None:
    """Class weights and states that are saved and loaded on different numbers of ranks are bit-identical."""
    for saved_on in RANKS:
        world = worlds[saved_on]
        if world is not None:
            manifest = Manifest("0", 1, 0, 0, saved_on, DIMENSION, {"": HeadInfo(CLASSES, [])})
            state = Snapshot(state_of_rows(world, True), manifest)
            save_checkpoint(folder, str(saved_on), state, world)
        dist.barrier()
        for loaded_on in RANKS:
            world = worlds[loaded_on]
            if world is None:
                continue
            found = state_of_rows(world, False)
            load_tensors(folder / str(saved_on), found, world)
            expected = state_of_rows(world, True)
            where = f"{saved_on} to {loaded_on}, rank {world.rank}"
            for role, value in found.items():
                assert local_of(value).equal(local_of(expected[role])), f"{where}: {role.key}"
                assert local_of(value).numel() == 0 or local_of(value).any(), role.key
        dist.barrier()


def check_copies(world: World | None, folder: Path) -> None:
    """Copies that differ are saved as the lowest rank has them; what one rank lacks is an error on all."""
    if world is not None:
        whole = torch.arange(12, dtype=torch.bfloat16).view(3, 4).T  # not contiguous
        tensors = {
            Role(EXTRA, "copies"): torch.full((3,), float(world.rank)), Role(EXTRA, "whole"): whole,
            Role(EXTRA, "tied"): whole, Role(EXTRA, "empty"): torch.zeros(0, 4),
            Role(RANK, "own", str(world.rank)): torch.tensor([5, world.rank]),
        }  # fmt: skip
        manifest = Manifest("0", 1, 0, 0, world.size, DIMENSION, {"": HeadInfo(CLASSES, [])})
        save_checkpoint(folder, "1", Snapshot(tensors, manifest), world)
        found = {role: torch.full_like(tensor, 7) for role, tensor in tensors.items()}
        load_tensors(folder / "1", found, world)
        tensors[Role(EXTRA, "copies")].zero_()
        for role, tensor in found.items():
            assert tensor.equal(tensors[role]), role.key
        assert {path.suffix for path in (folder / "1").iterdir()} == {".json", ".safetensors"}
        last = world.size - 1
        if world.rank == last:
            found[Role(EXTRA, "absent")] = torch.zeros(1)
        with pytest.raises(CheckpointError, match=f"rank {last}: .*absent"):
            load_tensors(folder / "1", found, world)
    dist.barrier()


ROUTE = ((4, 2), (1, 4), (3, 6))  # number of ranks, and their last step; 3 steps per epoch
CASES = {
    "adaface-adamw-balanced": {
        "head.loss_type": "dist_adaface", "head.optimizer": "adamw", "head.lr_factor": 0.05,
        "data.order": {"name": "balanced", "balance": 0.0},
    },
    "sub-centres-adagrad-micro-batches": {
        "head.sub_centers": 2, "head.optimizer": "adagrad", "train.micro_batches": 2,
        "model.sync_batch_norm": False,
    },
    "curricular-dense-clipped-classes": {
        "head.loss_type": "curricularface", "optim.clip_norm": 0.5,
        "data.order": {"name": "classes", "images_per_class": 5},
    },
    "sampled-softmax-block-order": {
        "head.loss_type": "dist_softmax", "head.sample_ratio": {0: 1.0, 1: 0.5}, "data.last_batch": "keep",
        "data.order": {"name": "block", "block_samples": 2, "pool_samples": 8},
    },
}  # fmt: skip


def draw_independent_of(world: World, *how: object) -> torch.Tensor:
    """Replace the sampling, which depends on the ranks: draw a third of the classes and the positives.

    how: arguments of `draw_classes`, of which the first ones are local positives and number of local classes.
    """
    start, stop = class_ranges(13, world.size)[world.rank]
    chosen = torch.arange(start, stop) % 3 == 0
    chosen[how[0]] = True
    return chosen.nonzero()[:, 0]


class Plain(Steady):
    """Without batch norm, whose statistics would depend on ranks and micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()


def check_route(
    worlds: dict[int, World | None], dataset: Path, folder: Path, case: str, patch: pytest.MonkeyPatch
) -> None:
    """A run on 4, 1, 3 ranks in turn has the losses and weights of an uninterrupted run on 4."""
    settings = {
        "model.sync_batch_norm": True, "train.epochs": 2,
        "train.global_batch_size": 10, "head.scale": 16.0, **CASES[case],
    }  # fmt: skip
    if "softmax" in case:
        del settings["head.scale"]
    network = Plain if "micro" in case else Steady

    def start(world: World | None, name: str, **more) -> None:
        if world is not None:
            patch.setattr(sharded, "draw_classes", functools.partial(draw_independent_of, world))
            options = options_of(dataset, folder / name)
            for path, value in settings.items():
                options.set(path, value)
            for path, value in more.items():
                options.set(path.replace("__", "."), value)
            train(options, world, network)
        dist.barrier()

    start(worlds[4], "whole")
    for ranks, until in ROUTE:
        start(worlds[ranks], "moved", train__steps=until, checkpoint__load_dir="last")
    if dist.get_rank() == 0:
        ours, theirs = losses_of(folder / "moved"), losses_of(folder / "whole")
        assert sorted(ours) == sorted(theirs) == list(range(1, 7))
        for step, loss in theirs.items():
            assert abs(ours[step] - loss) < 1e-9 * max(1, loss), (case, step, ours[step], loss)
        close(joined(folder / "moved/1"), joined(folder / "whole/1"), case)
        print(f"{case}: last losses {ours[6]!r} after the route, {theirs[6]!r} undisturbed")
    dist.barrier()


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], case: str) -> None:
    assert ours.keys() == theirs.keys()
    assert any(key.startswith(("rows.", "momentum.head")) for key in ours), "no state of rows"
    for key, tensor in theirs.items():
        torch.testing.assert_close(
            ours[key],
            tensor,
            rtol=1e-8,
            atol=1e-9,
            msg=lambda text, key=key: f"{case} {key}: {text}",
        )


def check_same_ranks(world: World | None, dataset: Path, folder: Path) -> None:
    """Resuming on three ranks is bit-identical, including each rank's running statistics and generators."""
    if world is not None:
        settings = {
            "train__batch_size": 3, "head__loss_type": "dist_curricularface", "train__test_period": 2,
            "head__sample_ratio": 0.8, "data__val_targets": "lfw", "head__row_dtype": "int8",
            "head__hard_share": 0.5,
        }  # fmt: skip

        def start(name: str, **more) -> None:
            train(options_of(dataset, folder / name, **settings, **more), world)
            world.barrier()

        start("whole")
        start("saving", checkpoint__every_n_steps=1, checkpoint__keep_last=-1)
        for step in (2, 4):
            start(f"from {step}", checkpoint__load_dir=str(saved_at(folder / "saving", step)))
        for name in ("saving", "from 2", "from 4"):
            assert different(folder / name / "1", folder / "whole/1") == [], name
        found = {key for _, key in tensors_of(folder / "whole/1")}
        assert {*(f"rank{r}.buffers.float32" for r in range(3)), "rows.weight.neighbours"} <= found
    dist.barrier()


def check_bound_data(worlds: dict[int, World | None], dataset: Path, folder: Path) -> None:
    """With per-rank data, the number of ranks may change only at the end of an epoch."""

    def start(world: World | None, name: str, **more) -> None:
        if world is not None:
            options = options_of(
                dataset, folder / name, head__class_num=13,
                model__sync_batch_norm=True, **more,
            )  # fmt: skip

            def reader(rank: int, ranks: int):
                for sample in range(rank, 24, ranks):
                    yield torch.full((3, 16, 16), sample / 24), sample % 13

            reader.shards_itself = True
            train(options, world, Steady, UserParts(train_reader=reader))

    start(worlds[3], "three", train__global_batch_size=6, train__steps=3)
    start(worlds[3], "whole", train__global_batch_size=6, train__epochs=1)
    dist.barrier()
    middle, end = str(folder / "three/0-step3"), str(folder / "whole/0")
    if worlds[2] is not None:
        with pytest.raises(CheckpointError, match="ranks with their own data in the epoch: 3"):
            start(worlds[2], "two", checkpoint__load_dir=middle)
    start(worlds[2], "end", checkpoint__load_dir=end)
    dist.barrier()


def main() -> None:
    dataset, folder = Path(sys.argv[1]), Path(sys.argv[2])
    full = World.from_environment("cpu", timeout_seconds=60)
    worlds = {ranks: smaller_world(full, ranks) for ranks in RANKS}
    check_rows(worlds, folder / "rows")
    check_copies(worlds[3], folder / "copies")
    check_same_ranks(worlds[3], dataset, folder / "same")
    for case in CASES:
        with pytest.MonkeyPatch.context() as patch:
            compute_in_float64(patch)
            check_route(worlds, dataset, folder / case, case, patch)
    check_bound_data(worlds, dataset, folder / "bound")
    full.close()


if __name__ == "__main__":
    run_worker(main)
