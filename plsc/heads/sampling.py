"""Which classes take part in a step: PartialFC (An et al. 2022, "Killing Two Birds with One Stone").

The classes of the batch's labels always do; others are added up to a share of this rank's classes, drawn
uniformly without replacement, or partly chosen because they are close to the batch. A draw is a function
of (seed, step, micro-batch, rank) on one kind of device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.errors import OptionError
from plsc.heads.softmax import Queries, TorchBackend
from plsc.heads.weights import Rows, hash_key


@dataclass(frozen=True)
class Sampling:
    """Which classes take part: `ratio` of them in each step, in (0, 1]; `hard`: the share of those that
    are the nearest to the batch, in [0, 1), the others being drawn uniformly."""

    ratio: float = 1.0
    hard: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise OptionError(f"the sample ratio is {self.ratio}; expected a share of the classes in (0, 1]")
        if not 0 <= self.hard < 1:
            raise OptionError(f"the hard share of the sample is {self.hard}; expected a number in [0, 1)")
        if self.hard and self.ratio == 1:
            raise OptionError(
                f"the hard share is {self.hard}, but all classes take part; set a sample ratio below 1"
            )


def draw_classes(positives: Tensor, classes: int, count: int, key: int, near: Tensor | None = None) -> Tensor:
    """Return about `count` of 0..classes - 1, ascending int64, all of `positives` and `near` among them.

    positives: int64, in any order, with repetitions. near: more that are to be in. The rest is uniform
    over the others. There are more than `count` only if positives and near alone are more. Memory and time
    grow with `count`, not with `classes`.
    """
    device = positives.device
    fixed = torch.unique(positives if near is None else torch.cat([positives, near]))
    if len(fixed) >= count:
        return fixed
    if count >= classes:
        return torch.arange(classes, device=device)
    generator = torch.Generator(device).manual_seed(hash_key(key, 1) >> 1)
    missing = count - len(fixed)
    # `others` numbers the classes that are not fixed; it is drawn directly, or by what it leaves out.
    population = classes - len(fixed)
    if missing <= population // 2:
        others = _distinct(missing, population, generator)
    else:
        left_out = _distinct(population - missing, population, generator)
        taken = torch.ones(population, dtype=torch.bool, device=device)
        taken[left_out] = False
        others = taken.nonzero()[:, 0]
    # The class of other number o is o + the number of fixed classes at or below it.
    below = fixed - torch.arange(len(fixed), device=device)
    others = others + torch.searchsorted(below, others, right=True)
    return torch.cat([fixed, others]).sort().values


def nearest_classes(rows: Rows, queries: Queries, count: int, tile: int, key: int) -> Tensor:
    """Return the positions of the `count` classes closest to any sample, of a random half of the classes.

    rows: all of this rank's; the classes of labels are left out, they take part anyway. tile: rows at a
    time. The half changes with `key`; looking at it costs B n D operations in float32 and reads half of the
    rows, which may be more than the rest of a sampled step (docs/benchmarks/head.md).
    """
    classes = len(rows.weight) // rows.centers
    if count == 0 or classes == 0:
        return torch.empty(0, dtype=torch.int64, device=queries.unit.device)
    half = draw_classes(queries.target.new_empty(0), classes, -(-classes // 2), hash_key(key, 2))
    half = half[~torch.isin(half, queries.target)]
    scores = TorchBackend(torch.float32, tile).closeness(rows.of_classes(half), queries)
    return half[scores.topk(min(count, len(half))).indices]


def _distinct(count: int, population: int, generator: torch.Generator) -> Tensor:
    """Return `count` distinct numbers of 0..population - 1, at most half of them, ascending, uniformly.

    Drawing with replacement until enough are there, and dropping the surplus at random, favours none.
    """
    device = generator.device
    found = torch.empty(0, dtype=torch.int64, device=device)
    if count == 0:
        return found
    expected = -population * math.log1p(-count / population)
    draws = int(expected + 3 * math.sqrt(expected)) + 8
    while len(found) < count:
        more = torch.randint(population, (draws,), generator=generator, device=device)
        found = torch.unique(torch.cat([found, more]))
        draws = max(8, (count - len(found)) * 2)
    surplus = len(found) - count
    drop = torch.randperm(len(found), generator=generator, device=device)[:surplus]
    stays = torch.ones(len(found), dtype=torch.bool, device=device)
    stays[drop] = False
    return found[stays]
