"""Train with and without recomputation and compare every bit; exit with 1 if they differ."""

from __future__ import annotations

import itertools
import sys
import tempfile

from torch.nn.parallel import DistributedDataParallel

from plsc.checkpoint.save import local_of
from plsc.config import Options
from plsc.parallel.world import World
from plsc.run.run import build_run
from plsc.run.user_parts import UserParts
from plsc.state.tensors import collect_tensors
from plsc.train.loop import exchange_status
from plsc.train.step import Step

CASES = {
    "batch norm": {},
    "batch norm over all ranks": {"model.sync_batch_norm": True},
    "micro-batches": {"train.micro_batches": 2, "model.sync_batch_norm": True},
    "clipped, sampled": {"optim.clip_norm": 0.5, "head.sample_ratio": 0.5},
}


def train(world: World, dataset: str, case: str, names: str) -> tuple[list[float], dict]:
    """Return the losses of three steps, and the final tensors of the run."""
    options = Options()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "data.dataset_dir": dataset,
            "data.num_workers": 0,
            "checkpoint.save_dir": folder,
            "model.name": "SmallResNet",
            "model.image_shape": (3, 16, 16),
            "model.emb_size": 12,
            "model.dropout": 0.4,
            "train.batch_size": 8,
            "train.with_test": False,
            "optim.lr": 4.0 * 8 / 1024,
            "optim.warmup_steps": 0,
            "optim.clip_norm": 0.0,
            "optim.schedule": "constant",
            "memory.recompute": names,
            **CASES[case],
        }
        options.set_together(settings)
        run = build_run(options.resolve(), world, UserParts())
        assert isinstance(run.trained_network, DistributedDataParallel) == (world.size > 1)
        step, losses = Step(run), []
        run.network.train()
        for batch in itertools.islice(run.data.loader.epoch(0, 0), 3):
            sizes = exchange_status(world, batch, run.head.class_num).sizes
            losses.append(float(step.make(batch, sizes, is_logged=True).output.mean_loss))
            run.position.advance()
    found = collect_tensors(run.network, run.head, run.optimizer, run.rows)
    return losses, {role.key: local_of(value) for role, value in found.items()}


def main() -> None:
    world = World.from_environment("cpu")
    for case in CASES:
        plain_losses, plain = train(world, sys.argv[1], case, "none")
        for names in ("all", "stem,stages.*,neck"):
            losses, tensors = train(world, sys.argv[1], case, names)
            assert losses == plain_losses, f"{case}, {names}: {losses} != {plain_losses}"
            assert list(tensors) == list(plain), f"{case}, {names}"
            for key, tensor in tensors.items():
                assert tensor.equal(plain[key]), f"{case}, {names}: {key}"
    world.close()


if __name__ == "__main__":
    main()
