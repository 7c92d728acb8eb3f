"""Batch norm folding gives the same embeddings and does not change the network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plsc.models import BaseModel, build_model
from plsc.models.base_model import use_channels_last
from plsc.models.folding import FoldedNetwork, fold_batch_norm

SHAPE = (3, 16, 16)


def trained(network: BaseModel) -> BaseModel:
    """Give the batch norms statistics and scales that differ from the initial ones."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for _ in range(3):
            network.train()(torch.randn(8, *SHAPE))
    return network


def norms(network: nn.Module) -> int:
    return sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())


@pytest.mark.parametrize(
    ("name", "left"),
    [("SmallResNet", 1), ("ResNet18", 9), ("IResNet18", 9)],  # batch norms before a convolution remain
)
@pytest.mark.parametrize("is_channels_last", [False, True])
def test_folding_gives_the_same_embeddings_and_does_not_change_the_network(name, left, is_channels_last):
    network = trained(build_model(name, 16, SHAPE, dropout=0.3))
    if is_channels_last:
        use_channels_last(network)
    frozen = next(module for module in network.modules() if isinstance(module, nn.BatchNorm2d))
    frozen.eval()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    folded = fold_batch_norm(network, SHAPE)

    assert isinstance(folded, FoldedNetwork)
    assert sum("BatchNorm" in str(node.target) for node in folded.traced.graph.nodes) == 0
    calls = [node for node in folded.traced.graph.nodes if node.op == "call_module"]
    kinds = [folded.traced.get_submodule(str(node.target)) for node in calls]
    assert sum(isinstance(kind, nn.modules.batchnorm._BatchNorm) for kind in kinds) == left
    assert network.training
    assert not frozen.training
    assert {id(p) for p in network.parameters() if not p.requires_grad} <= {
        id(p) for p in network.parameters() if name == "IResNet18"
    }
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key]), key
    folded.train()
    assert not folded.training
    images = torch.randn(4, *SHAPE)
    with torch.no_grad():
        found = folded(images)  # while the network is in training mode
        assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
        assert network.training
        expected = network.eval()(images)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


class Odd(BaseModel):
    """Cases that cannot be folded: output used twice, layer called twice, hooks, or another order."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, track_running_stats=kind != "no statistics")
        if kind == "hook":
            self.conv.register_forward_hook(lambda module, inputs, output: output * 2)

    def build_network(self, input, label, is_train=True):
        maps = self.conv(input)
        if self.kind == "read twice":
            maps = self.norm(maps) + maps
        elif self.kind == "called twice":
            maps = self.norm(maps) + self.norm(self.conv(input * 2))
        elif self.kind == "branch" and bool(maps.sum() > 0):
            maps = self.norm(maps)
        else:
            maps = self.norm(maps)
        return maps.mean((2, 3))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("read twice", "no batch norm"),
        ("called twice", "no batch norm"),
        ("hook", "no batch norm"),
        ("no statistics", "no batch norm"),
        ("branch", "cannot trace it"),
    ],
)
def test_networks_that_cannot_be_folded_give_a_reason(kind, reason):
    assert reason in fold_batch_norm(Odd(kind), SHAPE)


def test_a_network_that_behaves_differently_when_traced_is_detected():
    class Changing(Odd):
        calls = 0

        def build_network(self, input, label, is_train=True):
            type(self).calls += 1  # torch.fx makes this a constant
            return self.norm(self.conv(input)).mean((2, 3)) * float(self.calls)

    assert "differ by" in fold_batch_norm(Changing("plain"), SHAPE)
