"""Train with several optimizers, groups and frozen parameters on any number of ranks.

    optim_worker.py DATASET OUTPUT

OUTPUT.pt has the weights of the network and the class weights after the last step of each case.
"""

from __future__ import annotations

import sys
import tempfile

import pytest
import torch
from torch import nn

from plsc.config import Options
from plsc.models import BaseModel
from plsc.models.parameters import Initialization
from plsc.parallel.world import World
from plsc.run.run import build_run
from plsc.run.user_parts import UserParts
from plsc.state.saving import Saver
from plsc.state.start import open_directories, open_start
from plsc.train.loop import Trainer
from tests.float64 import compute_in_float64

STEPS = 5


class Network(BaseModel):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        # Before batch norm the gradient of a bias is only rounding noise, which some optimizers amplify.
        first, second = (nn.Conv2d(*sizes, 3, 2, 1, bias=False) for sizes in ((3, 4), (4, 6)))
        self.stem = nn.Sequential(first, nn.BatchNorm2d(4))
        self.conv = nn.Sequential(second, nn.BatchNorm2d(6))
        self.fc = nn.Linear(6 * 4 * 4, 12)

    def build_network(self, input, label, is_train=True):
        return self.fc(torch.tanh(self.conv(torch.tanh(self.stem(input)))).flatten(1))


class Branches(Network):
    """A network with a layer that it never uses, and one that it uses in every other step."""

    def __init__(self):
        super().__init__()
        self.never, self.odd = nn.Linear(3, 3), nn.Linear(12, 12)
        self.register_buffer("steps", torch.tensor(0))

    def build_network(self, input, label, is_train=True):
        output = super().build_network(input, label)
        self.steps += is_train
        return output if is_train and self.steps % 2 else output + self.odd(output)


def centred(groups, lr):
    return torch.optim.RMSprop(groups, lr, momentum=0.9, centered=True)


def rising(step):
    return (step + 1) / STEPS


CASES = {
    "nesterov, a frozen batch norm, clipped": {
        "optim.optimizer_arguments": {"nesterov": True}, "optim.freeze": ("type:BatchNorm2d",),
        "optim.l1_decay": 1e-4,
        "optim.groups": ({"pattern": "fc", "lr_factor": 0.5, "weight_decay": 0.0},),
        "optim.clip_norm": 0.5,
    },
    "adamw, half decayed, in micro-batches": {
        # The statistics of batch norms would depend on micro-batches.
        "optim.optimizer": "adamw", "optim.freeze": ("stem", "conv.1"),
        "optim.decay_norm_and_bias": False,
        "train.micro_batches": 2, "head.weight_decay": 0.1, "head.optimizer": "adamw",
    },
    "adafactor, dense": {
        "optim.optimizer": "adafactor", "head.loss_type": "arcface", "head.lr_factor": 0.5,
        "optim.schedule": "cosine", "optim.warmup_steps": 2, "optim.clip_norm": 0.0,
        "optim.optimizer_arguments": {"foreach": False},
    },
    "nadam, everything frozen but the rows": {"optim.optimizer": "nadam", "optim.freeze": ("*",)},
    "branches": {},
    "a factory": {
        "optim.optimizer": f"{__name__}:centred", "optim.optimizer_arguments": {"lr": 0.001},
        "optim.schedule": f"{__name__}:rising",
    },
}  # fmt: skip


def train_case(dataset: str, world: World, case: str) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "data.dataset_dir": dataset, "data.num_workers": 0, "model.image_shape": (3, 16, 16),
            "model.emb_size": 12, "model.sync_batch_norm": True, "optim.lr": 2.0 * 12 / 1024,
            "optim.warmup_steps": 0, "optim.clip_norm": 0.0, "optim.schedule": "constant", "head.scale": 16.0,
            "train.global_batch_size": 12, "train.steps": STEPS,
            "train.log_period": 1,
            "checkpoint.save_dir": world.broadcast_object(folder), **CASES[case],
        }  # fmt: skip
        options = Options()
        options.set_together(settings)
        config = options.resolve()
        torch.manual_seed(world.rank)  # all ranks get the network of rank 0
        rules = (Initialization("conv", "kaiming_normal", {}),) if "adamw" in case else ()
        network = Branches() if case == "branches" else Network()
        user = UserParts(network, optimizer=centred, schedule=rising, initializations=rules)
        run = build_run(config, world, user)
        directories = open_directories(config, world, open_start(config, world))
        Trainer(run, Saver(run, directories)).train()
        directories.release()
        world.barrier()
    found = {f"{case}: {key}": value for key, value in run.network.state_dict().items()}
    rows = [torch.from_numpy(part) for part in world.all_gather_object(run.head.weight.detach().numpy())]
    found[f"{case}: rows"] = torch.cat(rows) if run.head.is_sharded else rows[-1]
    return found


def train_all(dataset: str, world: World) -> dict[str, torch.Tensor]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        compute_in_float64(patch)
        for case in CASES:
            found |= train_case(dataset, world, case)
    return found


def main() -> None:
    dataset, output = sys.argv[1:]
    world = World.from_environment("cpu")
    found = train_all(dataset, world)
    if world.is_main:
        torch.save(found, f"{output}.pt")
    world.close()


if __name__ == "__main__":
    main()
