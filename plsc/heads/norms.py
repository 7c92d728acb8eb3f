"""Norms of embeddings and class weights whose squares neither vanish nor overflow, and unit vectors.

Norms of 2^-120 to 2^126 are exact to rounding in float32 and bfloat16. A shorter vector counts as zeros: it
has no direction and gets no gradient; so does a finite vector whose norm overflows float32. The kernels
(plsc/heads/kernels) follow the same rules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHORTEST = (
    2.0**-120
)  # of what has a direction: then gradients, at most s / |W|, are finite in float32
_LEAST_SUM = 2.0**-40  # below this norm, squares that vanished may count
_FAR = 2.0**100  # brings every norm outside the safe range into it


def norms(x: Tensor) -> Tensor:
    """Return |x| over the last dimension, in float32 or float64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    length = x.norm(dim=-1)
    by = torch.where(length < _LEAST_SUM, _FAR, torch.where(length.isinf(), 1 / _FAR, 1.0))
    if x.is_cuda or bool((by != 1).any()):  # a GPU is not waited for
        by = by.to(x.dtype)
        length = (x * by[..., None]).norm(dim=-1) / by
    return length


def normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / |x| over the last dimension, not differentiable, and |x|; zeros stay zeros."""
    length = norms(x)
    return x * _reciprocal(length)[..., None], length


def through_normalisation(gradient: Tensor, unit: Tensor, length: Tensor) -> Tensor:
    """Return the gradient of x from that of its unit vector u: (g - (g . u) u) / |x|."""
    along = (gradient * unit).sum(dim=-1, keepdim=True)
    return (gradient - along * unit) * _reciprocal(length)[..., None]


class Normalise(torch.autograd.Function):
    """`normalised`, differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the unit vectors."""
        unit, length = normalised(x)
        ctx.save_for_backward(unit, length)
        ctx.like = x.dtype
        return unit

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient of the vectors."""
        return through_normalisation(gradients[0], *ctx.saved_tensors).to(ctx.like)


def _reciprocal(length: Tensor) -> Tensor:
    """Return 1 / length, and 0 for what has no direction, which has no gradient either."""
    return torch.where(length >= SHORTEST, 1 / length, 0)
