"""PReLU whose gradient costs a processor half as much."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class PReLU(nn.PReLU):
    """`nn.PReLU`, and the same numbers; on a CPU with another way to the gradient of a shared slope.

    torch writes the slope's gradient of every single value before it adds them up, and reads the slope for
    every value. That was a fifth of a bfloat16 step of ResNet18. On other devices, with a slope for each
    channel and under torch.compile, which fuses all of it, this is torch's own.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return max(x, 0) + slope * min(x, 0), element by element."""
        is_ours = (
            self.weight.numel() == 1
            and input.device.type == "cpu"
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )
        return _SharedSlope.apply(input, self.weight) if is_ours else super().forward(input)


class _SharedSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, slope: Tensor) -> Tensor:
        # As a number: it is read once. On a CPU nothing waits for it.
        ctx.number = float(slope)
        ctx.save_for_backward(input)
        ctx.shape, ctx.dtype = slope.shape, slope.dtype
        return F.leaky_relu(input, ctx.number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (input,) = ctx.saved_tensors
        d_output = gradients[0]
        d_input = d_slope = None
        if ctx.needs_input_grad[0]:
            d_input = torch.ops.aten.leaky_relu_backward(d_output, input, ctx.number, False)
        if ctx.needs_input_grad[1]:
            exact = torch.promote_types(input.dtype, torch.float32)
            d_slope = input.clamp_max(0).mul_(d_output).sum(dtype=exact)
            d_slope = d_slope.to(ctx.dtype).reshape(ctx.shape)
        return d_input, d_slope
