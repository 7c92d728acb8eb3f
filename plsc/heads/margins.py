"""The formulas that turn embeddings and class rows into logits, one class each.

A formula sees the rows of one shard. It returns the logits of those rows, and the same without the
margin, from which the batch accuracy is counted. Adding one: docs/extending.md.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

COSINE_LIMIT = 1.0 - 1e-7
"""The target cosine is held inside +-this: the slope of ArcFace is infinite at 1."""


class Formula(Protocol):
    """What a head needs to know of a loss."""

    has_bias: bool

    def logits(
        self, embeddings: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits and logits without margin, both [B, C_local].

        embeddings [B, D]; weight [C_local, D]; bias [C_local] or None; rows, columns [T]: sample
        ``rows[t]`` belongs to the class at ``columns[t]`` of this shard.
        """
        ...


class SoftmaxFormula:
    """z = e W^T + b, the plain softmax."""

    has_bias = True

    def logits(
        self, embeddings: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the same logits twice: there is no margin. Shapes as in `Formula`."""
        z = F.linear(embeddings, weight, bias)
        return z, z.detach()


class ArcFaceFormula:
    """s cos(acos(c) + m) at the label, s c elsewhere (Deng et al. 2019, "ArcFace", eq. 3).

    scale s > 0; margin m in radians, in [0, pi / 2].
    """

    has_bias = False

    def __init__(self, scale: float = 64.0, margin: float = 0.5) -> None:
        self.scale = scale
        self.margin = margin

    def logits(
        self, embeddings: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return margin logits and plain s c. Shapes as in `Formula`."""
        c = F.linear(F.normalize(embeddings), F.normalize(weight))
        target = _add_angle(c[rows, columns], self.margin)
        z = c.index_put((rows, columns), target) * self.scale
        return z, c.detach() * self.scale


class _AddAngle(torch.autograd.Function):
    """psi(c) = cos(acos(c) + m), and c - m sin(m) where the angle would pass pi.

    Written without acos, whose slope is infinite at +-1: psi = c cos m - sqrt(1 - c^2) sin m,
    psi' = cos m + c sin m / sqrt(1 - c^2), with c inside +-COSINE_LIMIT.
    """

    @staticmethod
    def forward(ctx: Any, cosine: Tensor, margin: float) -> Tensor:
        c = cosine.clamp(-COSINE_LIMIT, COSINE_LIMIT)
        sine = (1 - c * c).sqrt()
        past_pi = c < -math.cos(margin)  # acos(c) + m > pi
        ctx.save_for_backward(c, sine, past_pi)
        ctx.margin = margin
        inside = c * math.cos(margin) - sine * math.sin(margin)
        return torch.where(past_pi, c - margin * math.sin(margin), inside)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        c, sine, past_pi = ctx.saved_tensors
        slope = math.cos(ctx.margin) + c / sine * math.sin(ctx.margin)
        return gradients[0] * torch.where(past_pi, torch.ones_like(slope), slope), None


def _add_angle(cosine: Tensor, margin: float) -> Tensor:
    return _AddAngle.apply(cosine, margin)
