"""Verification of all pairs of labelled embeddings, as MFR-ALL of insightface: exact TAR at FAR.

Scores are cosines: float32 products of normalised embeddings, rounded to multiples of 2^-20. The scores of
all N(N-1)/2 pairs are counted in two histograms with one bin per multiple. So TAR, FAR and thresholds are
exact on this grid, and the memory does not depend on the number of pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from plsc.data.native import function
from plsc.errors import DataError
from plsc.evaluate.curves import area_under, equal_error_rate
from plsc.evaluate.groups import GroupRates, Groups, count, rates_at
from plsc.evaluate.identification import norms_of
from plsc.evaluate.report import Table
from plsc.evaluate.verification import FARS, GRID, PairRates
from plsc.machine import Counter
from plsc.parallel.collectives import sum_over_ranks
from plsc.parallel.world import World

BINS = 2 * GRID + 1  # scores -1, -1 + 1 / GRID, ..., 1
TILE = 4096  # embeddings per side of a tile of scores
SMALLER_FARS = (1e-7, 1e-8, 1e-9)  # reported, besides FARS, if there are enough different pairs
_MOST = 2**32 - 1  # scores that 32-bit counts can hold


@dataclass(frozen=True)
class AllPairsResult(PairRates):
    """The result of `all_pairs`; rates are fractions, 0..1. A pair is accepted if score >= threshold."""

    METRICS: ClassVar = ("auc",)

    tar_at_far: dict[float, float]
    threshold_at_far: dict[float, float]  # the lowest multiple of 2^-20 with at most this FAR; above 1: none
    unresolved_fars: tuple[float, ...]  # FARs below 1 / negatives: their TAR is that of zero false accepts
    eer: float  # where FAR = 1 - TAR on the ROC curve, interpolated linearly
    auc: float
    images: int
    classes: int
    pairs: int
    positives: int
    negatives: int
    same: np.ndarray = field(repr=False, compare=False)  # pairs per score, int64 [2^21 + 1], from score -1
    different: np.ndarray = field(repr=False, compare=False)

    def summary(self) -> str:
        """Return the TAR at the lowest resolved FAR for the log."""
        far = min(self._told_fars())
        return (
            f"TAR {self.tar_at_far[far]:.4f} at FAR {far:g}, EER {self.eer:.4f} ({self.pairs:,} pairs of "
            f"{self.images:,} images)"
        )

    def roc(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ``(far, tar, threshold)``, float64 [K + 1] for K distinct scores, from (0, 0) to (1, 1)."""
        return _roc(self.same, self.different)

    def _choices(self) -> list[str]:
        return [
            "Each image is compared with every other once. Scores are cosines, of float32 products, "
            "rounded to multiples of 2^-20; a score at the threshold is accepted.",
            "TAR at FAR: at the lowest threshold with at most this FAR. EER: where FAR equals 1 - TAR, "
            "interpolated on the ROC curve.",
        ]

    def _tables(self) -> list[Table]:
        numbers = (self.images, self.classes, self.pairs, self.positives, self.negatives)
        header = ("images", "classes", "pairs", "same", "different", "AUC", "EER")
        row = [*(f"{number:,}" for number in numbers), f"{self.auc:.6f}", f"{self.eer:.6f}"]
        return [Table(header, [row]), self.rates(digits=6)]

    def _pictures(self, name: str, stem: str) -> dict[str, Callable[[Path], None]]:
        from plsc.evaluate.plots import plot_counted_scores, plot_roc_curves  # matplotlib is slow to import

        far, tar, _ = self.roc()
        wanted = np.geomspace(1 / self.negatives, 1, 2000)  # points on a logarithmic axis
        few = np.unique(np.searchsorted(far, wanted, side="right") - 1)
        curve = {f"{name}  (AUC {self.auc:.3f})": (far[few], tar[few], 1 / self.negatives)}
        used = np.flatnonzero(self.same + self.different)
        counts = used / GRID - 1, self.same[used], self.different[used]
        threshold = self.threshold_at_far[min(self._told_fars())]
        return {
            f"{stem}_roc.png": lambda path: plot_roc_curves(curve, path),
            f"{stem}_scores.png": lambda path: plot_counted_scores(*counts, path, threshold),
        }

    def _told_fars(self) -> list[float]:
        return self.resolved_fars() or [max(FARS)]


def all_pairs(
    embeddings: np.ndarray,
    labels: np.ndarray,
    world: World | None = None,
    device: torch.device | str = "cpu",
) -> AllPairsResult:
    """Compare every embedding with every other; a collective if `world` has several ranks.

    The tiles of the score matrix are dealt to the ranks. The counts do not depend on the number of ranks.

    Args:
        embeddings: [N, D], not necessarily normalised, the same on every rank; may be memory-mapped.
        labels: int64 [N]; two embeddings with the same label are a same pair.
        world: the ranks that share the work, each on its device; None: this process alone, on `device`.

    Raises:
        DataError: the shapes do not match, an embedding is not finite, or the pairs are all same or all
            different.
    """
    labels, world = np.asarray(labels), world or World.single(str(device))
    norms = norms_of(embeddings, "image", labels)
    if not 1 < len(np.unique(labels)) < len(labels):
        raise DataError("verification needs same and different pairs; there are none of a kind")
    tiles = _Tiles(embeddings, labels, norms, world.device)
    with _exact_products(), _counter(world.device) as counter:
        progress = Counter("all pairs: multiplied", len(tiles), "tiles")
        for scores, first, split, *_ in tiles.scores(world.rank, world.size):
            counter.add(scores, first, split)
            if world.is_main:  # it stands for all ranks
                progress.add(world.size)
        counts = torch.stack(counter.counts())
    same, different = sum_over_ranks(counts.to(world.device), world.head_group).cpu().numpy()
    return result_of(same, different, len(labels), len(np.unique(labels)))


def all_pair_rates(
    embeddings: np.ndarray, labels: np.ndarray, groups: Groups, result: AllPairsResult, world: World
) -> GroupRates:
    """Return TAR and FAR per group at the thresholds of `all_pairs`, by its tiles; a collective."""
    fars, size = result._told_fars(), len(groups.names)
    limits = [round(result.threshold_at_far[far] * GRID) for far in fars]
    tiles = _Tiles(embeddings, labels, norms_of(embeddings, "image"), world.device)
    of = torch.from_numpy(groups.of).to(world.device, torch.int32)
    counts = torch.zeros(size + 1, 2, len(fars) + 1, dtype=torch.int64, device=world.device)
    with _exact_products():
        for scores, first, split, rows, columns in tiles.scores(world.rank, world.size):
            bins = scores.mul_(GRID).clamp_(-GRID, GRID).round_().to(torch.int32)
            begin, end = (torch.from_numpy(limit).to(bins.device)[:, None] for limit in (first, split))
            column = torch.arange(bins.shape[1], device=bins.device)
            own = of[rows][:, None].where(column >= begin, -1)  # on and below the diagonal: no pairs
            counts += count(bins, own, of[columns], column < end, limits, size)
    return rates_at(groups, sum_over_ranks(counts, world.head_group).cpu(), fars)


def result_of(same: np.ndarray, different: np.ndarray, images: int, classes: int) -> AllPairsResult:
    """Return the metrics of histograms of the scores of same and of different pairs, int64 [2^21 + 1] each.

    Bin b holds the pairs with score b / 2^20 - 1.
    """
    positives, negatives = int(same.sum()), int(different.sum())
    true_accepts, false_accepts = _accepts(same), _accepts(different)
    fars = (*FARS, *(far for far in SMALLER_FARS if 1 / negatives <= far))
    rates = false_accepts / negatives
    # The rates fall with the threshold: the first bin with at most this rate has the lowest threshold.
    chosen = {far: int(np.searchsorted(-rates, -far, side="left")) for far in fars}
    far, tar, _ = _roc(same, different)
    return AllPairsResult(
        tar_at_far={far: int(true_accepts[bin]) / positives for far, bin in chosen.items()},
        threshold_at_far={far: (bin - GRID) / GRID for far, bin in chosen.items()},
        unresolved_fars=tuple(far for far in fars if 1 / negatives > far),
        eer=equal_error_rate(far, tar),
        auc=area_under(far, tar),
        images=images,
        classes=classes,
        pairs=positives + negatives,
        positives=positives,
        negatives=negatives,
        same=same,
        different=different,
    )


def _accepts(counts: np.ndarray) -> np.ndarray:
    """Return the number of pairs at or above each bin, and 0 above all, int64 [bins + 1]."""
    return np.append(counts[::-1].cumsum()[::-1], 0)


def _roc(same: np.ndarray, different: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    bins = np.append(np.flatnonzero(same + different), len(same))[::-1]  # the highest score first
    true_accepts, false_accepts = _accepts(same)[bins], _accepts(different)[bins]
    return false_accepts / false_accepts[-1], true_accepts / true_accepts[-1], (bins - GRID) / GRID


_Tile = tuple[Tensor, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class _Tiles:
    """The tiles of the upper triangle of the score matrix of the embeddings, sorted by label.

    After sorting, the columns right of the diagonal begin with those of the same label in every row.
    """

    def __init__(
        self, embeddings: np.ndarray, labels: np.ndarray, norms: np.ndarray, device: torch.device
    ) -> None:
        self._embeddings, self._norms = embeddings, norms
        self._order = np.argsort(labels, kind="stable")
        ranked = labels[self._order]
        self._end_of_label = np.searchsorted(ranked, ranked, side="right")
        self._device = device
        self._buffer = torch.empty(min(TILE, len(labels)) ** 2, device=device)

    def __len__(self) -> int:
        blocks = -(-len(self._order) // TILE)
        return blocks * (blocks + 1) // 2

    def scores(self, rank: int, ranks: int) -> Iterator[_Tile]:
        """Yield this rank's tiles, float32 [r, c] on the device, with `first` and `split`, int64 [r].

        In row i, columns first[i] to split[i] - 1 are same pairs, the following ones different pairs.
        Then the numbers of the embeddings of the rows, int64 [r], and of the columns, int64 [c]. The next
        tile overwrites the scores.
        """
        total = len(self._order)
        starts = range(0, total, TILE)
        places = ((top, left) for top in starts for left in starts if left >= top)
        current = -1
        for top, left in islice(places, rank, None, ranks):
            if top != current:
                current, rows = top, self._unit(top)
            columns = rows if left == top else self._unit(left)
            scores = self._buffer[: len(rows) * len(columns)].view(len(rows), len(columns))
            torch.mm(rows, columns.T, out=scores)  # with out=, autocast does not apply
            indices = np.arange(top, top + len(rows))
            first = np.clip(indices + 1 - left, 0, len(columns))
            split = np.clip(self._end_of_label[indices] - left, first, len(columns))
            yield scores, first, split, self._order[indices], self._order[left : left + len(columns)]

    def _unit(self, start: int) -> Tensor:
        """Return normalised embeddings, float32 [at most TILE, D]."""
        chosen = self._order[start : start + TILE]
        unit = np.empty((len(chosen), self._embeddings.shape[1]), np.float32)
        # In float64, without a copy in float64: the norm of float32 values can exceed float32.
        np.divide(self._embeddings[chosen], self._norms[chosen, None], out=unit, casting="same_kind")
        return torch.from_numpy(unit).to(self._device)


class _TorchCounter:
    """Counts the rounded scores of tiles; the reference implementation, on any device."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(2, BINS, dtype=torch.int64, device=device)

    def add(self, scores: Tensor, first: np.ndarray, split: np.ndarray) -> None:
        """Add a tile of `_Tiles.scores`."""
        bins = (scores * GRID).clamp_(-GRID, GRID).round_().to(torch.int32).add_(GRID)
        if not split.any():
            self._counts[1] += torch.bincount(bins.view(-1), minlength=BINS)
            return
        column = torch.arange(bins.shape[1], device=bins.device)
        begin, end = (torch.from_numpy(limit).to(bins.device)[:, None] for limit in (first, split))
        is_different = column >= end
        self._counts[0] += torch.bincount(bins[(column >= begin) & ~is_different], minlength=BINS)
        self._counts[1] += torch.bincount(bins[is_different], minlength=BINS)

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return the counts of same and of different pairs, int64 [BINS] each."""
        return self._counts[0], self._counts[1]


class _NativeCounter:
    """The same in C, with a histogram per thread."""

    def __init__(self, call: Callable[..., int], pool: ThreadPoolExecutor, threads: int) -> None:
        self._call, self._pool = call, pool
        self._total = np.zeros((2, BINS), np.int64)
        self._recent = np.zeros((threads, 2, BINS), np.uint32)
        self._scores = 0  # in `recent`

    def add(self, scores: Tensor, first: np.ndarray, split: np.ndarray) -> None:
        """Add a tile of `_Tiles.scores`."""
        if self._scores + scores.numel() > _MOST:
            self._flush()
        self._scores += scores.numel()
        for done in [
            self._pool.submit(self._add_part, t, scores, first, split) for t in range(len(self._recent))
        ]:
            done.result()

    def _add_part(self, thread: int, scores: Tensor, first: np.ndarray, split: np.ndarray) -> None:
        rows, columns = scores.shape
        cuts = np.linspace(0, rows, len(self._recent) + 1).astype(int)
        start, stop = int(cuts[thread]), int(cuts[thread + 1])
        self._call(
            scores.data_ptr() + 4 * start * columns, stop - start, columns,
            first[start:].ctypes.data, split[start:].ctypes.data,
            self._recent[thread, 0].ctypes.data, self._recent[thread, 1].ctypes.data,
        )  # fmt: skip

    def _flush(self) -> None:
        for counts in self._recent:
            self._total += counts
        self._recent[:] = 0
        self._scores = 0

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return the counts of same and of different pairs, int64 [BINS] each."""
        self._flush()
        return torch.from_numpy(self._total[0]), torch.from_numpy(self._total[1])


_COUNT = (c_void_p, c_int64, c_int64, *[c_void_p] * 4)


@contextmanager
def _counter(device: torch.device) -> Iterator[_TorchCounter | _NativeCounter]:
    call = function("plsc_count_scores", _COUNT) if device.type == "cpu" else None
    if call is None:
        yield _TorchCounter(device)
        return
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, "count scores") as pool:
        yield _NativeCounter(call, pool, threads)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Compute float32 products in float32 inside the block, whatever TF32 or bfloat16 setting is active."""
    mkldnn = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    backends = (torch.backends.cuda.matmul, mkldnn)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
