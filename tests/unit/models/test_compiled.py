"""A compiled network trains as the uncompiled one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plsc.models import BaseModel
from plsc.models.recomputation import CompiledNetwork
from plsc.models.sync_batch_norm import use_sample_dropout
from plsc.parallel.backbone import sum_gradients
from plsc.parallel.world import World
from tests.devices import group_of_one

pytestmark = pytest.mark.slow


class Tiny(BaseModel):
    """A convolution, batch norm, sample dropout and a linear layer; with `is_cut`, a graph break."""

    def __init__(self, is_cut: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_cut = is_cut
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.dropout, self.fc = nn.Dropout(0.5), nn.Linear(8, 4)

    def build_network(self, input, label, is_train=True):
        maps = self.norm(self.conv(input)).relu()
        if self.is_cut:
            torch._dynamo.graph_break()
        return self.fc(self.dropout(maps.mean((2, 3))))


def learn(network: nn.Module, forward: nn.Module, size: int) -> dict[str, torch.Tensor]:
    samples = use_sample_dropout(network)
    samples.numbers = torch.arange(size)
    torch.manual_seed(7)
    network.zero_grad()
    images = torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(size))
    output = forward(images, torch.zeros(size, dtype=torch.int64), True)
    output.square().sum().backward()
    found = {name: p.grad.clone() for name, p in network.named_parameters()}
    return {**found, "output": output.detach(), "mean": network.norm.running_mean.clone()}


def test_in_ddp_each_bucket_is_compiled_apart_so_that_its_sum_overlaps_the_backward_pass():
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    network = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])  # 1 MiB each
    with group_of_one("cpu") as group:
        world = World(0, 2, 0, torch.device("cpu"), backbone_group=group)
        forward = sum_gradients(CompiledNetwork(network, {4}, backend=backend), world, bucket_mb=2.0)
        forward(torch.randn(4, 512)).sum().backward()
    assert len(graphs) >= 4


@pytest.mark.parametrize("is_cut", [False, True])
def test_compiled_steps_equal_uncompiled_ones_and_other_sizes_are_not_compiled(is_cut):
    """With inductor: tests/unit/train/test_acceleration.py."""
    plain, network = Tiny(is_cut), Tiny(is_cut)
    compiled = CompiledNetwork(network, {6}, backend="aot_eager")
    assert set(network.state_dict()) == set(plain.state_dict())
    assert len(list(compiled.parameters())) == len(list(plain.parameters()))
    for size in (6, 6, 5):
        found, expected = learn(network, compiled, size), learn(plain, plain, size)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    network.eval()
    images = torch.randn(6, 3, 8, 8)
    assert torch.equal(compiled(images, None, False), network(images, None, False))
