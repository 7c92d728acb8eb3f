"""Train small networks with any optimizer on 1 and 4 ranks, some on 3: train_worker.py DATASET FOLDER

FOLDER/<ranks>/<case> is the folder of each run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plsc.models import BaseModel
from plsc.models.base_model import Initialization
from plsc.parallel.world import World
from plsc.train.callbacks import UserParts
from tests.distributed.worker import run_worker, smaller_world
from tests.resuming import compute_in_float64, options_of, train

STEPS, GLOBAL_BATCH, EMBEDDING = 8, 24, 12


class Plain(BaseModel):
    """No batch statistics, no dropout."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.fc = nn.Linear(6 * 8 * 8, EMBEDDING)

    def build_network(self, input, label, is_train=True):
        return self.fc(torch.tanh(self.conv(input)).flatten(1))


class Normalised(BaseModel):
    """Batch norm after each convolution, and an integer parameter."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        # Before batch norm the gradient of a bias is only rounding noise, which some optimizers amplify.
        first, second = (nn.Conv2d(*sizes, 3, 2, 1, bias=False) for sizes in ((3, 4), (4, 6)))
        self.stem = nn.Sequential(first, nn.BatchNorm2d(4))
        self.conv = nn.Sequential(second, nn.BatchNorm2d(6))
        self.fc = nn.Linear(6 * 4 * 4, EMBEDDING)

    def build_network(self, input, label, is_train=True):
        return self.fc(torch.tanh(self.conv(torch.tanh(self.stem(input)))).flatten(1))


class Branches(Normalised):
    """A network with a layer that it never uses, and one that it uses in every other step."""

    def __init__(self):
        super().__init__()
        self.never, self.odd = nn.Linear(3, 3), nn.Linear(EMBEDDING, EMBEDDING)
        self.register_buffer("steps", torch.tensor(0))

    def build_network(self, input, label, is_train=True):
        output = super().build_network(input, label)
        self.steps += is_train
        return output if is_train and self.steps % 2 else output + self.odd(output)


OF_THREE = "arcface", "more classes than images"  # the others: on one rank and on four
# Margins, sampling, row optimizers and micro-batches on any number of ranks: resume_worker.py.
CASES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "arcface": (Plain, {}),
    "softmax, padded": (Plain, {"head__loss_type": "dist_softmax", "data__last_batch": "pad"}),
    # 17 classes, of which 13 have images: on 4 ranks 5, 5, 5, 2 rows.
    "more classes than images": (Plain, {"head__class_num": 17}),
    "float32": (Normalised, {"data__last_batch": "pad"}),
    "nesterov, a frozen batch norm, clipped": (Normalised, {
        "optim__optimizer_arguments": {"nesterov": True}, "optim__freeze": ("type:BatchNorm2d",),
        "optim__clip_norm": 0.5,
        "optim__groups": ({"pattern": "fc", "lr_factor": 0.5, "weight_decay": 0.0},),
    }),
    "adamw, half decayed, in micro-batches": (Normalised, {
        # The statistics of batch norms would depend on micro-batches.
        "optim__optimizer": "adamw", "optim__freeze": ("stem", "conv.1"), "optim__lr": 0.05,
        "optim__groups": ({"pattern": "*.bias", "weight_decay": 0.0},), "train__micro_batches": 2,
        "head__weight_decay": 0.1, "head__optimizer": "adamw",
    }),
    "adafactor, replicated": (Normalised, {
        "optim__optimizer": "adafactor", "head__loss_type": "arcface", "head__lr_factor": 0.5,
        "optim__schedule": "cosine", "optim__warmup_steps": 2,
        "optim__optimizer_arguments": {"foreach": False},
    }),
    "nadam, everything frozen but the rows": (
        Normalised, {"optim__optimizer": "nadam", "optim__freeze": ("*",)},
    ),
    "branches": (Branches, {}),
}  # fmt: skip


def train_case(dataset: Path, world: World, folder: Path, case: str) -> None:
    kind, settings = CASES[case]
    options = options_of(
        dataset, folder / case,
        **{"model__emb_size": EMBEDDING, "model__sync_batch_norm": True, "head__class_num": 13,
           "optim__lr": 4.0 * GLOBAL_BATCH / 1024, "train__global_batch_size": GLOBAL_BATCH,
           "train__epochs": 1000, "train__steps": STEPS, "train__calc_acc": True,
           "data__last_batch": "keep", **({} if "softmax" in case else {"head__scale": 16.0}), **settings},
    )  # fmt: skip
    rules = (Initialization("conv", "kaiming_normal", {}),) if "adamw" in case else ()
    user = UserParts(initializations=rules)

    def network() -> BaseModel:
        torch.manual_seed(world.rank)  # all ranks get the network of rank 0
        return kind()

    with pytest.MonkeyPatch.context() as patch:
        if case != "float32":
            compute_in_float64(patch)
        train(options, world, network, user)
    world.barrier()


def main() -> None:
    dataset, folder = map(Path, sys.argv[1:])
    full = World.from_environment("cpu")
    worlds = {ranks: smaller_world(full, ranks) for ranks in (1, 3, 4)}
    for ranks, world in worlds.items():
        for case in (OF_THREE if ranks == 3 else CASES) if world else ():
            train_case(dataset, world, folder / str(ranks), case)
        dist.barrier()
    full.close()


if __name__ == "__main__":
    run_worker(main)
