"""Our PReLU is torch's, but for the time of its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plsc.models.activation import PReLU


def gradients(layer: nn.Module, x: torch.Tensor, g: torch.Tensor):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("slopes", [1, 6])
def test_output_and_gradients_are_torchs(slopes, dtype, tolerance, layout):
    torch.manual_seed(0)
    ours, theirs = PReLU(slopes, init=-0.3).to(dtype), nn.PReLU(slopes, init=-0.3).to(dtype)
    x = torch.randn(4, 6, 5, 3, dtype=dtype).contiguous(memory_format=layout)
    x[0, 0, 0] = 0
    g = torch.randn_like(x)
    mine, expected = gradients(ours, x, g), gradients(theirs, x, g)
    for one, other in zip(mine, expected, strict=True):
        assert one.dtype == other.dtype == dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert mine[0].is_contiguous(memory_format=layout)
    assert mine[1].is_contiguous(memory_format=layout)


def test_the_slope_of_16_bit_features_learns_in_full_precision():
    torch.manual_seed(0)
    x = torch.randn(64, 64, 8, 8)
    g = torch.randn_like(x)
    exact = gradients(nn.PReLU().double(), x.bfloat16().double(), g.bfloat16().double())[2]
    layer = PReLU()  # float32, as under autocast
    found = gradients(layer, x.bfloat16(), g.bfloat16())
    assert (found[0].dtype, found[1].dtype, found[2].dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    scale = (x * g).abs().sum()
    assert abs(found[2].item() - exact.item()) < 1e-4 * scale


def test_a_frozen_slope_has_no_gradient_and_bad_numbers_stay_bad():
    layer = PReLU()
    layer.weight.requires_grad_(False)
    x = torch.tensor([float("nan"), -float("inf"), 2.0], requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert layer.weight.grad is None
    assert torch.isnan(y[0])
    assert y[1] == -float("inf")
    assert x.grad.tolist()[1:] == [0.25, 1.0]


def test_state_and_name_are_torchs():
    layer = PReLU(init=0.4)
    nn.PReLU().load_state_dict(layer.state_dict())
    assert isinstance(layer, nn.PReLU)
