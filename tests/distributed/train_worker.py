"""Train small networks on any number of ranks and write the results.

    train_worker.py DATASET FOLDER

Runs on four ranks; the first one or three form smaller worlds. FOLDER/<ranks>.json has, for each case,
the losses of all steps and the class weights per rank; FOLDER/<ranks>.npz has the weights before and after.
For `broken` three ranks average the backbone's gradients instead of summing them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from plsc.actions.train import add_output
from plsc.config import Options
from plsc.heads import ShardedHead
from plsc.models import BaseModel
from plsc.parallel import backbone
from plsc.parallel.world import World
from plsc.run.run import build_run
from plsc.run.user_parts import UserParts
from plsc.state.saving import Saver
from plsc.state.start import open_directories, open_start
from plsc.train.loop import Trainer
from tests.distributed.worker import run_worker, smaller_world
from tests.float64 import compute_in_float64

GLOBAL_BATCH = 24


class PlainNetwork(BaseModel):
    """No batch statistics, no dropout."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.fc = nn.Linear(6 * 8 * 8, 12)

    def build_network(self, input, label, is_train=True):
        return self.fc(torch.tanh(self.conv(input)).flatten(1))


class NormalisedNetwork(BaseModel):
    """Batch norm after the convolution and after the embedding layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6 * 8 * 8, 12)
        self.out = nn.BatchNorm1d(12)

    def build_network(self, input, label, is_train=True):
        return self.out(self.fc(torch.tanh(self.norm(self.conv(input))).flatten(1)))


CASES = {
    # name: network, loss type, dtype, classes, last batch
    "plain-arcface-fp64": (PlainNetwork, "dist_arcface", "float64", 13, "keep"),
    "plain-softmax-fp64": (PlainNetwork, "dist_softmax", "float64", 13, "pad"),
    "norm-arcface-fp64": (NormalisedNetwork, "dist_arcface", "float64", 13, "keep"),
    "norm-arcface-fp32": (NormalisedNetwork, "dist_arcface", "float32", 13, "pad"),
    "norm-dense-arcface-fp64": (NormalisedNetwork, "arcface", "float64", 13, "keep"),
    "plain-dense-softmax-fp64": (PlainNetwork, "softmax", "float64", 13, "keep"),
    # 17 classes, of which 13 have images: on 4 ranks 5, 5, 5, 2 rows.
    "spare-classes-fp64": (PlainNetwork, "dist_arcface", "float64", 17, "keep"),
    "adaface-adamw-fp64": (PlainNetwork, "dist_adaface", "float64", 13, "keep"),
    "curricular-clipped-fp64": (PlainNetwork, "dist_curricularface", "float64", 13, "keep"),
    "sub-centres-adagrad-fp64": (PlainNetwork, "dist_arcface", "float64", 13, "keep"),
    "micro-batches-fp64": (PlainNetwork, "dist_cosface", "float64", 13, "keep"),
    "sampled-fp64": (PlainNetwork, "dist_arcface", "float64", 13, "keep"),
}
MORE = {
    "adaface-adamw-fp64": {"head.optimizer": "adamw", "head.lr_factor": 0.05},
    "curricular-clipped-fp64": {"optim.clip_norm": 0.5},
    "sub-centres-adagrad-fp64": {"head.sub_centers": 2, "head.optimizer": "adagrad"},
    "micro-batches-fp64": {"train.micro_batches": 3},
    "sampled-fp64": {"head.sample_ratio": 0.5},
}
STEPS = 20


def draw_independent_of_ranks(head, every, labels, listed):
    """Replace the sampling, which depends on the ranks: use a third of the classes and the positives."""
    start, stop = head.class_range
    chosen = (torch.arange(start, stop) + head.step) % 3 == 0
    chosen[labels[(labels >= start) & (labels < stop)] - start] = True
    return chosen.nonzero()[:, 0]


def train_case(dataset: str, world: World, case: str) -> tuple[dict, dict]:
    network, loss_type, dtype, classes, last_batch = CASES[case]
    settings = {
        "data.dataset_dir": dataset,
        "data.num_workers": 0,
        "data.last_batch": last_batch,
        "head.loss_type": loss_type,
        "head.class_num": classes,
        "model.image_shape": (3, 16, 16),
        "model.emb_size": 12,
        "model.sync_batch_norm": network is NormalisedNetwork,
        "optim.lr": 4.0 * GLOBAL_BATCH / 1024,
        "optim.warmup_steps": 0,
        "optim.clip_norm": 0.0,
        "optim.schedule": "constant",
        "train.global_batch_size": GLOBAL_BATCH,
        "train.epochs": 1000,
        "train.steps": STEPS,
        "train.log_period": 1,
        "train.calc_acc": True,
    }
    if not loss_type.endswith("softmax"):
        settings["head.scale"] = 16.0
    settings.update(MORE.get(case, {}))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if dtype == "float64":
            compute_in_float64(patch)
        if case == "sampled-fp64":
            patch.setattr(ShardedHead, "_select_classes", draw_independent_of_ranks)
        folder = world.broadcast_object(folder)
        settings["checkpoint.save_dir"] = folder
        options = Options()
        options.set_together(settings)
        config = options.resolve()
        torch.manual_seed(0)
        run = build_run(config, world, UserParts(model=network()))
        before = weights_of(run)
        directories = open_directories(config, world, open_start(config, world))
        add_output(run, directories.start)
        Trainer(run, Saver(run, directories)).train()
        directories.release()
        world.barrier()
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
        metrics = [entry for entry in map(json.loads, lines) if "loss" in entry]
        world.barrier()
    kept = world.all_gather_object([list(run.head.class_range), list(run.head.weight.shape)])
    report = {
        "losses": [m["loss"] for m in metrics],
        "accuracies": [m["accuracy"] for m in metrics],
        "kept": kept,
    }
    arrays = {f"{case}/before/{key}": value for key, value in before.items()}
    arrays |= {f"{case}/after/{key}": value for key, value in weights_of(run).items()}
    return report, arrays


def weights_of(run) -> dict[str, np.ndarray]:
    arrays = {key: value.detach().numpy().copy() for key, value in run.network.state_dict().items()}
    for key, value in run.head.named_parameters():
        parts = run.world.all_gather_object(value.detach().numpy().copy())
        arrays[f"head.{key}"] = np.concatenate(parts) if run.head.is_sharded else parts[-1]
    return arrays


def train_cases(dataset: str, world: World, output: Path, cases: Iterable[str]) -> None:
    reports, arrays = {}, {}
    for case in cases:
        reports[case], more = train_case(dataset, world, case)
        arrays |= more
    if world.is_main:
        output.with_suffix(".json").write_text(json.dumps(reports))
        np.savez(output.with_suffix(".npz"), **arrays)


def break_convention(patch: pytest.MonkeyPatch) -> None:
    right = backbone._sum_bucket

    def average_bucket(group, bucket):
        ranks = group.size()
        return right(group, bucket).then(lambda future: future.value() / ranks)

    patch.setattr(backbone, "_sum_bucket", average_bucket)


def main() -> None:
    dataset, folder = sys.argv[1], Path(sys.argv[2])
    full = World.from_environment("cpu")
    worlds = {ranks: smaller_world(full, ranks) for ranks in (1, 3, 4)}
    for ranks, world in worlds.items():
        if world is not None:
            train_cases(dataset, world, folder / str(ranks), CASES)
        dist.barrier()
    world = worlds[3]
    if world is not None:
        with pytest.MonkeyPatch.context() as patch:
            break_convention(patch)
            train_cases(dataset, world, folder / "broken", list(CASES)[:1])
    dist.barrier()
    full.close()


if __name__ == "__main__":
    run_worker(main)
