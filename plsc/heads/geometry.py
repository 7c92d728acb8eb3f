"""Norms, unit vectors and angles, with gradients that are exact and finite for extreme input.

Norms of 2^-120 to 2^126 are exact to rounding in float32 and bfloat16. A shorter vector counts as zeros: it
has no direction and gets no gradient; so does a finite vector whose norm overflows float32. The kernels
(plsc/heads/kernels) follow the same rules.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SHORTEST = 2.0**-120  # with a direction: gradients, at most s / |W|, are then finite in float32
_LEAST_SUM = 2.0**-40  # below this norm, squares that vanished may count
_FAR = 2.0**100  # brings every norm outside the safe range into it

COSINE_LIMIT = 1.0 - 1e-7
"""A cosine is held inside +-this: the slope of acos is infinite at +-1."""


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


def held(cosine: Tensor) -> Tensor:
    """Return the cosine inside +-COSINE_LIMIT; the slope stays 1, so a saturated sample still learns."""
    return cosine + (cosine.clamp(-COSINE_LIMIT, COSINE_LIMIT) - cosine).detach()


def sine_of(cosine: Tensor) -> Tensor:
    """Return sqrt(1 - c^2) of a cosine that is inside +-1."""
    # 1 - c is exact near c = 1; in fp32 1 - c^2 would put the slopes off by 4e-5 there.
    return ((1 - cosine) * (1 + cosine)).sqrt()


def angle_of(cosine: Tensor) -> Tensor:
    """Return theta = acos(c) in (0, pi); unlike torch.acos, its slope is exact in fp32 near +-1."""
    c = held(cosine)
    return torch.atan2(sine_of(c), c)


def add_angle(cosine: Tensor, margin: Tensor, easy: bool = False) -> Tensor:
    """Return cos(acos(c) + m) for m [T] or 0-dim, and a stand-in where the angle would pass pi.

    The stand-in is c - m sin m past pi; with `easy`, c wherever c <= 0.
    """
    c = held(cosine)
    inside = c * margin.cos() - sine_of(c) * margin.sin()
    if easy:
        return torch.where(c > 0, inside, c)
    return torch.where(c < -margin.cos(), c - margin * margin.sin(), inside)


def falling_cosine(angle: Tensor) -> Tensor:
    """Return (-1)^k cos(angle) - 2 k, k = floor(angle / pi): a cosine that never rises again."""
    k = torch.floor(angle.detach() / math.pi)
    return (1 - 2 * (k % 2)) * angle.cos() - 2 * k
