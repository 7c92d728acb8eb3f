"""Hard negatives: for each class, the classes that were nearest to its samples.

Each rank keeps the lists of its own classes. A step uses the lists of its labels: the ranks that hold the
weights of the listed classes sample them. Of all classes that a step samples, those nearest to a sample
become the list of its label. So a listed class is compared again whenever its list is used, and others enter
it when they are drawn: nothing is searched, and a class costs 68 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plsc.heads.host_copies import to_device
from plsc.heads.weights import Rows
from plsc.parallel.collectives import sum_over_ranks

NEIGHBOURS = 16
"""Classes in a list."""

LIST_BYTES = 4 * (1 + NEIGHBOURS)
"""Bytes of a list."""

KEPT_BYTES = 2**30
"""Largest softmax terms that a step keeps to find the nearest classes; otherwise it computes logits again."""


class Neighbours(nn.Module):
    """The lists of this rank's classes.

    classes: global indices of this rank's classes.

    Attributes:
        lists: int32 [C_local, 1 + NEIGHBOURS]: the step of the last update, then the global indices of the
            nearest classes, nearest first. All plus 1: 0 means none.
    """

    lists: Tensor

    def __init__(self, classes: range, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.classes = classes
        self.group = group
        self.register_buffer("lists", torch.zeros(len(classes), 1 + NEIGHBOURS, dtype=torch.int32))

    def of_labels(self, labels: Tensor, device: torch.device | None = None) -> Tensor:
        """Return the lists of the labels [B] on every rank, int64 [B, 1 + NEIGHBOURS]; a collective.

        labels: on the CPU. device: of the result, by default the CPU.
        """
        device = device or labels.device
        mine = self._has(labels).nonzero()[:, 0]
        found = torch.zeros(len(labels), 1 + NEIGHBOURS, dtype=torch.int64, device=device)
        lists = self.lists[to_device(labels[mine] - self.classes.start, self.lists.device)].long()
        found.index_copy_(0, to_device(mine, device), to_device(lists, device))
        return sum_over_ranks(found, self.group)

    def near(self, listed: Tensor, labels: Tensor, count: int) -> Tensor:
        """Return at most `count` of this rank's classes in lists [B, 1 + NEIGHBOURS], the nearest first.

        All on the CPU. Returns local indices, int64, without those of the labels.
        """
        every = listed[:, 1:].T.flatten() - 1
        every = every[self._has(every) & ~torch.isin(every, labels)]
        classes, first = _first_of(every)
        return classes[first.argsort()[:count]] - self.classes.start

    def update(self, labels: Tensor, near: Tensor, step: int) -> None:
        """Replace the lists of the labels [B] by the nearest classes that any rank sampled.

        labels: on the CPU. near: from `merge`.
        """
        own, first = _first_of(labels)
        lists = torch.cat([torch.full_like(near[:, :1], step), near], dim=1) + 1
        is_mine = self._has(own)
        place = to_device(own[is_mine] - self.classes.start, self.lists.device)
        self.lists[place] = lists[to_device(first[is_mine], lists.device)].to(self.lists)

    def _has(self, classes: Tensor) -> Tensor:
        return (classes >= self.classes.start) & (classes < self.classes.stop)


def nearest(
    rows: Rows, batch: int, scores_of: Callable[[slice], Tensor], tile: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the highest scores in this rank's rows and their classes, [B, NEIGHBOURS + 1] each.

    scores_of: returns the scores [B, t / K] of a tile. tile: rows per tile. Classes are global indices,
    int64, with the label; where there are too few, -1 with a score of -inf.
    """
    most = NEIGHBOURS + 1  # with the label
    scores = torch.full((batch, most), -torch.inf, device=device)
    classes = torch.full_like(scores, -1, dtype=torch.int64)
    for part in rows.tiles(tile):
        numbers = rows.global_indices(part)[:: rows.centers].to(device) // rows.centers
        highest, columns = scores_of(part).topk(min(most, len(numbers)))
        scores, order = torch.cat([scores, highest.to(scores)], dim=1).topk(most)
        classes = torch.cat([classes, numbers[columns.to(device)]], dim=1).gather(1, order)
    return scores, classes


def merge(scores: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
    """Return the classes with the highest scores on any rank, without the label, the best first.

    scores, classes: of all ranks [R, B, NEIGHBOURS + 1], see `nearest`. labels [B]: on their device.

    Returns global indices, int64 [B, NEIGHBOURS]; -1 where there are too few.
    """
    scores, classes = (part.transpose(0, 1).flatten(1) for part in (scores, classes))
    scores, order = scores.masked_fill(classes == labels[:, None], -torch.inf).topk(NEIGHBOURS)
    return classes.gather(1, order).where(scores > -torch.inf, -1)  # also where a score is nan


def _first_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values, sorted, and the first position of each."""
    distinct, place = torch.unique(values, return_inverse=True)
    first = torch.full_like(distinct, len(values))
    return distinct, first.scatter_reduce(0, place, torch.arange(len(values), device=values.device), "amin")
