"""Angles from cosines, with slopes that are exact and finite up to +-1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

COSINE_LIMIT = 1.0 - 1e-7
"""A cosine is held inside +-this: the slope of acos is infinite at +-1."""


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
