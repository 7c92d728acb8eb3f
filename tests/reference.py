"""Reference implementation of every loss on the full logit matrix, for tests in fp64.

It has no sharding, no manual gradients, and only one measure for numerical stability: the slope of acos is
infinite at +-1, so the cosine of the label is clamped to +-COSINE_LIMIT (plsc/heads/margins.py) with slope
1. Nothing else is shared with plsc/heads/margins.py.

Notation: embeddings x [B, D]; class weights W [C, D], or [C, K, D] with K sub-centres per class; labels
y [B]; cosines c [B, C]; logits z [B, C].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from plsc.heads.margins import (
    COSINE_LIMIT,
    AdaFace,
    ArcFace,
    CombinedMargin,
    CosFace,
    CurricularFace,
    MagFace,
    Margin,
    Softmax,
    SphereFace,
)


def mean_loss(
    margin: Margin,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    allowed: Tensor | None = None,
    class_margins: Tensor | None = None,
) -> Tensor:
    """Return the loss of a head with this margin: mean cross-entropy plus mean regulariser, a scalar.

    allowed: bool [C], the sampled classes, including the labels; None: all. class_margins: the margin of each
    class, [C], instead of that of `margin`.
    """
    z = logits(margin, embeddings, weight, bias, labels, class_margins)
    loss = cross_entropy(z if allowed is None else masked(z, allowed), labels)
    if isinstance(margin, MagFace):
        loss = (
            loss
            + magface_regulariser(embeddings.norm(dim=1), margin.norm_range, margin.regularisation).mean()
        )
    return loss


def logits(
    margin: Margin,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_margins: Tensor | None = None,
) -> Tensor:
    """Return the logits [B, C] by the formula of this margin, with its settings and state.

    The logits of the labels are s (c + share (psi - c)).
    """
    of_label = getattr(margin, "margin", None) if class_margins is None else class_margins[labels]
    full = _full_logits(margin, embeddings, weight, bias, labels, of_label)
    if margin.share == 1:
        return full
    plain = margin.scale * cosines(embeddings, weight)
    at_label = torch.nn.functional.one_hot(labels, full.shape[1]).bool()
    return torch.where(at_label, plain + margin.share * (full - plain), full)


def _full_logits(
    margin: Margin, embeddings: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, of_label: Any
) -> Tensor:
    """Return the logits [B, C] for share = 1; of_label: one margin, or that of each sample's class, [B]."""
    m = margin
    if isinstance(m, Softmax):
        assert bias is not None
        return softmax_logits(embeddings, weight, bias)
    c = cosines(embeddings, weight)
    target, norms, others = _target(c, labels), embeddings.norm(dim=1), c
    if isinstance(m, ArcFace):
        psi = arcface(target, of_label, m.easy_margin)
    elif isinstance(m, CosFace):
        psi = c.gather(1, labels[:, None])[:, 0] - of_label  # Wang et al. 2018, eq. 4
    elif isinstance(m, SphereFace):
        psi = combined(target, of_label, 0.0, 0.0)  # Liu et al. 2017, eq. 7
    elif isinstance(m, CombinedMargin):
        psi = combined(target, *m.margins)
    elif isinstance(m, AdaFace):
        psi = adaface(target, norms, of_label, m.h, m.mean, m.std)
    elif isinstance(m, MagFace):
        (l_a, u_a), (l_m, u_m) = m.norm_range, m.margin_range  # Meng et al. 2021, sec. 3.2
        grown = (u_m - l_m) / (u_a - l_a) * (torch.clip(norms, l_a, u_a) - l_a) + l_m
        psi = arcface(target, grown, m.easy_margin)
    elif isinstance(m, CurricularFace):
        # Huang et al. 2020, sec. 3.2: N = c if c <= cos(theta_y + m), else c (t + c).
        threshold = torch.cos(torch.acos(target.detach()) + of_label)
        others = torch.where(c > threshold[:, None], c * (m.t + c), c)
        psi = arcface(target, of_label)
    else:
        raise TypeError(f"no reference formula for {type(margin).__name__}")
    return m.scale * others.scatter(1, labels[:, None], psi[:, None])


def arcface(target: Tensor, margin: float | Tensor, easy_margin: bool = False) -> Tensor:
    """Return psi = cos(acos(c) + m) (Deng et al. 2019, eq. 3), [B].

    Where acos(c) + m exceeds pi, psi = c - m sin(m), as in the authors' code. With the easy margin, psi = c
    wherever c <= 0.
    """
    margin = torch.as_tensor(margin, dtype=target.dtype)
    angle = torch.acos(target) + margin
    if easy_margin:
        return torch.where(target > 0, torch.cos(angle), target)
    return torch.where(angle <= math.pi, torch.cos(angle), target - margin * torch.sin(margin))


def combined(target: Tensor, m1: float | Tensor, m2: float, m3: float) -> Tensor:
    """Return psi = cos(m1 theta + m2) - m3 (Deng et al. 2019, eq. 4), [B].

    Beyond each multiple of pi the cosine is mirrored and shifted, so that it continues to decrease: in
    [k pi, (k + 1) pi] it is (-1)^k cos - 2 k.
    """
    angle = m1 * torch.acos(target) + m2
    psi = torch.cos(angle)
    for k in range(1, math.ceil((float(torch.as_tensor(m1).max()) * math.pi + m2) / math.pi)):
        psi = torch.where(angle > k * math.pi, (-1) ** k * torch.cos(angle) - 2 * k, psi)
    return psi - m3


def adaface(
    target: Tensor, norms: Tensor, margin: float | Tensor, h: float, mean: Tensor, std: Tensor
) -> Tensor:
    """Return psi = cos(theta + g_angle) - g_add (Kim et al. 2022, sec. 3.3), [B].

    g_angle = -m q, g_add = m q + m, q = clip(h (|x| - mean) / (std + 1e-3), -1, 1), a constant in the
    backward pass; norms and the angle are clipped as in the authors' code.
    """
    norms = torch.clip(norms.detach(), 1e-3, 100)
    q = torch.clip((norms - mean) / (std + 1e-3) * h, -1, 1)
    angle = torch.clip(torch.acos(target) - margin * q, 1e-3, math.pi - 1e-3)
    return torch.cos(angle) - (margin * q + margin)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the batch of log sum_j exp z_ij - z_iy, a scalar."""
    target = logits.gather(1, labels[:, None])[:, 0]
    return (torch.logsumexp(logits, dim=1) - target).mean()


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return the logits with -inf for the classes that are not `allowed`, bool [C]."""
    return logits.masked_fill(~allowed, -torch.inf)


def top_classes(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest logits of each row and their classes; of equal logits the lowest class first."""
    ordered = logits.sort(dim=1, descending=True, stable=True)
    return ordered.values[:, :k], ordered.indices[:, :k]


def cosines(embeddings: Tensor, weight: Tensor) -> Tensor:
    """Return c_ij = x_i . W_j / (|x_i| |W_j|), [B, C]; the maximum over the K sub-centres of a class."""
    e = embeddings / embeddings.norm(dim=1, keepdim=True)
    w = weight / weight.norm(dim=-1, keepdim=True)
    return _class_products(e, w)


def softmax_logits(embeddings: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return z = x W^T + b, [B, C]; bias [C], or [C, K] if weight is [C, K, D]."""
    return _class_products(embeddings, weight, bias)


def magface_regulariser(norms: Tensor, norm_range: tuple[float, ...], regularisation: float) -> Tensor:
    """Return lambda_g g(a), g(a) = a / u_a^2 + 1 / a, for norms [B] clipped to norm_range, [B]."""
    l_a, u_a = norm_range
    a = torch.clip(norms, l_a, u_a)
    return regularisation * (1 / u_a**2 * a + 1 / a)


def _class_products(embeddings: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x_i . W_j + b_j, the maximum over the sub-centres of a class, [B, C]."""
    if weight.dim() == 2:
        products = embeddings @ weight.T
        return products if bias is None else products + bias
    products = torch.einsum("bd,ckd->bck", embeddings, weight)
    return (products if bias is None else products + bias).max(dim=2).values


def _target(cosines: Tensor, labels: Tensor) -> Tensor:
    """Return the cosine of each sample with its class, [B], clamped to +-COSINE_LIMIT with slope 1."""
    target = cosines.gather(1, labels[:, None])[:, 0]
    return target + (target.clamp(-COSINE_LIMIT, COSINE_LIMIT) - target).detach()
