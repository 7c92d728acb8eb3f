"""Recomputed and compiled networks train as others do."""

import pytest
import torch
from torch import nn

from plsc.errors import OptionError
from plsc.models import BaseModel, build_model
from plsc.models.base_model import unwrap
from plsc.models.recomputation import CompiledNetwork, find_blocks, recompute_activations
from plsc.parallel.backbone import sum_gradients, use_sample_dropout
from plsc.parallel.world import World
from tests.devices import group_of_one

SHAPE = (3, 32, 32)


def kept_bytes(network, images):
    """The bytes that a forward pass leaves for the backward pass, but for the parameters."""
    own, found = {one.untyped_storage().data_ptr() for one in network.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage  # and no other one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        network(images)
    return sum(storage.nbytes() for place, storage in found.items() if place not in own)


class Concatenating(BaseModel):
    """A list that is called item by item, a cumulative batch norm, and an inner result that is used twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.block(3 + 2 * i) for i in range(3))
        self.fc = nn.Linear(9, 8)

    @staticmethod
    def block(inputs):
        block = nn.Module()
        block.conv = nn.Conv2d(inputs, 2, 3, padding=1)
        block.norm = nn.BatchNorm2d(2, momentum=None)
        block.drop = nn.Dropout(0.5)
        block.forward = lambda maps: block.drop(torch.tanh(block.norm(block.conv(maps))))
        return block

    def build_network(self, input, label, is_train=True):
        for block in self.blocks:
            input = torch.cat([input, block(input)], 1)
        return self.fc(input.mean((2, 3)))


def make(name):
    torch.manual_seed(3)
    if name == "own":
        return Concatenating()
    return build_model(name, 16, SHAPE, dropout=0.4)


def train(network, is_recomputed=False, steps=2, parts=2, dtype=None, layout=None):
    """Return the state after two steps of SGD, and the gradients."""
    samples = use_sample_dropout(network)
    if is_recomputed:
        recompute_activations(network)
    network.train()
    if layout is not None:
        network.to(memory_format=layout)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    left = []
    for step in range(steps):
        images = torch.randn(8, *SHAPE, generator=generator)
        if layout is not None:
            images = images.contiguous(memory_format=layout)
        optimizer.zero_grad()
        for part in range(parts):
            torch.manual_seed(step)
            samples.numbers = torch.arange(8).tensor_split(parts)[part]
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                output = network(images.tensor_split(parts)[part])
            samples.numbers = torch.arange(100, 108)  # as if the next batch had already started
            output.float().square().sum().backward()
        left += [p.grad.clone() for p in network.parameters() if p.grad is not None]
        optimizer.step()
    return left + [tensor.clone() for tensor in network.state_dict().values()]


def assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs) > 10
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["SmallResNet", "torchvision/mobilenet_v2", "own"])
def test_recomputation_gives_the_same_bits(name):
    assert_same_bits(train(make(name), True), train(make(name)))


def test_recomputation_with_autocast_and_channels_last_gives_the_same_bits():
    options = {"parts": 1, "dtype": torch.bfloat16, "layout": torch.channels_last}
    plain = train(make("SmallResNet"), **options)
    assert_same_bits(train(make("SmallResNet"), True, 2, **options), plain)


def test_recomputation_keeps_fewer_activations():
    network = make("ResNet18").train()
    images = torch.randn(4, *SHAPE)
    plain = kept_bytes(network, images)
    recompute_activations(network)
    assert kept_bytes(network, images) < 0.6 * plain
    unwrap(network)
    assert kept_bytes(network, images) == plain


def test_recomputation_does_not_change_frozen_layers_evaluation_and_parameter_names():
    network = make("SmallResNet")
    names = list(network.state_dict())
    for parameter in network.get_submodule("stages.0").parameters():
        parameter.requires_grad_(False)
    recompute_activations(network)
    assert list(network.state_dict()) == names
    network.train()
    network.get_submodule("stages.0").eval()
    statistics = network.get_submodule("stages.0.0.residual.1").running_mean.clone()
    network(torch.randn(4, *SHAPE)).sum().backward()
    assert network.get_submodule("stages.0.0.residual.1").running_mean.equal(statistics)
    assert network.get_submodule("stages.0.0.residual.0").weight.grad is None
    assert network.get_submodule("stages.1.0.residual.0").weight.grad is not None
    with torch.no_grad():
        network.eval()
        assert kept_bytes(network, torch.randn(4, *SHAPE)) == 0


def test_find_blocks_works_for_many_networks():
    wanted = {
        "ResNet18": (["stages.0.0", "stages.0.1"], 8),
        "torchvision/convnext_tiny": (["network.features.1.0", "network.features.1.1"], 18),
        "torchvision/efficientnet_b0": (["network.features.1.0", "network.features.2.0"], 16),
    }
    with torch.device("meta"):
        for name, (first, count) in wanted.items():
            blocks = find_blocks(build_model(name, 16))
            assert (blocks[:2], len(blocks)) == (first, count)


def test_a_network_without_blocks_is_refused():
    with torch.device("meta"):
        network = make("torchvision/vgg11")
    with pytest.raises(OptionError, match="no blocks"):
        recompute_activations(network)


def test_recomputation_restores_the_buffers_of_a_stateful_module():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            self.calls = self.calls + 1
            return self.fc(x) / self.calls

    found = []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(Counting(), nn.Linear(4, 4))
        if is_recomputed:
            recompute_activations(network)
        outputs = [network(torch.ones(2, 4)) for _ in range(2)]
        sum(outputs).square().sum().backward()
        assert network[0].calls == 2
        found.append([*outputs, *(p.grad for p in network.parameters())])
    assert_same_bits([*found[0], *found[0]], [*found[1], *found[1]])


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


@pytest.mark.slow
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


@pytest.mark.slow
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
