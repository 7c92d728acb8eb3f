"""Who reads which sample, and when: a pure function of the seed, the epoch and a few counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from plsc.errors import DataError, OptionError, suggest

LAST_BATCH_CHOICES = ("pad", "keep", "drop")


@dataclass(frozen=True)
class BatchPlan:
    """The order of all samples, cut by global batch and then by rank.

    The global batches do not depend on ``ranks``, so a run goes on with another number of them. What
    happens to the last batch of an epoch: ``pad`` fills it with samples from the start of the same
    epoch's order (cyclically when there are fewer samples than ``global_batch``), ``keep`` leaves it
    smaller (some ranks may then get none), ``drop`` leaves it out. Every rank has the same number of
    steps.

    Raises DataError if there is no sample, or if ``drop`` leaves no step.
    """

    num_samples: int
    global_batch: int
    ranks: int
    seed: int
    last_batch: str = "pad"
    shuffle: bool = True
    _orders: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.ranks < 1:
            raise OptionError(
                "the global batch and the number of ranks must be at least 1, "
                f"got {self.global_batch} and {self.ranks}"
            )
        if self.last_batch not in LAST_BATCH_CHOICES:
            known = suggest(self.last_batch, LAST_BATCH_CHOICES)
            raise OptionError(f"unknown last_batch {self.last_batch!r}; {known}")
        if self.num_samples < 1:
            raise DataError("the dataset holds no samples; check the dataset folder")
        if self.steps_per_epoch == 0:
            raise DataError(
                f"last_batch 'drop' leaves no step: {self.num_samples} samples are fewer than the "
                f"global batch of {self.global_batch}; use a smaller batch, 'pad' or 'keep'"
            )

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in each epoch, the same on every rank."""
        return count_steps(self.num_samples, self.global_batch, self.last_batch)

    def global_indices(self, epoch: int, step: int) -> np.ndarray:
        """Return the sample indices of a step's global batch, int64, in order."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} is outside 0..{self.steps_per_epoch - 1}")
        start = step * self.global_batch
        stop = start + self.global_batch
        if self.last_batch == "keep":
            stop = min(stop, self.num_samples)
        return self._order(epoch)[np.arange(start, stop) % self.num_samples]

    def indices(self, epoch: int, step: int, rank: int) -> np.ndarray:
        """Return this rank's contiguous part of the global batch; sizes differ by at most one."""
        batch = self.global_indices(epoch, step)
        return batch[len(batch) * rank // self.ranks : len(batch) * (rank + 1) // self.ranks]

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = self._new_order(epoch)
        return self._orders[epoch]

    def _new_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        # Raw Philox output never changes between numpy versions; Generator.permutation may, and
        # then a resumed run would see other batches.
        key = np.array([self.seed % 2**64, epoch % 2**64], dtype=np.uint64)
        draws = np.random.Philox(key=key).random_raw(self.num_samples)
        # Each draw carries its index in its lowest bits: no ties, and a plain sort beats argsort.
        index_bits = np.uint64(2 ** (self.num_samples - 1).bit_length() - 1)
        draws = (draws & ~index_bits) | np.arange(self.num_samples, dtype=np.uint64)
        draws.sort()
        return (draws & index_bits).astype(np.int64)


def count_steps(num_samples: int, global_batch: int, last_batch: str) -> int:
    """Return how many global batches an epoch of ``num_samples`` has."""
    return num_samples // global_batch if last_batch == "drop" else -(-num_samples // global_batch)
