"""Reduce a head with sub-centres to one centre per class after training."""

from __future__ import annotations

import torch
from torch import Tensor

from plsc.heads.base import gather_batch
from plsc.heads.geometry import normalised
from plsc.heads.optimizers import RowOptimizer
from plsc.heads.sharded import ShardedHead
from plsc.heads.weights import decode_rows


def new_counts(head: ShardedHead) -> Tensor:
    """Return zero counts, int64 [C_local, K], for `count_choices`."""
    classes = head.weight.shape[0]
    return torch.zeros(classes, head.centers, dtype=torch.int64, device=head.weight.device)


@torch.no_grad()
def count_choices(head: ShardedHead, embeddings: Tensor, labels: Tensor, counts: Tensor) -> None:
    """Count, for each sample of the global batch, the nearest sub-centre of its class; a collective.

    embeddings: [b, D]. labels: [b]. counts: from `new_counts`, updated in place.
    """
    batch = gather_batch(embeddings, labels, head.class_num, head.group)
    start, stop = head.class_range
    is_here = (batch.labels >= start) & (batch.labels < stop)
    classes = (batch.labels[is_here] - start).to(counts.device)
    x = batch.embeddings[is_here].to(counts.device, torch.float32)
    w = decode_rows(head.weight.detach().view(stop - start, head.centers, -1)[classes]).float()
    chosen = (normalised(w)[0] * x[:, None, :]).sum(dim=2).argmax(dim=1)
    ones = torch.ones_like(chosen)
    counts.view(-1).index_add_(0, classes * head.centers + chosen, ones)


@torch.no_grad()
def copy_dominant(
    head: ShardedHead,
    rows: RowOptimizer | None,
    counts: Tensor,
    new_head: ShardedHead,
    new_rows: RowOptimizer | None,
) -> None:
    """Copy each class's dominant sub-centre, with its optimizer state, from `head` to `new_head`.

    The dominant sub-centre is the nearest one for most samples (Deng et al. 2020, "Sub-center ArcFace",
    sec. 3); the first one wins a tie. `new_head` has one centre per class.

    counts: from `count_choices` over the training set. rows, new_rows: row optimizers of the same kind.
    """
    classes = torch.arange(len(counts), device=counts.device)
    best = counts.argmax(dim=1)
    new_head.weight.copy_(head.weight[classes, best])
    new_head.margin.load_state_dict(head.margin.state_dict())
    new_head.step = head.step
    if rows is not None and new_rows is not None:
        for name, state in rows.state[head.weight].items():
            new_rows.state[new_head.weight][name].copy_(state[classes, best])
