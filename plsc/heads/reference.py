"""The naive truth: every head on the full matrix, as in the textbook, for tests in fp64.

No sharding, no stability tricks but one limit, no hand-written gradient. Notation as in docs/architecture.md:
embeddings e [B, D], class rows w [C, D], labels y [B], cosines c [B, C], logits z [B, C].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plsc.heads.margins import COSINE_LIMIT


def cosines(embeddings: Tensor, weight: Tensor) -> Tensor:
    """Return c_ij = e_i . w_j / (|e_i| |w_j|), [B, C]."""
    e = embeddings / embeddings.norm(dim=1, keepdim=True)
    w = weight / weight.norm(dim=1, keepdim=True)
    return e @ w.T


def arcface_logits(
    embeddings: Tensor, weight: Tensor, labels: Tensor, scale: float, margin: float
) -> Tensor:
    """Return s cos(acos(c) + m) at the label, s c elsewhere, [B, C] (Deng et al. 2019, eq. 3).

    Where acos(c) + m passes pi, cos would rise again; there the target is c - m sin(m), as in the
    authors' code. The slope of acos is infinite at +-1, so the target is held inside +-COSINE_LIMIT.
    """
    c = cosines(embeddings, weight)
    target = c.gather(1, labels[:, None]).clamp(-COSINE_LIMIT, COSINE_LIMIT)
    angle = torch.acos(target) + margin
    with_margin = torch.where(
        angle <= math.pi, torch.cos(angle), target - margin * math.sin(margin)
    )
    return scale * c.scatter(1, labels[:, None], with_margin)


def softmax_logits(embeddings: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return z = e W^T + b, [B, C]."""
    return embeddings @ weight.T + bias


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the batch of log sum_j exp z_ij - z_iy, a scalar."""
    target = logits.gather(1, labels[:, None])[:, 0]
    return (torch.logsumexp(logits, dim=1) - target).mean()
