"""The dtypes in which modules and operators compute."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plsc import AutoMixedPrecisionLists
from plsc.errors import OptionError
from plsc.models.precision import OPERATORS, OperatorPrecision, PrecisionLists, apply_lists, autocast
from plsc.models.resnet import SmallResNet

CPU = torch.device("cpu")
WATCHED = ("stem.0", "stem.1", "stem.2", "neck.fc", "neck.norm_out")
BFLOAT16 = dict.fromkeys(WATCHED, torch.bfloat16)
NORMED = dict.fromkeys(("stem.1", "stem.2"), torch.float32)  # PReLU keeps the dtype of its input
FLOAT32 = dict.fromkeys(WATCHED, torch.float32)


def network(white=(), black=()):
    torch.manual_seed(0)
    net = SmallResNet(16, (3, 16, 16), dropout=0.0)
    apply_lists(net, PrecisionLists.resolve(net, white, black), "bfloat16", CPU)
    return net


def types_in(net, mode="bfloat16"):
    """Return the dtype in which each observed module computes: a convolution's product, a norm's output."""
    seen = {}
    for name, module in net.named_modules():
        if name in WATCHED:
            module.register_forward_hook(
                lambda _, inputs, output, name=name: seen.update({name: output.dtype})
            )
    with autocast(mode, CPU):
        output = net(torch.randn(2, 3, 16, 16))
    output.sum().backward()
    assert all(p.dtype is p.grad.dtype is torch.float32 for p in net.parameters())
    return seen


@pytest.mark.parametrize(
    ("white", "black", "changed"),
    [
        ((), (), {}),
        ((), ("BatchNorm2d",), NORMED),
        (("prelu",), ("BatchNorm2d",), {"stem.1": torch.float32}),
        ((), ("batch_norm",), NORMED | {"neck.norm_out": torch.float32}),
        ((), ("neck.f*",), {"neck.fc": torch.float32, "neck.norm_out": torch.float32}),
        ((), ("SmallResNet",), FLOAT32),
    ],
)
def test_modules_and_operators_compute_in_the_dtype_of_their_list(white, black, changed):
    net = network(white, black)
    assert types_in(copy.deepcopy(net)) == BFLOAT16 | changed
    if changed:
        assert types_in(net, "float32") == FLOAT32  # without autocast the lists have no effect
    assert list(net.state_dict()) == list(SmallResNet(16, (3, 16, 16)).state_dict())


@pytest.mark.parametrize("white", ["neck.fc", "linear"])
def test_a_16_bit_submodule_of_a_float32_module_returns_float32(white):
    images, outputs = torch.randn(4, 3, 16, 16), []
    for net in (network([white], ["SmallResNet"]), network()):
        seen = []
        net.neck.fc.register_forward_hook(lambda *call, seen=seen: seen.append(call[1:]))
        with autocast("bfloat16" if not outputs else "float32", CPU):
            net(images)
        ((inputs,), output) = seen[0]
        assert output.dtype is torch.float32
        outputs.append((inputs, output))
    (inputs, output), (plain_inputs, plain) = outputs
    assert torch.equal(inputs, plain_inputs)  # everything before it is float32
    assert not torch.equal(output, plain)
    weight, bias = net.neck.fc.weight.bfloat16(), net.neck.fc.bias.bfloat16()
    assert torch.equal(output, F.linear(inputs.bfloat16(), weight, bias).float())


MATRIX = torch.randn(8, 8)
KERNELS = {n: torch.randn(3, 3, *[3] * n) for n in (1, 2, 3)}
CALLS = {
    **{
        f"{name}{n}d": lambda x, name=name, n=n: getattr(F, f"{name}{n}d")(x, KERNELS[n].to(x.dtype))
        for name in ("conv", "conv_transpose") for n in (1, 2, 3)
    },
    "linear": lambda x: F.linear(x, MATRIX),
    "matmul": lambda x: x @ MATRIX,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "batch_norm": nn.BatchNorm2d(3),
    "layer_norm": nn.LayerNorm(8),
    "group_norm": nn.GroupNorm(3, 3),
    "instance_norm": nn.InstanceNorm2d(3),
    "normalize": F.normalize,
    "softmax": lambda x: x.softmax(1),
    "log_softmax": nn.LogSoftmax(1),
    "prelu": nn.PReLU(),
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": nn.Tanh(),
    "exp": torch.exp,
    "log": lambda x: x.abs().log(),
    "pow": lambda x: x**2,
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean((2, 3)),
    "add": lambda x: x + x,
    "mul": lambda x: x * 2,
    "avg_pool2d": nn.AvgPool2d(2),
    "adaptive_avg_pool2d": nn.AdaptiveAvgPool2d(1),
    "max_pool2d": nn.MaxPool2d(2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
}  # fmt: skip


def test_every_operator_follows_the_lists_for_every_way_to_call_it():
    assert CALLS.keys() == OPERATORS.keys()
    for name, call in CALLS.items():
        size = {"1d": (2, 3, 8), "3d": (1, 3, 8, 8, 8)}.get(name[-2:], (1, 3, 8, 8))
        x = torch.randn(size)
        for white, black, given in (((name,), (), torch.float32), ((), (name,), torch.bfloat16)):
            with autocast("bfloat16", CPU), OperatorPrecision(white, black, torch.bfloat16, "cpu"):
                output = call(x.to(given))
            wanted = torch.bfloat16 if white else torch.float32
            assert output.dtype is wanted, (name, output.dtype, wanted)


@pytest.mark.parametrize("name", ["linear", "matmul", "attention", "softmax"])
def test_torch_attention_follows_the_lists_of_its_operators(name):
    network = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), nn.Tanh())
    attention, x = network[0].self_attn, torch.randn(2, 5, 8)
    exact = attention(x, x, x, need_weights=False)[0]
    lists = PrecisionLists.resolve(network, ["softmax" if name == "linear" else "linear"], [name])
    apply_lists(network, lists, "bfloat16", CPU)
    found = []
    attention.register_forward_hook(lambda layer, inputs, output: found.append(output[0]))
    with autocast("bfloat16", CPU):
        network(x)
    (output,) = found
    assert output.dtype is torch.float32
    assert torch.equal(output, exact)


@pytest.mark.parametrize(
    ("white", "black", "noun"),
    [
        (["neck.fcc"], [], "white_list has 'neck.fcc'.*did you mean 'neck.fc'"),
        ([], ["conv2"], "did you mean 'conv2d'"),
        (["neck.*"], ["neck.fc"], "both lists"),
    ],
)
def test_names_that_match_nothing_or_both_lists_raise(white, black, noun):
    with pytest.raises(OptionError, match=noun):
        network(white, black)


def test_lists_are_strings_in_any_collection_that_do_not_overlap():
    for wrong in ("BatchNorm2d", [1]):
        with pytest.raises(OptionError, match="white_list"):
            AutoMixedPrecisionLists(wrong)
    lists = AutoMixedPrecisionLists({"softmax"}, ("BatchNorm2d",))
    assert (lists.custom_white_list, lists.custom_black_list) == (("softmax",), ("BatchNorm2d",))
    with pytest.raises(OptionError, match="softmax"):
        AutoMixedPrecisionLists(["softmax"], ["softmax"])
