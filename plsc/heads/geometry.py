"""Norms, unit vectors and angles, with exact and finite gradients for extreme input.

Norms from 2^-120 to 2^126 are exact to rounding in float32 and bfloat16. A shorter vector is treated as zero:
its unit vector and its gradient are zero. The same holds for a finite vector whose norm overflows float32.
The kernels (plsc/heads/kernels) follow the same rules.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SHORTEST = 2.0**-120  # shorter vectors count as zero, so gradients (at most s / |W|) stay finite in float32
_UNDERFLOW_NORM = 2.0**-40  # below this norm, squares that underflowed may matter
_RESCALE = 2.0**100  # moves every norm outside the safe range into it

COSINE_LIMIT = 1.0 - 1e-7
"""Cosines are clamped to +-COSINE_LIMIT, because the slope of acos is infinite at +-1."""


def norms(x: Tensor) -> Tensor:
    """Return |x| over the last dimension, in float32 or float64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    length = x.norm(dim=-1)
    factor = torch.where(length < _UNDERFLOW_NORM, _RESCALE, torch.where(length.isinf(), 1 / _RESCALE, 1.0))
    if x.is_cuda or bool((factor != 1).any()):  # on a GPU without the test, which would synchronise
        factor = factor.to(x.dtype)
        length = (x * factor[..., None]).norm(dim=-1) / factor
    return length


def normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / |x| over the last dimension, and |x|; not differentiable. Zero vectors stay zero."""
    length = norms(x)
    return x * _reciprocal(length)[..., None], length


def normalisation_backward(gradient: Tensor, unit: Tensor, length: Tensor) -> Tensor:
    """Return the gradient of x from the gradient g of its unit vector u: (g - (g . u) u) / |x|."""
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
        return normalisation_backward(gradients[0], *ctx.saved_tensors).to(ctx.like)


def _reciprocal(length: Tensor) -> Tensor:
    """Return 1 / length, and 0 for lengths that count as zero."""
    return torch.where(length >= SHORTEST, 1 / length, 0)


def clamp_cosine(cosine: Tensor) -> Tensor:
    """Clamp to +-COSINE_LIMIT with slope 1, so that a saturated sample still gets a gradient."""
    return cosine + (cosine.clamp(-COSINE_LIMIT, COSINE_LIMIT) - cosine).detach()


def sine_of(cosine: Tensor) -> Tensor:
    """Return sqrt(1 - c^2) for a cosine strictly inside +-1."""
    # 1 - c is exact near c = 1; in fp32 1 - c^2 would cause an error of 4e-5 in the slopes.
    return ((1 - cosine) * (1 + cosine)).sqrt()


def angle_of(cosine: Tensor) -> Tensor:
    """Return theta = acos(c) in (0, pi); unlike torch.acos, its slope is exact in fp32 near +-1."""
    c = clamp_cosine(cosine)
    return torch.atan2(sine_of(c), c)


def add_angle(cosine: Tensor, margin: float | Tensor, easy: bool = False, beyond_pi: bool = False) -> Tensor:
    """Return cos(acos(c) + m), or c - m sin m where the angle exceeds pi; m is [T] or a number.

    easy: return c wherever c <= 0 instead. beyond_pi: return cos(acos(c) + m) for all angles.
    """
    if not isinstance(margin, Tensor):
        margin = cosine.new_full((), margin)
    c = clamp_cosine(cosine)
    inside = c * margin.cos() - sine_of(c) * margin.sin()
    if beyond_pi:
        return inside
    if easy:
        return torch.where(c > 0, inside, c)
    return torch.where(c < -margin.cos(), c - margin * margin.sin(), inside)


def monotonic_cosine(angle: Tensor) -> Tensor:
    """Return (-1)^k cos(angle) - 2 k with k = floor(angle / pi), which decreases for all angles >= 0."""
    k = torch.floor(angle.detach() / math.pi)
    return (1 - 2 * (k % 2)) * angle.cos() - 2 * k
