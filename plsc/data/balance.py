"""Orders of samples for classes with very different numbers of images: balanced, or K images per class."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from plsc.data.order import BatchPlan, permutation, splitmix64_of
from plsc.errors import DataError, OptionError
from plsc.seeds import hash_key

_IMAGES, _CLASSES, _BATCHES = 2, 3, 4  # parts of the keys; plsc/data/order.py uses others
_ROUNDS = 16  # of `shuffled`: the place of an image is uniform up to 2^-16


@dataclass(frozen=True)
class _PlanByClass(BatchPlan):
    """A plan that may read an image several times per epoch. labels: int64 [N]."""

    labels: np.ndarray = field(kw_only=True, repr=False, compare=False)

    @cached_property
    def _counts(self) -> np.ndarray:
        """Images per class, of the classes that have any, by label: int64 [C]."""
        return np.unique(self.labels, return_counts=True)[1].astype(np.int64)

    @cached_property
    def _by_class(self) -> tuple[np.ndarray, np.ndarray]:
        """The samples ordered by class [N], and the place of the first one of each class [C]."""
        return np.argsort(self.labels, kind="stable"), np.cumsum(self._counts) - self._counts

    def draw_epoch(self, epoch: int, step: int) -> int:
        """Return the number that seeds augmentation in addition to the sample: the step of the run."""
        return epoch * self.steps_per_epoch + step

    def _images_at(self, classes: np.ndarray, numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the images at places of the numbered random permutations of each class, all int64 [n]."""
        keys = splitmix64_of(classes.astype(np.uint64) ^ np.uint64(hash_key(self.seed, _IMAGES)))
        keys = splitmix64_of(keys ^ numbers.astype(np.uint64))
        images, firsts = self._by_class
        return images[firsts[classes] + shuffled(places, self._counts[classes], keys)]


@dataclass(frozen=True)
class BalancedPlan(_PlanByClass):
    """Give a class of n images a share of the N positions of an epoch in proportion to n^balance.

    Each class has an endless sequence of random permutations of its images, which epochs continue.

    Attributes:
        balance: 1 for the shares of the dataset, 0 for equal shares.
    """

    balance: float = field(default=0.5, kw_only=True)

    @cached_property
    def quotas(self) -> np.ndarray:
        """Positions per class and epoch, at least 1, with the sum N: int64 [C].

        They are rounded by largest remainders. No exact value is below 1, because n^balance <= n.
        """
        weights = self._counts.astype(np.float64) ** self.balance
        exact = weights * (self.num_samples / weights.sum())
        quotas = np.floor(exact + 1e-9).astype(np.int64)
        # The last bits of a power differ between machines, so remainders are rounded.
        by_remainder = np.argsort(-np.round(exact - quotas, 6), kind="stable")
        quotas[by_remainder[: self.num_samples - quotas.sum()]] += 1
        return quotas

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.quotas)

    def samples_at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at the given positions of an epoch's order, int64."""
        positions = super().samples_at(epoch, positions)  # shuffled; without that, class after class
        classes = np.searchsorted(self._ends, positions, side="right")
        walked = (epoch + 1) * self.quotas[classes] - (self._ends[classes] - positions)
        return self._images_at(classes, *np.divmod(walked, self._counts[classes]))

    def describe(self) -> str:
        """Return a log message."""
        return (
            f"order 'balanced': {self.quotas.min():,} to {self.quotas.max():,} images per class and epoch; "
            f"all images are used within the first {(-(-self._counts // self.quotas)).max():,} whole epochs"
        )


@dataclass(frozen=True)
class ClassesPlan(_PlanByClass):
    """Make global batches of P different classes with K images each, in cycles that use every image.

    A class of n images has ceil(n / K) groups; the last one is filled with the first images of the same
    permutation. A class of fewer than K images repeats them. A cycle has enough steps for all groups, and for
    those of the largest class. Its free places get further groups of the classes with the fewest.

    Groups are dealt, class after class in random order, to the batches of a cycle in random order. No class
    has more groups than a cycle has steps, so none is twice in a batch.

    Attributes:
        images_per_class: K. ``last_batch`` decides only the number of steps: all batches are full.

    Raises:
        OptionError: ``global_batch`` is not a multiple of K.
        DataError: there are fewer than P classes.
    """

    images_per_class: int = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        batch, size, class_num = self.global_batch, self.images_per_class, len(self._counts)
        if batch % size:
            raise OptionError(
                f"the global batch size {batch} is not a multiple of images_per_class, {size}, as "
                "data.order 'classes' needs; change one of them"
            )
        if self._per_batch > class_num:
            raise DataError(
                f"data.order 'classes' needs {self._per_batch} classes with images for a global batch of "
                f"{batch} with {size} images per class, but there are {class_num}; use a smaller batch, or "
                "increase images_per_class"
            )

    @property
    def _per_batch(self) -> int:
        return self.global_batch // self.images_per_class

    @cached_property
    def _needed(self) -> np.ndarray:
        """Groups that contain all images of each class, int64 [C]."""
        return -(-self._counts // self.images_per_class)

    @cached_property
    def cycle_steps(self) -> int:
        """Number of steps that use every image at least once."""
        return int(max(-(-self._needed.sum() // self._per_batch), self._needed.max()))

    def global_indices(self, epoch: int, step: int) -> np.ndarray:
        """Return the sample indices of a step's global batch, int64 [P * K], class after class."""
        cycle, place = divmod(self.draw_epoch(epoch, step), self.cycle_steps)
        if cycle not in self._cycles:
            self._cycles.clear()
            self._cycles[cycle] = self._deal(cycle)
        order, ends, starts, batches = self._cycles[cycle]
        dealt = np.arange(self._per_batch) * self.cycle_steps + batches[place]
        which = np.searchsorted(ends, dealt, side="right")
        classes = order[which]
        rounds, groups = np.divmod(dealt - starts[which], self._needed[classes])
        images = groups[:, None] * self.images_per_class + np.arange(self.images_per_class)
        images %= self._counts[classes][:, None]
        numbers = cycle * self.cycle_steps + rounds  # each round of a class has its own permutation
        classes, numbers = (np.repeat(values, self.images_per_class) for values in (classes, numbers))
        return self._images_at(classes, numbers, images.ravel())

    @cached_property
    def _cycles(self) -> dict[int, tuple[np.ndarray, ...]]:
        return {}

    def _deal(self, cycle: int) -> tuple[np.ndarray, ...]:
        """Return the order of the classes, end and start of their groups [C], and the order of batches."""
        places = self.cycle_steps * self._per_batch

        def unused(least: int) -> int:
            return places - int(np.maximum(self._needed, least).sum())

        # The largest number of groups that all classes can have; some with this number can have one more.
        least = bisect_right(range(self.cycle_steps + 1), 0, key=lambda least: -unused(least)) - 1
        order = permutation(len(self._counts), hash_key(self.seed, _CLASSES), cycle)
        groups = np.maximum(self._needed, least)[order]
        groups[np.flatnonzero(groups == least)[: unused(least)]] += 1
        ends = np.cumsum(groups)
        return order, ends, ends - groups, permutation(self.cycle_steps, hash_key(self.seed, _BATCHES), cycle)

    def describe(self) -> str:
        """Return a log message."""
        return (
            f"order 'classes': {self._per_batch:,} classes of {self.images_per_class} images per step; "
            f"every image is used at least once per cycle of {self.cycle_steps:,} steps "
            f"({-(-self.cycle_steps // self.steps_per_epoch):,} epochs); "
            f"{np.sum(self._counts < self.images_per_class):,} of {len(self._counts):,} classes have fewer "
            "images and repeat them"
        )


def shuffled(places: np.ndarray, counts: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return what random permutations of 0..count - 1 have at these places, int64 [n]; keys: uint64 [n].

    The swap-or-not shuffle (Hoang, Morris and Rogaway, CRYPTO 2012) needs no memory for permutations: each
    round pairs x with (pivot - x) mod count, and swaps a pair by the hash of its larger value.
    """
    for number in range(_ROUNDS):
        pivots = splitmix64_of(keys ^ np.uint64(number))
        partners = (pivots % counts.astype(np.uint64)).astype(np.int64) - places
        partners += counts * (partners < 0)
        draws = splitmix64_of(pivots ^ np.maximum(places, partners).astype(np.uint64))
        places = np.where(draws < np.uint64(2**63), places, partners)
    return places
