"""Mixed precision: the dtypes in which operators compute, and the loss scale."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plsc import AutoMixedPrecisionLists
from plsc.errors import OptionError
from plsc.models.precision import (
    HIGHEST_SCALE,
    MOST_SKIPS,
    OPERATORS,
    LossScaler,
    OperatorPrecision,
    apply_lists,
    scale_gradient,
    unscale,
)
from plsc.models.resnet import SmallResNet

CPU = torch.device("cpu")
WATCHED = ("stem.0", "stem.1", "stem.2", "neck.fc", "neck.norm_out")
BFLOAT16 = dict.fromkeys(WATCHED, torch.bfloat16)
NORMED = dict.fromkeys(("stem.1", "stem.2"), torch.float32)  # PReLU keeps the dtype of its input
FLOAT32 = dict.fromkeys(WATCHED, torch.float32)


def network(white=(), black=()):
    torch.manual_seed(0)
    net = SmallResNet(16, (3, 16, 16), dropout=0.0)
    apply_lists(net, white, black, "bfloat16", CPU)
    return net


def types_in(net, mode="bfloat16"):
    """Return the dtype in which each observed module computes: a convolution's product, a norm's output."""
    seen = {}
    for name, module in net.named_modules():
        if name in WATCHED:
            module.register_forward_hook(
                lambda _, inputs, output, name=name: seen.update({name: output.dtype})
            )
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "bfloat16"):
        output = net(torch.randn(2, 3, 16, 16))
    output.sum().backward()
    assert all(p.dtype is p.grad.dtype is torch.float32 for p in net.parameters())
    return seen


@pytest.mark.parametrize(
    ("white", "black", "changed"),
    [
        ((), (), {}),
        (("prelu",), ("batch_norm",), {"stem.1": torch.float32, "neck.norm_out": torch.float32}),
        ((), ("batch_norm",), NORMED | {"neck.norm_out": torch.float32}),
        ((), ("linear",), {"neck.fc": torch.float32, "neck.norm_out": torch.float32}),
    ],
)
def test_operators_compute_in_the_dtype_of_their_list(white, black, changed):
    net = network(white, black)
    assert types_in(copy.deepcopy(net)) == BFLOAT16 | changed
    if changed:
        assert types_in(net, "float32") == FLOAT32  # without autocast the lists have no effect
    assert list(net.state_dict()) == list(SmallResNet(16, (3, 16, 16)).state_dict())


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
        for white, black, dtype in (((name,), (), torch.float32), ((), (name,), torch.bfloat16)):
            with (
                torch.autocast("cpu", torch.bfloat16),
                OperatorPrecision(white, black, torch.bfloat16, "cpu"),
            ):
                output = call(x.to(dtype))
            wanted = torch.bfloat16 if white else torch.float32
            assert output.dtype is wanted, (name, output.dtype, wanted)


@pytest.mark.parametrize("name", ["linear", "matmul", "attention", "softmax"])
def test_torch_attention_follows_the_lists_of_its_operators(name):
    network = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), nn.Tanh())
    attention, x = network[0].self_attn, torch.randn(2, 5, 8)
    exact = attention(x, x, x, need_weights=False)[0]
    apply_lists(network, ["softmax" if name == "linear" else "linear"], [name], "bfloat16", CPU)
    found = []
    attention.register_forward_hook(lambda layer, inputs, output: found.append(output[0]))
    with torch.autocast("cpu", torch.bfloat16):
        network(x)
    (output,) = found
    assert output.dtype is torch.float32
    assert torch.equal(output, exact)


def test_lists_are_strings_in_any_collection_that_do_not_overlap():
    for wrong in ("softmax", [1], ["conv2"]):
        with pytest.raises(OptionError, match="white_list"):
            AutoMixedPrecisionLists(wrong)
    lists = AutoMixedPrecisionLists({"softmax"}, ("batch_norm",))
    assert (lists.custom_white_list, lists.custom_black_list) == (("softmax",), ("batch_norm",))
    with pytest.raises(OptionError, match="softmax"):
        AutoMixedPrecisionLists(["softmax"], ["softmax"])


SMALL = {"incr_every": 3, "decr_every": 2}


def run(scaler, script):
    """Return the scale after each step of a script: ``x`` overflows, ``.`` does not."""
    scales = []
    for letter in script:
        scaler.update(letter == "x")
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(
    ("script", "settings", "scales"),
    [
        ("......", {}, [8, 8, 16, 16, 16, 32]),
        ("..x...", {}, [8, 8, 8, 8, 8, 16]),  # an overflow restarts the count
        ("x.x.xx", {}, [8, 8, 8, 8, 8, 4]),  # and so does a finite step
        ("xxxxxxxx", {}, [8, 4, 4, 2, 2, 1, 1, 1]),
        ("xx", {"scale": 1.5}, [1.5, 1]),
        ("...", {"scale": HIGHEST_SCALE / 1.5}, [HIGHEST_SCALE / 1.5] * 2 + [HIGHEST_SCALE]),
        ("...xx", {"incr_ratio": 1.5, "decr_ratio": 0.25}, [8, 8, 12, 12, 3]),
        ("...xxx", {"is_dynamic": False}, [8] * 6),
        (".x", {"incr_every": 1, "decr_every": 1}, [16, 8]),
    ],
)
def test_the_scale_changes_as_in_the_table(script, settings, scales):
    scaler = LossScaler(**{"scale": 8.0, **SMALL, **settings})
    assert run(scaler, script) == scales
    assert scaler.skipped == script.count("x")


@given(st.text(".x", max_size=30), st.text(".x", max_size=30), st.booleans())
def test_a_scaler_resumes_from_its_state(before, after, is_dynamic):
    whole, first, second = (LossScaler(8.0, 3, 2, is_dynamic=is_dynamic) for _ in range(3))
    run(whole, before + after)
    run(first, before)
    second.load(first.state())
    run(second, after)
    assert second == whole


def test_a_scaler_can_resume_with_shorter_periods():
    scaler = LossScaler(8.0, incr_every=2)
    scaler.load({"scale": 64.0, "finite": 1999, "overflowed": 0, "skipped": 0, "stuck": 0})
    assert run(scaler, "...") == [128, 128, 256]


@pytest.mark.parametrize("settings", [{"scale": 1.0}, {"scale": 64.0, "is_dynamic": False}])
def test_repeated_overflows_are_hopeless_once_the_scale_cannot_decrease(settings):
    scaler = LossScaler(**settings)
    run(scaler, "x" * (MOST_SKIPS - 1))
    assert not scaler.is_hopeless
    run(scaler, ".")
    run(scaler, "x" * (MOST_SKIPS - 1))
    assert not scaler.is_hopeless
    run(scaler, "x")
    assert scaler.is_hopeless


def test_only_the_gradient_of_the_embeddings_is_scaled_before_rounding():
    embeddings = torch.full((2, 3), 0.5, dtype=torch.float16, requires_grad=True)
    scaled = scale_gradient(embeddings, 1024.0)
    assert scaled.dtype is torch.float32
    assert torch.equal(scaled, embeddings.detach().float())
    tiny = 2.0**-30  # the smallest float16 is 2^-24
    (scaled * tiny).sum().backward()
    assert torch.equal(embeddings.grad, torch.full_like(embeddings, 2.0**-20))
    plain = embeddings.detach().requires_grad_()
    (scale_gradient(plain, 1.0) * tiny).sum().backward()
    assert not plain.grad.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_unscale_supports_dense_sparse_and_distributed_gradients(bad):
    dense, empty = torch.full((2, 2), 8.0), torch.zeros(0)
    double = torch.full((3,), 16.0, dtype=torch.float64)
    indices = torch.tensor([[0, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([8.0, 8.0]), (4,), check_invariants=True)
    for wrong in (dense, double, sparse._values()):
        before = wrong[-1].clone()
        if bad is not None:
            wrong[-1] = bad
        assert bool(unscale([dense, empty, double, sparse], 4.0)) == (bad is not None)
        wrong[-1] = before / 4
    assert dense.tolist() == [[8 / 4**3] * 2] * 2
    assert sparse._values().tolist() == [8 / 4**3] * 2
    assert not unscale([], 2.0)
