"""Class sampling as in PartialFC (An et al. 2022, "Killing Two Birds with One Stone").

A step uses the classes of the batch's labels (positives), filled up to a fraction of this rank's classes. The
others are drawn uniformly without replacement; a part can be hard negatives (neighbours.py). A draw depends
only on (seed, step, micro-batch, rank) and the hard negatives. It is made on the CPU, from labels that are
there: on a GPU, every size that depends on data would have to be waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plsc.errors import OptionError
from plsc.heads.weights import PAGE
from plsc.seeds import hash_key


@dataclass(frozen=True)
class Sampling:
    """Settings of class sampling.

    ratio: fraction of the classes used in each step, in (0, 1]; or fractions by the step from which each is
    used, such as {0: 1.0, 2000: 0.1}. hard: largest fraction of the sampled classes that are hard negatives,
    in [0, 1); the others are drawn uniformly. in_pages: draw whole pages of 32 consecutive classes, as class
    weights in a file need; the classes of the batch are used in addition.
    """

    ratio: float | Mapping[int, float] = 1.0
    hard: float = 0.0
    in_pages: bool = False

    def __post_init__(self) -> None:
        if min(self._ratios) != 0 or not all(0 < ratio <= 1 for ratio in self._ratios.values()):
            raise OptionError(
                f"the sample ratio is {self.ratio}; expected a fraction in (0, 1], or several by their first "
                "step, which starts at 0"
            )
        if not 0 <= self.hard < 1 or (self.hard and (self.in_pages or not self.is_partial)):
            raise OptionError(
                f"the hard fraction of the sample is {self.hard}; expected a number in [0, 1), and 0 if all "
                "classes are used or classes are drawn in pages"
            )

    @property
    def _ratios(self) -> Mapping[int, float]:
        return self.ratio if isinstance(self.ratio, Mapping) else {0: self.ratio}

    @property
    def is_partial(self) -> bool:
        """Whether there is a step that uses only a part of the classes."""
        return min(self._ratios.values()) < 1

    def ratio_at(self, step: int) -> float:
        """Return the fraction of the classes that a step uses; steps count from 0."""
        return self._ratios[max(first for first in self._ratios if first <= step)]


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
