"""Class sampling as in PartialFC (An et al. 2022, "Killing Two Birds with One Stone").

A step uses the classes of the batch's labels (positives), filled up to a fraction of this rank's classes. The
others are drawn uniformly without replacement; a part can be hard negatives (below). A draw depends
only on (seed, step, micro-batch, rank) and the hard negatives. It is made on the CPU, from labels that are
there: on a GPU, every size that depends on data would have to be waited for.

Hard negatives: for each class, the classes that were nearest to its samples.

Each rank keeps the lists of its own classes. A step uses the lists of its labels: the ranks that hold the
weights of the listed classes sample them. Of all classes that a step samples, those nearest to a sample
become the list of its label. So a listed class is compared again whenever its list is used, and others enter
it when they are drawn: nothing is searched, and a class costs 68 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plsc.heads.weights import PAGE, Rows
from plsc.parallel.world import sum_over_ranks, to_device
from plsc.seeds import hash_key


def draw_pages(classes: range, count: int, key: int) -> Tensor:
    """Return the pages of about `count` of a rank's classes, sorted int64, drawn uniformly.

    Page 0 has the first of these classes. The draw does not depend on the batch, so it is known in advance.
    """
    pages = count_pages(classes)
    return draw_classes(torch.empty(0, dtype=torch.int64), pages, -(-count // PAGE), key)


def count_pages(classes: range) -> int:
    """Return the number of pages of a rank's classes. All ranks cut the pages at multiples of 32 classes."""
    return -(-classes.stop // PAGE) - classes.start // PAGE if classes else 0


def classes_of(pages: Tensor, classes: range, positives: Tensor) -> Tensor:
    """Return the local indices of the classes in `pages` and of `positives`, sorted int64."""
    offsets = torch.arange(PAGE) - classes.start % PAGE
    drawn = (pages[:, None] * PAGE + offsets).flatten()
    drawn = drawn[(drawn >= 0) & (drawn < len(classes))]
    return torch.unique(torch.cat([drawn, positives]))


def draw_classes(positives: Tensor, classes: int, count: int, key: int, near: Tensor | None = None) -> Tensor:
    """Return `count` of 0..classes - 1, sorted int64, with all of `positives` and `near`.

    The remaining classes are drawn uniformly. The result is longer than `count` only if positives and near
    together are more. Time grows with `count`, and with a byte per class if these are less than 256 `count`.

    positives: int64, in any order, repetitions allowed. near: further classes to include.
    """
    fixed = _distinct(positives if near is None else torch.cat([positives, near]), classes)
    if len(fixed) >= count:
        return fixed
    if count >= classes:
        return torch.arange(classes)
    generator = torch.Generator().manual_seed(hash_key(key, 1) >> 1)
    missing = count - len(fixed)
    # `others` indexes the classes that are not fixed. Above half of them, draw those to exclude instead.
    population = classes - len(fixed)
    if missing <= population // 2:
        others = _draw_distinct(missing, population, generator)
    else:
        excluded = _draw_distinct(population - missing, population, generator)
        included = torch.ones(population, dtype=torch.bool)
        included[excluded] = False
        others = included.nonzero()[:, 0]
    # Index o stands for class o + (the number of fixed classes at or below that class).
    below = fixed - torch.arange(len(fixed))
    others = others + torch.from_numpy(np.searchsorted(below.numpy(), others.numpy(), side="right"))
    return _distinct(torch.cat([fixed, others]), classes)


def _distinct(values: Tensor, population: int) -> Tensor:
    """Return the distinct ones of some of 0..population - 1, sorted, without sorting if they are many."""
    if len(values) < population // 256:
        return torch.unique(values)
    is_there = np.zeros(population, dtype=np.bool_)
    is_there[values.numpy()] = True
    return torch.from_numpy(np.flatnonzero(is_there))


def _draw_distinct(count: int, population: int, generator: torch.Generator) -> Tensor:
    """Return `count` distinct integers of 0..population - 1, sorted and uniform; at most half of them.

    Draws with replacement until there are enough, then drops the surplus at random.
    """
    found = torch.empty(0, dtype=torch.int64)
    if count == 0:
        return found
    expected = -population * math.log1p(-count / population)
    draws = int(expected + 3 * math.sqrt(expected)) + 8
    while len(found) < count:
        more = torch.randint(population, (draws,), generator=generator)
        found = _distinct(torch.cat([found, more]), population)
        draws = max(8, (count - len(found)) * 2)
    surplus = len(found) - count
    drop = torch.randperm(len(found), generator=generator)[:surplus]
    kept = torch.ones(len(found), dtype=torch.bool)
    kept[drop] = False
    return found[kept]


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
