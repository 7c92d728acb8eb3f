"""The order of samples and their distribution over the ranks: a pure function of seed, epoch and counts."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from plsc.errors import DataError, OptionError
from plsc.seeds import hash_key

# Parts of the keys, so that the random sequences are independent.
_BLOCKS, _POOL, _IMAGES, _CLASSES, _BATCHES = range(5)
_ROUNDS = 16  # of `shuffled`: the place of an image is uniform up to 2^-16


@dataclass(frozen=True)
class BatchPlan:
    """The order of all samples, split into global batches and then by rank.

    The global batches do not depend on ``ranks``, so a run can resume on another number of ranks. Every rank
    has the same number of steps.

    Attributes:
        last_batch: the incomplete last batch of an epoch. ``pad`` fills it with the first samples of the
            epoch's order (cyclically if there are fewer samples than ``global_batch``). ``keep`` leaves it
            smaller; some ranks may then have no sample. ``drop`` leaves it out.
        order: ``global`` shuffles all samples, ``block`` shuffles as BlockOrder does, with ``block_samples``
            and ``pool_samples``, ``sequential`` does not shuffle.
        limit: limit of the steps per epoch; see `limited`.

    Raises:
        DataError: there are no samples, or ``drop`` leaves no step.
    """

    num_samples: int
    global_batch: int
    ranks: int
    seed: int
    last_batch: str = "pad"
    order: str = "global"
    block_samples: int = 1024
    pool_samples: int = 65536
    limit: int | float = 1.0

    def __post_init__(self) -> None:
        if self.order == "block" and not 1 <= self.block_samples <= self.pool_samples:
            raise OptionError(
                f"block_samples is {self.block_samples}; expected 1 to pool_samples, {self.pool_samples}"
            )
        if self.steps_per_epoch == 0:
            raise DataError(
                f"{self.num_samples} samples give no step with a global batch of {self.global_batch}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch, the same on every rank."""
        return limited(count_steps(self.num_samples, self.global_batch, self.last_batch), self.limit)

    def global_indices(self, epoch: int, step: int) -> np.ndarray:
        """Return the sample indices of a step's global batch, int64, in order."""
        start = step * self.global_batch
        stop = start + self.global_batch
        if self.last_batch == "keep":
            stop = min(stop, self.num_samples)
        return self.samples_at(epoch, np.arange(start, stop) % self.num_samples)

    def indices(self, epoch: int, step: int, rank: int) -> np.ndarray:
        """Return this rank's contiguous part of the global batch; sizes differ by at most one.

        epoch, step: count from 0, as `Position` does; step: within the epoch. Log lines count from 1.
        """
        batch = self.global_indices(epoch, step)
        return batch[len(batch) * rank // self.ranks : len(batch) * (rank + 1) // self.ranks]

    def draw_epoch(self, epoch: int, step: int) -> int:
        """Return the number that seeds the changes of an image in addition to the sample: the epoch."""
        return epoch

    def samples_at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at the given positions of an epoch's order, int64."""
        if self.order == "sequential":
            return positions
        if self.order == "block":
            return self._blocks.samples_at(epoch, positions)
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = permutation(self.num_samples, self.seed, epoch)
        return self._orders[epoch][positions]

    @cached_property
    def _orders(self) -> dict[int, np.ndarray]:
        return {}

    @cached_property
    def _blocks(self) -> BlockOrder:
        return BlockOrder(self.num_samples, self.seed, self.block_samples, self.pool_samples)


def count_steps(num_samples: int, global_batch: int, last_batch: str) -> int:
    """Return the number of global batches per epoch."""
    return num_samples // global_batch if last_batch == "drop" else -(-num_samples // global_batch)


def limited(count: int, limit: int | float) -> int:
    """Return how many of `count` batches a limit leaves: an integer is a number, a float a share."""
    return min(count, limit if isinstance(limit, int) else max(1, round(count * limit)))


def is_limited(limit: int | float) -> bool:
    """Return whether a limit can leave out batches: 1.0 means all, the integer 1 means one."""
    return isinstance(limit, int) or limit < 1


def spread(labels: np.ndarray, batch: float, limit: int | float, at_least: int = 1) -> np.ndarray:
    """Return which samples to evaluate under a limit of batches: sorted indices, int64 [n].

    They are spread evenly over the labels, so that no class dominates in a sorted file. batch: samples per
    step of all ranks. at_least: number of samples that the evaluation needs.
    """
    count = len(labels)
    if not is_limited(limit):
        return np.arange(count)
    batches = limited(math.ceil(count / batch), limit)
    wanted = min(count, max(at_least, int(batches * batch)))
    by_label = np.argsort(labels, kind="stable")
    return np.sort(by_label[np.linspace(0, count - 1, wanted).round().astype(np.int64)])


class BlockOrder:
    """Shuffle blocks of consecutive samples, and then pools of the resulting order.

    The samples are split into blocks of ``block_samples``; the last one may be smaller. The permuted blocks
    are concatenated and split into pools of ``pool_samples`` positions, and each pool is shuffled. A pool
    reads at most pool_samples / block_samples + 1 blocks. The sample at a position depends only on
    (seed, epoch, position), so a run can resume at any step.

    The memory is one pool and sixteen bytes per block.
    """

    def __init__(self, num_samples: int, seed: int, block_samples: int, pool_samples: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.block_samples = block_samples
        self.pool_samples = pool_samples
        self._epoch: int | None = None
        self._pool: tuple[int, np.ndarray] | None = None
        self._blocks = self._starts = np.empty(0, dtype=np.int64)

    def samples_at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at the given positions of an epoch's order, int64."""
        if epoch != self._epoch:
            self._start(epoch)
        found = np.empty(len(positions), dtype=np.int64)
        pools = positions // self.pool_samples
        for pool in np.unique(pools):
            chosen = pools == pool
            offsets = positions[chosen] - pool * self.pool_samples
            found[chosen] = self._samples_of(epoch, int(pool))[offsets]
        return found

    def _start(self, epoch: int) -> None:
        size, count = self.block_samples, -(-self.num_samples // self.block_samples)
        self._blocks = permutation(count, hash_key(self.seed, _BLOCKS), epoch)
        # All blocks but the last have full size; positions after the last one are shifted.
        self._starts = np.arange(count, dtype=np.int64) * size
        self._starts[self._blocks.argmax() + 1 :] -= count * size - self.num_samples
        self._epoch, self._pool = epoch, None

    def _samples_of(self, epoch: int, pool: int) -> np.ndarray:
        if self._pool is None or self._pool[0] != pool:
            first = pool * self.pool_samples
            count = min(self.pool_samples, self.num_samples - first)
            key = hash_key(self.seed, _POOL, epoch)
            positions = first + permutation(count, key, pool)
            rows = np.searchsorted(self._starts, positions, side="right") - 1
            samples = self._blocks[rows] * self.block_samples + positions - self._starts[rows]
            self._pool = pool, samples
        return self._pool[1]


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a uniform random permutation of 0..count - 1, int64, that depends only on the arguments.

    It uses raw Philox output, which never changes between numpy versions. Generator.permutation may change,
    and a resumed run would then read other batches.
    """
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    draws = np.random.Philox(key=key).random_raw(count)
    # Each random number has its index in its lowest bits: no ties, and a plain sort is faster than argsort.
    index_bits = np.uint64(2 ** (count - 1).bit_length() - 1)
    draws = (draws & ~index_bits) | np.arange(count, dtype=np.uint64)
    draws.sort()
    return (draws & index_bits).astype(np.int64)


def splitmix64_of(values: np.ndarray) -> np.ndarray:
    """Return `plsc.seeds.splitmix64` of each uint64 value."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


# For classes with very different numbers of images: balanced, or K images per class.


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
        """Return the number that seeds the changes of an image besides the sample: the step of the run."""
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
            raise OptionError(f"the global batch size {batch} is not a multiple of images_per_class, {size}")
        if self._per_batch > class_num:
            raise DataError(
                f"data.order 'classes' needs {self._per_batch} classes with images for a global batch of "
                f"{batch}, but there are {class_num}"
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
