"""Train with a replicated and a sharded backbone on four ranks: sharding_worker.py DATASET FOLDER

Prints a line for each test of test_backbone_sharding.py; fails if a check does.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plsc.checkpoint import save_checkpoint
from plsc.errors import DataError, OptionError
from plsc.models import BaseModel
from plsc.parallel.backbone import local_part
from plsc.parallel.world import World
from plsc.run.run import Run, build_run
from plsc.run.settle import settle
from plsc.run.targets import Target, evaluate_targets
from plsc.run.user_parts import UserParts
from plsc.state.find import open_checkpoint
from plsc.state.restore import restore
from plsc.state.snapshot import take_snapshot
from plsc.state.warm_start import start_from_pretrained
from plsc.train.loop import exchange_status
from plsc.train.step import Step
from tests.distributed.resume_worker import joined, smaller_world
from tests.resuming import different, losses_of, options_of, saved_at, train

STEPS = 6  # three per epoch


class Block(nn.Module):
    """Parameters with 7 x inputs, 7, 7 and 1 rows, which are not multiples of 4."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, 7, 1)
        self.norm = nn.BatchNorm2d(7)
        self.act = nn.PReLU()
        self.drop = nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.norm(self.conv(x))))


class Uneven(BaseModel):
    """Blocks of odd sizes, a frozen layer, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 4, stride=4)
        self.blocks = nn.Sequential(Block(5), Block(7))
        self.frozen = nn.Conv2d(7, 6, 1).requires_grad_(False)
        self.unused = nn.Linear(3, 9)
        self.fc = nn.Linear(6 * 4 * 4, 8)

    def build_network(self, input, label, is_train=True):
        return self.fc(self.frozen(self.blocks(self.stem(input))).flatten(1))


UNITS = {"parallel.shard_units": "blocks.*,fc"}
SHARDED = {"parallel.backbone": "sharded", **UNITS}
GROUPS = {**SHARDED, "parallel.shard_size": 2}
WAYS = {"replicated": {}, "sharded": SHARDED, "groups": GROUPS}
CASES = {
    # name: (tolerance, ways, settings)
    "fp64": (1e-9, ("sharded",), {
        "optim.clip_norm": 0.5, "model.sync_batch_norm": True, "data.val_targets": "lfw",
    }),
    "fp32": (1e-4, ("sharded",), {
        "runtime.dtype": "float32", "memory.recompute": "blocks", "optim.l1_decay": 1e-3,
    }),
    "scaled-bf16": (0.02, ("sharded",), {
        "runtime.dtype": "float32", "precision.mode": "bfloat16", "precision.loss_scaling": "always",
        "precision.scaling_arguments": {"init_loss_scaling": 256.0},
        "optim.optimizer": "rmsprop", "optim.lr": 5e-4,
    }),
    "adamw-micro-fp64": (1e-9, ("sharded", "groups"), {
        "optim.optimizer": "adamw", "optim.lr": 0.002, "train.micro_batches": 2, "optim.clip_norm": 0.5,
    }),
    "dense-fp64": (1e-9, ("groups",), {
        "head.loss_type": "arcface", "data.val_targets": "lfw", "optim.clip_norm": 0.5,
    }),
}  # fmt: skip


def options_for(dataset: Path, folder: Path, *settings: dict):
    options = options_of(dataset, folder, runtime__dtype="float64", train__batch_size=6)
    options.set("head.scale", 16.0)
    for path, value in ((p, v) for one in settings for p, v in one.items()):
        options.set(path, value)
    return options


def check_equal(world: World, dataset: Path, folder: Path, case: str) -> None:
    """Losses, weights, optimizer state and evaluation equal those of the replicated backbone."""
    tolerance, ways, settings = CASES[case]
    results = {}
    for way in ("replicated", *ways):
        options = options_for(dataset, folder / case / way, settings, WAYS[way])
        options.set("checkpoint.every_n_steps", 2)
        options.set("checkpoint.keep_last", -1)
        results[way] = train(options, world, Uneven)
        world.barrier()
    theirs = folder / case / "replicated"
    for way in ways:
        assert results[way].evaluation.keys() == results["replicated"].evaluation.keys()
        for name, one in results[way].evaluation.items():
            assert abs(one.accuracy - results["replicated"].evaluation[name].accuracy) < 1e-6
        if not world.is_main:
            continue
        ours = folder / case / way
        mine, right = losses_of(ours), losses_of(theirs)
        assert sorted(mine) == sorted(right) == list(range(1, STEPS + 1))
        assert all(abs(mine[s] - loss) < tolerance * max(1, loss) for s, loss in right.items()), way
        tensors, wanted = joined(saved_at(ours, STEPS)), joined(saved_at(theirs, STEPS))
        assert tensors.keys() == wanted.keys()
        before = joined(saved_at(theirs, 2))
        for key, tensor in wanted.items():
            apart = (tensors[key] - tensor).abs().max() if tensor.numel() else 0
            assert apart <= tolerance * max(1, tensor.abs().max()), f"{case} {way} {key}: {apart}"
            is_still = "frozen" in key or "unused" in key or key.endswith("step")
            assert is_still or not tensor.equal(before[key]), f"{key} was not trained"
        print(f"{case} {way}: equal", flush=True)


def check_resumed_to_the_bit(world: World, dataset: Path, folder: Path) -> None:
    for case, way in (("fp64", "sharded"), ("adamw-micro-fp64", "groups")):
        whole = folder / case / way
        options = options_for(dataset, folder / "resumed" / case, CASES[case][2], WAYS[way])
        options.set("checkpoint.load_dir", str(saved_at(whole, 2)))
        train(options, world, Uneven)
        world.barrier()
        if world.is_main:
            found = different(saved_at(folder / "resumed" / case, STEPS), saved_at(whole, STEPS))
            assert not found, found
            print(f"{case} {way}: resumed to the bit", flush=True)


def restored(world: World, dataset: Path, folder: Path, source: Path, way: dict) -> Run:
    options = options_for(dataset, folder, {"checkpoint.load_dir": str(source)}, way)
    del options.values["train.batch_size"]
    manifest = open_checkpoint(source)
    user = UserParts(model=Uneven())
    config = settle(options, (source, manifest), world.size, user.model)
    run = build_run(config, world, user)
    restore(run, source, manifest)
    return run


def check_layouts(worlds: dict[int, World | None], dataset: Path, folder: Path) -> None:
    """A checkpoint of any layout can be loaded and saved with any other layout, bit for bit."""
    case = "adamw-micro-fp64"
    targets = {
        "replicated": ((4, "sharded"), (4, "groups")),
        "sharded": ((4, "groups"), (4, "replicated"), (3, "sharded"), (1, "sharded")),
        "groups": ((4, "sharded"), (3, "sharded"), (2, "replicated")),
    }
    for saved_as, layouts in targets.items():
        source = saved_at(folder / case / saved_as, 4)
        for ranks, way in layouts:
            world = worlds[ranks]
            name = f"{saved_as} to {way} on {ranks}"
            if world is not None:
                layout = {"parallel.backbone": "replicated"} if way == "replicated" else WAYS[way]
                if (ranks, way) == (4, "sharded"):
                    # Otherwise the size of the checkpoint is kept if it divides the number of ranks.
                    layout = {**layout, "parallel.shard_size": 0}
                run = restored(world, dataset, folder / "again", source, layout)
                save_checkpoint(folder / "again", name, take_snapshot(run, {}), world)
                if world.is_main:
                    mine, right = joined(folder / "again" / name), joined(source)
                    assert mine.keys() == right.keys()
                    # The mean of three equal buffers is rounded in fp64.
                    wrong = [
                        key
                        for key, tensor in right.items()
                        if not tensor.equal(mine[key])
                        and not (".running_" in key and torch.allclose(tensor, mine[key], 1e-12))
                    ]
                    assert not wrong, f"{name}: {wrong}"
                if (ranks, way) == (4, "sharded"):
                    check_memory(world, run)
            dist.barrier()
    if dist.get_rank() == 0:
        print("layouts: the same bits", flush=True)


def check_memory(world: World, run: Run) -> None:
    """Each rank has only its rows of every tensor with at least as many rows as ranks."""
    parameters = list(run.network.parameters())
    states = [t for s in run.optimizer.state.values() for t in s.values() if t.ndim]
    assert len(states) == 2 * sum(p.requires_grad and p in run.optimizer.state for p in parameters)
    for tensor in (*parameters, *states):
        assert len(local_part(tensor)) <= -(-tensor.shape[0] // world.size), tensor.shape
    here = world.all_gather_object(sum(local_part(one).nbytes for one in [*parameters, *states]))
    assert sum(here) == sum(t.numel() * 8 for t in (*parameters, *states))


def check_share_of_a_larger_network(world: World, dataset: Path, folder: Path) -> None:
    options = options_for(dataset, folder, {"parallel.backbone": "sharded"})
    options.set("model.name", "SmallResNet")
    run = build_run(options, world, UserParts())
    parameters = list(run.network.parameters())
    share = sum(local_part(one).nbytes for one in parameters) / sum(p.numel() * 8 for p in parameters)
    assert share < 0.26, share
    assert any("4 ranks, in 3 FSDP units" in note for note in run.notes), run.notes
    if world.is_main:
        print(f"memory: {share:.3f} of the parameters on rank 0", flush=True)


def check_warm_start(world: World, dataset: Path, folder: Path) -> None:
    source = saved_at(folder / "fp64" / "sharded", STEPS)
    for way in WAYS:
        options = options_for(dataset, folder / "warm", WAYS[way], {"model.pretrained": str(source)})
        run = build_run(options, world, UserParts(model=Uneven()))
        started = start_from_pretrained(run)
        assert started is not None
        assert started.backbone.share == 1.0
        save_checkpoint(folder / "warm", way, take_snapshot(run, {}), world)
        if world.is_main:
            mine, right = joined(folder / "warm" / way), joined(source)
            for key, tensor in right.items():
                if key.startswith(("backbone.", "head.")):
                    assert tensor.equal(mine[key]), key
    if world.is_main:
        print("warm start: the same bits", flush=True)


def check_evaluation(world: World, dataset: Path, folder: Path) -> None:
    """An image that one rank cannot read raises on all ranks; training can continue afterwards."""
    run = build_run(options_for(dataset, folder, SHARDED), world, UserParts(model=Uneven()))
    image = (dataset / "images/0_0.png").read_bytes()
    broken = Target("broken", [image] * 39 + [b"no image"], np.array([True, False] * 10))
    from plsc.parallel.backbone import unsharded_parameters

    for _ in range(2):
        with pytest.raises(DataError, match="image 39 of broken"), unsharded_parameters(run.network):
            evaluate_targets(run.network, [broken], run.options, world)
        run.network.train()
        run.trained_network(torch.zeros(4, 3, 16, 16).double(), None, True).sum().backward()
    if world.is_main:
        print("evaluation: refused everywhere", flush=True)


class OfTheRank(Uneven):
    """A network with different weights on every rank."""

    def __init__(self) -> None:
        torch.manual_seed(dist.get_rank())
        super().__init__()


class Borrowing(Uneven):
    """Uses the weight of a layer outside of the layer."""

    def build_network(self, input, label, is_train=True):
        return super().build_network(input, label, is_train) + self.fc.weight.sum()


def check_networks(world: World, dataset: Path, folder: Path) -> None:
    options = options_for(dataset, folder, SHARDED)
    run = build_run(options, world, UserParts(model=OfTheRank()))
    torch.manual_seed(0)
    for (key, mine), right in zip(run.network.named_parameters(), Uneven().parameters(), strict=True):
        assert mine.full_tensor().equal(right.double()), key
    refusals = {
        r"earlier run in this process": (run.network, {}),
        r"Borrowing cannot be sharded: .*choose the FSDP units": (Borrowing(), {}),
        r"parallel.shard_size is 3; expected a divisor of the number of ranks, 4": (
            Uneven(), {"parallel.shard_size": 3},
        ),
        r"adafactor does not support a sharded": (Uneven(), {"optim.optimizer": "adafactor"}),
        r"calls unused 0 times": (Uneven(), {"parallel.shard_units": "unused"}),
    }  # fmt: skip
    for text, (network, more) in refusals.items():
        with pytest.raises(OptionError, match=text):
            build_run(options_for(dataset, folder, SHARDED, more), world, UserParts(model=network))
    # A parameter that is used outside of its layer can be outside of all units.
    more = {"parallel.shard_units": "blocks.*"}
    build_run(options_for(dataset, folder, SHARDED, more), world, UserParts(model=Borrowing()))
    if world.is_main:
        print("networks: made equal, or refused", flush=True)


def check_factories(world: World, dataset: Path, folder: Path) -> None:
    """A custom optimizer that does not support DTensors raises a one-line error on every rank."""
    options = options_for(dataset, folder, SHARDED, {"optim.optimizer": "users:factory"})
    for kind, way in ((torch.optim.SGD, "fused"), (torch.optim.Rprop, "foreach")):
        user = UserParts(model=Uneven(), optimizer=partial(kind, lr=0.1, **{way: True}))
        run = build_run(options, world, user)
        run.network.train()
        batch = next(iter(run.data.loader.epoch(0)))
        sizes = exchange_status(world, batch, run.head.class_num).sizes
        step = Step(run)
        message = r"^the optimizer users:factory does not support a sharded backbone: .*"
        with pytest.raises(OptionError, match=message + r"set_backbone_parallel\('replicated'\)$"):
            step.make(batch, sizes, False)
    if world.is_main:
        print("factories: refused in a line", flush=True)


def main() -> None:
    dataset, folder = map(Path, sys.argv[1:])
    world = World.from_environment("cpu")
    worlds = {ranks: world if ranks == 4 else smaller_world(world, ranks) for ranks in (1, 2, 3, 4)}
    for case in CASES:
        check_equal(world, dataset, folder, case)
    check_resumed_to_the_bit(world, dataset, folder)
    check_layouts(worlds, dataset, folder)
    check_share_of_a_larger_network(world, dataset, folder)
    check_warm_start(world, dataset, folder)
    check_evaluation(world, dataset, folder)
    check_networks(world, dataset, folder)
    check_factories(world, dataset, folder)
    world.close()


if __name__ == "__main__":
    main()
