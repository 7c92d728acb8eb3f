"""How a network is split over the ranks: its units, its way to the device, its optimizers; and class rows."""

from __future__ import annotations

import copy
import datetime

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from plsc.config.optim import OPTIMIZERS, OptimOptions
from plsc.errors import OptionError
from plsc.models import BaseModel, build_model
from plsc.models.dry_run import count_calls
from plsc.models.sync_batch_norm import synchronise_batch_norm
from plsc.optim.optimizers import build_optimizer
from plsc.parallel import backbone
from plsc.parallel.backbone import choose_units, local_part, match_units, shard_network
from plsc.parallel.collectives import class_ranges
from plsc.parallel.world import World
from plsc.train.network import build_trained_network
from tests.devices import GPU, group_of_one
from tests.option_pairs import options_with

BLOCKS, WIDTH = 6, 32


@pytest.fixture
def group():
    """That of the first of four ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_unit_is_split_before_the_next_one_comes_to_the_device(group, monkeypatch):
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(BLOCKS)]
    network = nn.Sequential(nn.Linear(4, WIDTH), *blocks)
    originals = list(network.parameters())
    sizes = {p.data_ptr(): p.numel() for p in originals}
    buffers = list(network.buffers())
    come: list[int] = []  # what is broadcast is on the device, where it is
    most = 0

    def note(tensor: torch.Tensor, **_: object) -> None:
        nonlocal most
        come.append(tensor.data_ptr())
        plain = (p for p in network.parameters() if not isinstance(p, DTensor))
        most = max(most, sum(p.numel() for p in plain if p.data_ptr() in come))

    monkeypatch.setattr(dist, "broadcast", note)
    world = World(0, 4, 0, torch.device("cpu"), backbone_group=group)
    units = [str(number + 1) for number in range(BLOCKS)]
    shard_network(network, units, world, 4, datetime.timedelta(seconds=10))
    # Each once; buffers stay whole, and come with their units.
    assert sorted(come) == sorted([*sizes, *(buffer.data_ptr() for buffer in buffers)])
    assert most == WIDTH * WIDTH + 3 * WIDTH  # a block
    assert all(buffer is same for buffer, same in zip(network.buffers(), buffers, strict=True))
    here = sum(local_part(p).numel() for p in network.parameters())
    assert here * 4 == sum(sizes.values())
    assert not any(p.numel() for p in originals)  # whoever holds them, holds no memory


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_network_in_a_single_shard_has_the_gradients_of_the_whole_one(device):
    whole = nn.Sequential(nn.Linear(4, WIDTH), nn.PReLU(), nn.Linear(WIDTH, 3)).to(device)
    network = copy.deepcopy(whole).cpu()
    x = torch.randn(5, 4).to(device)
    with group_of_one(device) as group:
        world = World(0, 1, 0, x.device, backbone_group=group)
        shard_network(network, ["0", "2"], world, 1, datetime.timedelta(seconds=60))
        for one in (network, whole):
            one(x).square().sum().backward()
        for mine, right in zip(network.parameters(), whole.parameters(), strict=True):
            assert local_part(mine).device == right.device
            torch.testing.assert_close(local_part(mine.grad), right.grad)


def test_what_will_be_split_is_made_on_the_cpu_and_everything_else_on_its_device():
    device = torch.device("meta")  # stands for a GPU
    sharded = {"parallel.backbone": "sharded"}
    for values, ranks, expected in (
        ({}, 4, "meta"),
        (sharded, 4, "cpu"),
        (sharded, 1, "meta"),
        (sharded | {"parallel.shard_size": 1}, 4, "meta"),
    ):
        options = options_with(values)
        network, *_ = build_trained_network(options, World(0, ranks, 0, device), None)
        assert {t.device.type for t in (*network.parameters(), *network.buffers())} == {expected}


def test_batch_norms_over_the_ranks_are_those_of_the_device_they_go_to(group):
    for device in ("cuda", "cpu"):
        network = nn.Sequential(nn.BatchNorm2d(3))
        synchronise_batch_norm(network, group, torch.device(device))
        assert isinstance(network[0], nn.SyncBatchNorm) == (device == "cuda")
        assert type(network[0]) is not nn.BatchNorm2d
        network.eval()(torch.zeros(2, 3, 4, 4))  # the trial runs where the network is: on the CPU


def sharded_groups(group) -> list[dict]:
    network = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    world = World(0, 4, 0, torch.device("cpu"), backbone_group=group)
    shard_network(network, ["0"], world, 4, datetime.timedelta(seconds=10))
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    whole = nn.Parameter(torch.ones(2, 3))  # a dense head's
    whole.grad = torch.ones_like(whole)
    return [{"params": list(network.parameters())}, {"params": [whole]}]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_updates_a_sharded_backbone_or_is_refused(group, name):
    made = []
    for implementation in ("auto", "for_loop", "foreach", "fused"):
        options = OptimOptions(optimizer=name, implementation=implementation)
        groups = sharded_groups(group)
        before = [p.detach().clone() for one in groups for p in one["params"]]
        try:
            optimizer = build_optimizer(options, groups, 0.1, torch.device("cpu"))
            for _ in range(2):
                optimizer.step()
        except (
            OptionError,
            NotImplementedError,
        ):  # of torch at the first step, which a run explains
            continue
        after = [p for one in groups for p in one["params"]]
        assert not any(local_part(a).equal(local_part(b)) for a, b in zip(after, before, strict=True))
        made.append(implementation)
    assert made[:2] == ["auto", "for_loop"] or name == "adafactor"
    assert ("fused" in made) == (name in ("adam", "adamw"))


@given(st.integers(0, 500), st.integers(1, 40))
def test_ranges_cover_every_class_once_in_order(classes, ranks):
    ranges = class_ranges(classes, ranks)
    assert len(ranges) == ranks
    assert [c for start, stop in ranges for c in range(start, stop)] == list(range(classes))


@given(st.integers(1, 500), st.integers(1, 40))
def test_ranges_are_those_of_torch_chunk_which_dtensor_shards_by(classes, ranks):
    chunks = torch.arange(classes).chunk(ranks)
    filled = [pair for pair in class_ranges(classes, ranks) if pair[0] < pair[1]]
    assert filled == [(int(chunk[0]), int(chunk[-1]) + 1) for chunk in chunks]


SHAPE = (3, 32, 32)


def choose(network):
    return choose_units(network, count_calls(network, SHAPE))


def match(network, *patterns):
    return match_units(network, patterns, count_calls(network, SHAPE))


class Layer(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 2)
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return self.linear(self.attention(x, x, x)[0])


class Network(BaseModel):
    """Layers in a list, and an embedding layer beside it."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, stride=8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.fc = nn.Linear(8, 4)
        self.for_later = nn.Linear(8, 4)

    def build_network(self, input, label, is_train=True):
        x = self.patches(input).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.fc(x.mean(1))


@pytest.fixture
def small(monkeypatch):
    """Units of a few parameters."""
    monkeypatch.setattr(backbone, "LEAST_BLOCK", 10)
    monkeypatch.setattr(backbone, "LEAST_OTHER", 10)


def test_a_residual_network_is_split_into_its_large_blocks_and_its_embedding_layer():
    network = build_model("ResNet50", 512, (3, 32, 32), dropout=0.4)
    found = choose(network)
    assert found[0] == "stages.1.0", "the blocks of the first stage are small"
    assert len(found) == 4 + 14 + 3 + 1
    assert found[-1].startswith("neck")


def test_blocks_are_units_and_so_are_other_layers_that_run(small):
    # Attention uses its last layer's weight without calling it; one layer is not used at all.
    assert choose(Network()) == ["patches", "layers.0", "layers.1", "layers.2", "fc"]


def test_a_module_that_runs_twice_is_no_unit(small):
    network = Network()
    network.layers[2] = network.layers[0]
    assert choose(network) == ["patches", "layers.1", "fc"]


def test_modules_with_a_parameter_in_common_are_no_units(small):
    network = Network()
    network.layers[2].linear.weight = network.layers[0].linear.weight
    assert choose(network) == ["patches", "layers.1", "fc"]


def test_patterns_name_units_by_component(small):
    assert match(Network(), "layers.*") == ["layers.0", "layers.1", "layers.2"]
    assert match(Network(), "fc", "layers.[12]") == ["fc", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("layer.*", "no module with parameters is named 'layer.*'; did you mean 'layers"),
        ("*.out_proj", "no module with parameters is named"),
        ("layers.*.attention.out_proj", "is called 0 times"),
        ("layers", "layers is called 0 times"),
        ("for_later", "for_later is called 0 times"),
    ],
)
def test_a_pattern_that_gives_no_unit_is_refused(pattern, said):
    with pytest.raises(OptionError) as caught:
        match(Network(), pattern)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_patterns_that_part_tied_weights_are_refused():
    network = Network()
    network.layers[2].linear.weight = network.layers[0].linear.weight
    with pytest.raises(OptionError, match=r"layers\.0, layers\.2 have a parameter that is used"):
        match(network, "layers.*")
