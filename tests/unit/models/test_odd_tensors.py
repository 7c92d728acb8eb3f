"""Networks with unusual tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plsc.models import BaseModel
from plsc.parallel.world import World
from tests.images import write_dataset
from tests.resuming import options_of, train

WORLD = World.single()


class Odd(BaseModel):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 4, stride=4)
        if kind == "integer":  # direct parameters of a module come first
            self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        if kind == "expanded":
            self.register_buffer("ones", torch.ones(1).expand(8))
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6 * 4 * 4, 8)

    def build_network(self, input, label, is_train=True):
        return self.fc(self.norm(self.conv(input)).flatten(1))


def losses(dataset, folder, kind, **changes):
    options = options_of(
        dataset,
        folder,
        train__epochs=1,
        train__batch_size=6,
        checkpoint__every_n_steps=1,
        **changes,
    )
    return train(options, WORLD, lambda: Odd(kind)).metrics["loss"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=6, per_class=3)


@pytest.mark.parametrize("kind", ["integer", "expanded"])
def test_unusual_tensors_do_not_change_training_saving_and_resuming(kind, dataset, tmp_path):
    plain = losses(dataset, tmp_path / "plain", "plain")
    assert losses(dataset, tmp_path / kind, kind) == plain
    again = losses(dataset, tmp_path / "again", kind, checkpoint__load_dir=str(tmp_path / kind / "0-step1"))
    assert again == plain
