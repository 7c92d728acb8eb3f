"""Train on several datasets: a joined source, and steps with a fixed number of samples of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from plsc.data.decode import Image
from plsc.data.order import BatchPlan
from plsc.data.sources.base import Source
from plsc.errors import DataError, OptionError


class JoinedSource:
    """The samples of several sources, concatenated; class numbers of each source follow those before it.

    class_nums: number of classes per source. A label outside its own source's classes is a bad sample
    (DataError), never a class of another source.
    """

    def __init__(self, names: Sequence[str], sources: Sequence[Source], class_nums: Sequence[int]) -> None:
        self._names = list(names)
        self._sources = list(sources)
        self._class_nums = list(class_nums)
        self._starts = list(accumulate(map(len, sources), initial=0))
        self._first_classes = list(accumulate(class_nums, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> tuple[Image, int]:
        which, inside = self._find(index)
        try:
            image, label = self._sources[which][inside]
        except DataError as error:
            raise error.at(self._names[which]) from error
        if not 0 <= label < self._class_nums[which]:
            raise DataError(
                f"{self.name(index)}: label {label} is outside 0..{self._class_nums[which] - 1}", kind="label"
            )
        return image, self._first_classes[which] + label

    def name(self, index: int) -> str:
        """Return the name of the dataset and the sample's name in it."""
        which, inside = self._find(index)
        return f"{self._names[which]}: {self._sources[which].name(inside)}"

    def labels(self) -> np.ndarray:
        """Return all labels, int64 [N]; -1 for a label outside its source's classes."""
        parts = []
        for source, first, count in zip(self._sources, self._first_classes, self._class_nums, strict=False):
            labels = source.labels()
            is_good = (labels >= 0) & (labels < count)
            parts.append(np.where(is_good, labels + first, -1))
        return np.concatenate(parts)

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        which = bisect_right(self._starts, index) - 1
        return which, index - self._starts[which]


@dataclass(frozen=True)
class Share:
    """The part of a dataset in each step: `per_step` images, in the order of its own epochs.

    plan: of this dataset alone; only its order of samples is used.
    """

    plan: BatchPlan
    per_step: int

    def indices(self, step: int) -> np.ndarray:
        """Return the samples of a step, counted from the start of the run: int64 [per_step].

        The dataset's epochs follow each other without a gap, so a step may span two of them.
        """
        epochs, places = np.divmod(
            np.arange(step * self.per_step, (step + 1) * self.per_step), self.plan.num_samples
        )
        parts = [self.plan.samples_at(int(e), places[epochs == e]) for e in np.unique(epochs)]
        return np.concatenate(parts)


@dataclass(frozen=True)
class MixturePlan:
    """The steps of a run on several datasets, in the numbering of `JoinedSource`.

    Every step has the same number of images of each dataset, so its samples depend only on its number. Each
    dataset has its own epochs. An epoch of the run has `steps_per_epoch` steps.

    The samples of each dataset are distributed over the ranks as evenly as possible. The batch sizes of the
    ranks differ by at most one.
    """

    shares: tuple[Share, ...]
    ranks: int
    steps_per_epoch: int

    @cached_property
    def num_samples(self) -> int:
        """Number of samples of all datasets."""
        return sum(share.plan.num_samples for share in self.shares)

    @cached_property
    def global_batch(self) -> int:
        """Number of images per step over all ranks."""
        return sum(share.per_step for share in self.shares)

    @property
    def largest_batch(self) -> int:
        """Largest number of samples per rank and step."""
        return -(-self.global_batch // self.ranks)

    def indices(self, epoch: int, step: int, rank: int) -> np.ndarray:
        """Return this rank's samples of a step of an epoch, int64.

        The datasets are interleaved, so that each part of a batch has images of all of them if possible.
        """
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} is outside 0..{self.steps_per_epoch - 1}")
        parts, places, before, first = [], [], 0, 0
        for share in self.shares:
            dealt = np.arange(before, before + share.per_step) % self.ranks
            sizes = np.bincount(dealt, minlength=self.ranks)
            start, size = int(sizes[:rank].sum()), int(sizes[rank])
            every = share.indices(self.draw_epoch(epoch, step))
            parts.append(first + every[start : start + size])
            places.append((np.arange(size) + 0.5) / max(1, size))
            before += share.per_step
            first += share.plan.num_samples
        order = np.argsort(np.concatenate(places), kind="stable")
        return np.concatenate(parts)[order]

    def draw_epoch(self, epoch: int, step: int) -> int:
        """Return the number that seeds augmentation in addition to the sample: the step of the run.

        A small dataset is repeated many times per epoch of the run, and is augmented differently each time.
        """
        return epoch * self.steps_per_epoch + step


def split_batch(global_batch: int, weights: Sequence[float]) -> list[int]:
    """Return the number of images per step of each dataset: proportional to the weights, at least one.

    Rounded by largest remainders; ties go to the larger weight, then to the first dataset. A dataset that
    would get none takes one from the largest, among equal ones from that with the least weight. Raises
    OptionError if there are more datasets than images.
    """
    if global_batch < len(weights):
        raise OptionError(
            f"a step of {global_batch} images cannot contain one image of each of {len(weights)} datasets; "
            "use a larger batch"
        )
    largest = max(weights)  # divide by it, because a sum of huge weights would overflow
    total = sum(weight / largest for weight in weights)
    wanted = [global_batch * (weight / largest) / total for weight in weights]
    counts = [int(share) for share in wanted]
    by_remainder = sorted(range(len(wanted)), key=lambda k: (counts[k] - wanted[k], -weights[k]))
    for k in by_remainder[: global_batch - sum(counts)]:
        counts[k] += 1
    for k, count in enumerate(counts):
        if count == 0:
            giver = max(range(len(counts)), key=lambda j: (counts[j], -weights[j], j))
            counts[giver] -= 1
            counts[k] = 1
    return counts
