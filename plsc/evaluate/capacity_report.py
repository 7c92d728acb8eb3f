"""What a gallery holds, for reports: a figure, a table and a picture, with measured values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.evaluate.capacity import MOST_CLAIMED, Capacity, Holding, measure_capacity
from plsc.evaluate.report import Result, Table

_MOST_IMAGES = 10_000  # 6 seconds
_SHARES = (0.9, 0.7, 0.5)  # of the pairs of a class
_DRAWS = 20  # galleries per measured FPIR


@dataclass(frozen=True)
class CapacityResult(Result):
    """What a gallery of one image per identity holds, for a report; `evaluate_capacity` returns it."""

    capacity: Capacity
    holding: Holding | None  # None: these data cannot say
    threshold: float  # that of holding, if any
    measured: dict[int, float]  # FPIR of galleries of these classes at the threshold, by their size

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        holds = None if self.holding is None else self.holding._asdict()
        measured = {"holds": holds, "threshold": self.threshold, "measured_fpir": self.measured}
        return {**measured, "table": self.capacity.as_dict()}

    def summary(self) -> str:
        """Return the figure that models are compared by."""
        known = f"one image per identity, from {self.capacity.classes:,} classes"
        if self.holding is None:
            return f"these data cannot say how many identities a gallery holds ({known})"
        identities, fpir, threshold = self.holding
        return (
            f"holds at least {identities:,} identities at FPIR {fpir:g}, threshold {threshold:.4f} ({known})"
        )

    def _choices(self) -> list[str]:
        return [
            "At least: 95 % confidence, at the highest threshold that accepts 90 % of the pairs of a "
            "class, and the lowest FPIR that so many classes can show.",
            f"The classes must not have been trained. {self.capacity.images:,} images of "
            f"{self.capacity.classes:,} classes, without distractors.",
            f"Measured: mean over {_DRAWS} galleries of these classes, of one image each.",
        ]

    def _tables(self) -> list[Table]:
        rows, unclaimed = [], f"above {MOST_CLAIMED:g}: not claimed"
        for size in _sizes(self._largest()):
            estimate, low, high = self.capacity.fpir(self.threshold, size)
            chosen = self.capacity.threshold(0.01, size)
            rows.append([
                f"{size:,}",
                "cannot say" if estimate is None else f"{estimate:.4f}",
                f"{low:.4f} to {high:.4f}" if (estimate or low) <= MOST_CLAIMED else unclaimed,
                f"{self.measured[size]:.4f}" if size in self.measured else "",
                "cannot say" if chosen is None else f"{chosen:.4f}",
            ])  # fmt: skip
        header = ["Identities", "FPIR", "90 % interval", "Measured FPIR", "Threshold for FPIR 0.01"]
        text = f"{self.summary()}; FPIR at threshold {self.threshold:.4f}"
        held = [
            [f"{fpir:g}", *(self._held(fpir, share) for share in _SHARES)]
            for fpir in (0.01, 0.02, 0.05, 0.1, 0.2)
            if fpir * self.capacity.classes >= 6
        ]
        shares = [f"{100 * share:.0f} % of the pairs of a class" for share in _SHARES]
        return [
            Table(header, rows, f"{text[0].upper()}{text[1:]}"),
            Table(["FPIR", *shares], held, "Identities held at least, by FPIR and what is accepted"),
        ]

    def _pictures(self, name: str, stem: str) -> dict[str, Callable[[Path], None]]:
        from plsc.evaluate.plots import plot_capacity  # imports matplotlib

        sizes = np.geomspace(5, self._largest(), 100).astype(int).tolist()
        curve = {size: self.capacity.fpir(self.threshold, size) for size in sizes}
        return {"capacity.png": lambda path: plot_capacity(curve, self.measured, path)}

    def _held(self, fpir: float, accepted: float) -> str:
        found = self.capacity.holds(fpir, accepted=accepted)
        return "cannot say" if found is None else f"{found.identities:,}"

    def _largest(self) -> int:
        held = self.holding.identities if self.holding is not None else 0
        return max(4 * self.capacity.classes, 2 * min(held, 2**30))


def _sizes(largest: int) -> list[int]:
    """Return 10, 30, 100, 300, ... identities."""
    return [step * 10**power for power in range(1, 11) for step in (1, 3) if step * 10**power <= largest]


def evaluate_capacity(embeddings: np.ndarray, labels: np.ndarray) -> CapacityResult:
    """Measure the capacity, and the FPIR of galleries of these classes to compare it with.

    Arguments and errors as of `measure_capacity`. Uses at most 10,000 images, of classes drawn at random.
    """
    embeddings, labels = np.asarray(embeddings), np.asarray(labels)
    _, number, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.random.default_rng(0).permutation(len(counts))
    kept = np.zeros(len(counts), bool)
    kept[order[np.cumsum(counts[order]) <= _MOST_IMAGES]] = True
    embeddings, labels = embeddings[kept[number]], labels[kept[number]]
    capacity = measure_capacity(embeddings, labels)
    holding = capacity.holds()
    threshold = capacity.strictest(0.1, capacity.classes) if holding is None else holding.threshold
    sizes = [size for size in _sizes(capacity.classes) if size <= capacity.classes / 2]
    return CapacityResult(capacity, holding, threshold, measure_fpir(embeddings, labels, threshold, sizes))


def measure_fpir(
    embeddings: np.ndarray, labels: np.ndarray, threshold: float, sizes: Sequence[int]
) -> dict[int, float]:
    """Return the FPIR by size of galleries, of one image of each of so many classes; the others search.

    The mean over 20 drawn galleries, with the same weight per class.
    """
    _, number, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(number, kind="stable")
    unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
    starts, generator = np.cumsum(counts) - counts, np.random.default_rng(0)
    sums, weight, largest = np.zeros(len(sizes)), 1 / counts[number], max(sizes, default=0)
    for _ in range(_DRAWS):
        drawn = generator.permutation(len(counts))  # classes in the order in which they are enrolled
        own = np.argsort(drawn)[number]  # the place of the class of each image
        drawn = drawn[:largest]
        accepted = unit @ unit[order[starts[drawn] + generator.integers(counts[drawn])]].T >= threshold
        is_mated = np.flatnonzero(own < largest)
        accepted[is_mated, own[is_mated]] = False
        first = np.where(accepted.any(1), accepted.argmax(1), len(counts))
        for place, size in enumerate(sizes):
            is_probe = own >= size
            sums[place] += weight[is_probe & (first < size)].sum() / weight[is_probe].sum()
    return dict(zip(sizes, (sums / _DRAWS).tolist(), strict=True))
