"""`PReLU` and `Conv2d` give the results of torch's layers."""

import pytest
import torch
from torch import nn

from plsc.models.precision import apply_lists
from plsc.models.resnet import Conv2d, PReLU


def gradients_for(layer: nn.Module, x: torch.Tensor, g: torch.Tensor):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("slopes", "dtype", "tolerance"),
    [(1, torch.float32, 1e-5), (6, torch.float32, 1e-5), (6, torch.float64, 1e-12)],
)
def test_prelu_output_and_gradients_equal_torch(slopes, dtype, tolerance, layout):
    torch.manual_seed(0)
    ours, theirs = PReLU(slopes, init=-0.3).to(dtype), nn.PReLU(slopes, init=-0.3).to(dtype)
    x = torch.randn(4, 6, 5, 3, dtype=dtype).contiguous(memory_format=layout)
    x[0, 0, 0] = 0
    g = torch.randn_like(x)
    mine, expected = gradients_for(ours, x, g), gradients_for(theirs, x, g)
    for one, other in zip(mine, expected, strict=True):
        assert one.dtype == other.dtype == dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert mine[0].is_contiguous(memory_format=layout)
    assert mine[1].is_contiguous(memory_format=layout)


def test_the_slope_gradient_of_16_bit_features_is_float32():
    torch.manual_seed(0)
    x = torch.randn(64, 64, 8, 8)
    g = torch.randn_like(x)
    exact = gradients_for(nn.PReLU().double(), x.bfloat16().double(), g.bfloat16().double())[2]
    layer = PReLU()  # float32, as under autocast
    found = gradients_for(layer, x.bfloat16(), g.bfloat16())
    assert [value.dtype for value in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    scale = (x * g).abs().sum()
    assert abs(found[2].item() - exact.item()) < 1e-4 * scale


def test_a_frozen_slope_has_no_gradient_and_nan_propagates():
    layer = PReLU()
    layer.weight.requires_grad_(False)
    x = torch.tensor([float("nan"), -float("inf"), 2.0], requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert layer.weight.grad is None
    assert torch.isnan(y[0])
    assert y[1] == -float("inf")
    assert x.grad.tolist()[1:] == [0.25, 1.0]


LAYERS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": (3, 1), "padding": (2, 0), "stride": (1, 3)},
    {"kernel_size": (2, 5), "padding": (0, 2), "stride": (3, 1)},
]


def gradients(layer: nn.Module, x: torch.Tensor):
    layer.zero_grad()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=layer.weight.dtype == torch.float32):
        y = layer(x)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y.dtype))
    return y, x.grad, layer.weight.grad


def alike(layer: Conv2d) -> nn.Conv2d:
    sizes = layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding
    plain = nn.Conv2d(*sizes, bias=False)
    plain.load_state_dict(layer.state_dict())
    return plain


def is_ours(y: torch.Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_SmallMapConvolutionBackward"


@pytest.mark.parametrize(
    ("layout", "with_autocast"), [(torch.contiguous_format, False), (torch.channels_last, True)]
)
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_the_weight_gradient_equals_torch_and_all_else_is_bit_identical(options, layout, with_autocast):
    torch.manual_seed(0)
    layer = Conv2d(6, 10, bias=False, **options).to(memory_format=layout)
    x = torch.randn(5, 6, 6, 7).bfloat16().float().contiguous(memory_format=layout)
    layer.weight.data = layer.weight.data.bfloat16().float()
    exact = gradients(alike(layer).double(), x.double())[2]
    plain = alike(layer).to(memory_format=layout)
    if not with_autocast:
        layer, plain, x = layer.bfloat16(), plain.bfloat16(), x.bfloat16()
    mine, theirs = gradients(layer, x), gradients(plain, x)
    assert is_ours(mine[0])
    assert not is_ours(theirs[0])
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
    assert mine[1].dtype == x.dtype
    assert mine[2].dtype == layer.weight.dtype
    assert mine[2].shape == layer.weight.shape
    # bfloat16 products are summed in float32 and rounded once
    assert (mine[2].double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_large_maps_and_all_other_cases_use_torch():
    x = torch.randn(2, 4, 7, 7)
    others = (
        {"padding": 2}, {"bias": True}, {"groups": 2}, {"dilation": 2}, {"padding": "same"},
        {"padding": 1, "padding_mode": "reflect"},
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        for options in others:
            assert not is_ours(Conv2d(4, 8, 3, **{"bias": False, **options})(x)), options
        assert not is_ours(Conv2d(4, 8, 3, bias=False)(x[0]))
        small = Conv2d(4, 8, 3, padding=1, bias=False)
        assert is_ours(small(x))
        with torch.no_grad():
            assert small(x).grad_fn is None
    assert not is_ours(small(x))  # float32
    with torch.autocast("cpu", torch.bfloat16):
        assert Conv2d(4, 8, 3, padding=1, bias=False).double()(x.double()).dtype == torch.float64
    with pytest.raises(RuntimeError, match="Kernel size"):
        small.bfloat16()(torch.zeros(1, 4, 0, 0, dtype=torch.bfloat16))


def test_frozen_weights_and_images_get_no_gradient():
    x = torch.randn(2, 4, 5, 5)
    layer = Conv2d(4, 8, 3, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()  # as the first layer of a network
        assert layer.weight.grad is not None
        layer.weight.requires_grad_(False).grad = None
        x.requires_grad_()
        y = layer(x)
    assert is_ours(y)
    y.sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None


@pytest.mark.parametrize(("white", "black", "expected"), [(["conv2d"], [], True), ([], ["conv2d"], False)])
def test_layers_follow_the_lists_of_operators(white, black, expected):
    network = nn.Sequential(Conv2d(4, 8, 3, bias=False), nn.Identity())
    apply_lists(network, white, black, "bfloat16", torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        y = network(torch.randn(2, 4, 5, 5))
    assert y.dtype == (torch.bfloat16 if expected else torch.float32)
    assert is_ours(y) == expected
