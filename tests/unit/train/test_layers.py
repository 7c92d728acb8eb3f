"""The table of the layers in the first batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plsc.errors import OptionError
from plsc.models import BaseModel
from plsc.parallel.world import World
from plsc.train.callbacks import FunctionCallback, UserParts
from tests.images import write_dataset
from tests.resuming import options_of, train

WORLD = World.single()


class Known(BaseModel):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 4, stride=4), nn.ReLU())
        self.unused = nn.Linear(2, 2)
        self.fc = nn.Linear(6 * 4 * 4, 8)
        self.scale = nn.Parameter(torch.tensor([1.0, 3.0]))
        nn.init.constant_(self.fc.weight, 0.0)
        nn.init.constant_(self.fc.bias, 0.5)

    def build_network(self, input, label, is_train=True):
        return self.fc(self.body(input).flatten(1)) * self.scale[0]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=6, per_class=2)


def table(dataset, folder, capsys, **settings):
    """Return title and rows of the table, and the number of hooks at after_backward in each step."""
    hooks = []

    def count(context):
        hooks.append(sum(len(module._forward_hooks) for module in context.network.modules()))

    options = options_of(dataset, folder, train__batch_size=6, **settings)
    user = UserParts(callbacks=(FunctionCallback(count, "after_backward", 1, ()),))
    train(options, WORLD, Known, user)
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("layers in the first batch"))
    stop = next(index for index, line in enumerate(lines) if index > start and line.startswith("epoch 1"))
    assert sum("layers in the first batch" in line for line in lines) == 1
    return lines[start], [line.split("  ") for line in lines[start + 1 : stop]], hooks


def cells(rows):
    return [[cell.strip() for cell in row if cell.strip()] for row in rows]


def test_shapes_of_a_known_network(dataset, tmp_path, capsys):
    title, rows, hooks = table(
        dataset, tmp_path / "run", capsys, train__callbacks="check_shape", train__micro_batches=2
    )
    assert title == "layers in the first batch: 6 images of rank 0, micro-batch 1 of 2"
    assert cells(rows) == [
        ["layer", "kind", "parameters", "output"],
        ["(network)", "Known", "scale [2]", "[3, 8]"],
        ["body.0", "Conv2d", "weight [6, 3, 4, 4], bias [6]", "[3, 6, 4, 4]"],
        ["body.1", "ReLU", "-", "[3, 6, 4, 4]"],
        ["unused", "Linear", "weight [2, 2], bias [2]", "-"],
        ["fc", "Linear", "weight [8, 96], bias [8]", "[3, 8]"],
    ]
    assert hooks == [0] * 4


def test_values_of_a_known_network(dataset, tmp_path, capsys):
    _, rows, _ = table(dataset, tmp_path / "run", capsys, train__callbacks="check_content")
    rows = cells(rows)
    head = ["layer", "kind", "parameters", "output", "mean", "std", "zeros", "nan or inf", "first values"]
    assert rows[0] == head
    assert ["scale", "[2]", "2", "1", "0.00%", "0.00%", "1, 3"] in rows
    assert ["weight", "[8, 96]", "0", "0", "100.00%", "0.00%", "0, 0, 0"] in rows
    fc = next(row for row in rows if row[0] == "fc")
    assert fc[3:] == ["[6, 8]", "0.5", "0", "0.00%", "0.00%", "0.5, 0.5, 0.5"]


def test_a_compiled_network_is_refused(dataset, tmp_path):
    options = options_of(dataset, tmp_path, train__callbacks="check_shape", speed__compile=True)
    with pytest.raises(OptionError, match=r"speed\.compile cannot be used with train\.callbacks check_shape"):
        train(options, WORLD, Known)
