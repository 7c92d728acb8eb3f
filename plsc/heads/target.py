"""The label's logit of each sample, from the rows of the labels alone, in full precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from plsc.heads.geometry import normalised
from plsc.heads.margins import Margin
from plsc.heads.weights import Rows
from plsc.parallel.collectives import sum_over_ranks


@dataclass
class Target:
    """What this rank knows of the labels' logits; zero, or -1, for samples whose class is elsewhere.

    samples: int64 [T], those whose class is here (on a GPU all B of them, as it would have to be waited for
    to know; those of other ranks count for nothing); w: [T, D], the (winning) row of each, of length 1 if
    rows are normalised. For all B samples: place, the position of the class among those in play; row, of
    the row among the rows in play; logit, with margin and scale; slope = dpsi / dc; radial = d logit / d|x|
    or None; threshold, hard_factor: as in `Queries`.
    """

    samples: Tensor
    w: Tensor
    place: Tensor
    row: Tensor
    logit: Tensor
    slope: Tensor
    radial: Tensor | None
    threshold: Tensor | None
    hard_factor: Tensor | None


def find_target(
    margin: Margin,
    unit: Tensor,
    length: Tensor,
    labels: Tensor,
    class_range: tuple[int, int],
    every: Rows,
    classes: Tensor | None,
    group: dist.ProcessGroup | None,
    is_training: bool,
) -> Target:
    """Return the targets of the global batch; a collective if the margin needs all cosines.

    unit [B, D], length [B]: of the embeddings; labels [B]; every: all rows of this rank, of the classes
    `class_range`; classes: ascending, those in play (None: all). In training the margin observes the batch.
    """
    k = every.centers
    samples, is_mine = _samples_here(labels, class_range, every.weight)
    local = labels[samples] - class_range[0]
    if is_mine is not None:
        local = local.where(is_mine, 0)
    local = local.to(every.weight.device)
    place = local if classes is None else torch.searchsorted(classes, local)
    w = every.weight.view(-1, k, every.weight.shape[1])[local].to(unit)
    if every.cosine:
        w, _ = normalised(w)
    c, winner = (w * unit[samples, None, :]).sum(dim=2).max(dim=1)
    w = w[torch.arange(len(w), device=w.device), winner]
    if every.bias is not None:
        c = c + every.bias[local].to(c)
    place = place.to(labels.device)

    def spread(values: Tensor) -> Tensor:
        if is_mine is not None:
            return values.where(is_mine, 0)
        return unit.new_zeros(len(labels)).index_copy(0, samples, values)

    def spread_places(values: Tensor) -> Tensor:
        if is_mine is not None:
            return values.where(is_mine, -1)
        return torch.full_like(labels, -1).index_copy(0, samples, values)

    cosines = None
    if margin.needs_all_cosines:
        cosines = sum_over_ranks(spread(c), group)
    if is_training:
        margin.observe(cosines, length)
    psi, slope, radial = _value_and_slopes(margin, c, length[samples])
    hard = None if cosines is None else margin.hard(cosines)

    return Target(
        samples=samples,
        w=w,
        place=spread_places(place),
        row=spread_places(place * k + winner),
        logit=spread(psi * margin.scale),
        slope=spread(slope),
        radial=None if radial is None else spread(radial * margin.scale),
        threshold=None if hard is None else hard[0],
        hard_factor=None if hard is None else hard[1],
    )


def _samples_here(
    labels: Tensor, class_range: tuple[int, int], weight: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the samples to look at, int64 [T], and which of them have their class here; None: all."""
    start, stop = class_range
    is_mine = (labels >= start) & (labels < stop)
    if start < stop and _must_not_wait(labels, weight):
        return torch.arange(len(labels), device=labels.device), is_mine
    return is_mine.nonzero()[:, 0], None


def _must_not_wait(labels: Tensor, weight: Tensor) -> bool:
    return labels.is_cuda and weight.is_cuda


def regulariser(margin: Margin, length: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the margin's addition to each sample's loss, and its slope in |x|, both [B]; or None."""
    with torch.enable_grad():
        leaf = length.clone().requires_grad_()
        value = margin.regulariser(leaf)
        if value is None:
            return None
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope


def _value_and_slopes(
    margin: Margin, cosine: Tensor, length: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return psi and its slopes in the cosine and, where the margin uses it, in the norm."""
    with torch.enable_grad():
        c = cosine.clone().requires_grad_()
        norm = length.clone().requires_grad_(margin.uses_norm)
        psi = margin.shared_target(c, norm)
        inputs = [c, norm] if margin.uses_norm else [c]
        slopes = torch.autograd.grad(psi.sum(), inputs)
    return psi.detach(), slopes[0], slopes[1] if margin.uses_norm else None
