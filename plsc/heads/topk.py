"""The classes with the highest logits, among the class weights of a rank and then of all ranks.

Logits are computed tile by tile, without the matrix [B, classes]. Of equal logits, the lowest class comes
first; nan counts as -inf.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from plsc.heads.softmax import Queries, TorchBackend
from plsc.heads.weights import Rows
from plsc.parallel.collectives import send_rows

Top = tuple[Tensor, Tensor]
"""Logits without margin [B, k], highest first, and their classes, int64 [B, k]."""

REPORTED = 5
"""k of the top-k accuracy during training."""

_NO_CLASS = torch.iinfo(torch.int64).max


def top_of_rows(backend: TorchBackend, rows: Rows, queries: Queries, k: int) -> Top:
    """Return the k best of the selected classes of this rank, for the global batch.

    With fewer than k classes, the other logits are -inf and their classes do not exist.
    """
    scores = queries.unit.new_full((len(queries.unit), k), -torch.inf)
    classes = torch.full_like(scores, _NO_CLASS, dtype=torch.int64)
    for tile in rows.tiles(backend.tile):
        z = backend.class_logits(rows, queries, tile).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        numbers = rows.global_indices(tile)[:: rows.centers].to(z.device) // rows.centers
        found, columns = _highest(z, k)
        scores, classes = _best(torch.cat([scores, found], 1), torch.cat([classes, numbers[columns]], 1), k)
    return scores, classes


def top_of_ranks(top: Top, sizes: list[int], group: dist.ProcessGroup | None) -> Top:
    """Return the best classes of all ranks for the samples of this rank; a collective.

    top: of the classes of this rank, for the global batch. sizes: batch size of each rank.
    """
    ours = [send_rows(one, sizes, group).transpose(0, 1).flatten(1) for one in top]
    return _best(ours[0], ours[1], top[0].shape[1])


def top_of_logits(logits: Tensor, k: int) -> Top:
    """Return the k best of all classes, at most C, from logits [B, C]."""
    return _best(*_highest(logits.nan_to_num(-torch.inf, torch.inf, -torch.inf), k), k)


def count_hits(classes: Tensor, labels: Tensor) -> Tensor:
    """Return how many labels [b] equal the first and how many any of the classes [b, k]; int64 [2]."""
    hits = classes == labels[:, None]
    return torch.stack([hits[:, 0].sum(), hits.sum()])


def _highest(z: Tensor, k: int) -> Top:
    """Return the k highest values of each row, or all, and their columns, in the order of the columns.

    torch.topk alone may return any of several equal values.
    """
    k = min(k, z.shape[1])
    least = z.topk(k, dim=1).values[:, -1:]
    above, equal = z > least, z == least
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room))
    columns = chosen.nonzero()[:, 1].view(len(z), k)
    return z.gather(1, columns), columns


def _best(scores: Tensor, classes: Tensor, k: int) -> Top:
    """Return the k highest scores of each row, highest first, with their classes."""
    order = classes.argsort(dim=1)
    scores, classes = scores.gather(1, order), classes.gather(1, order)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, order), classes.gather(1, order)
