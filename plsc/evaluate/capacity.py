"""FPIR of galleries of any size, predicted from classes that the network never saw.

A probe of an unknown identity is a false positive if its best score against N enrolled identities, one image
each, is at least the threshold t. With q the share of identities that score at least t with a probe,

    FPIR(t, N) = 1 - E[(1 - q)^N]    over probes,       FAR(t) = E[q].

Probes differ: some have many look-alikes. If q has a gamma distribution with mean FAR and squared coefficient
of variation s ("spread"), this is, for small q, the zero term of a negative binomial distribution:

    FPIR(t, N) = 1 - (1 + s N FAR)^(-1 / s),    for s = 0: 1 - exp(-N FAR).

N may be larger than the number m of calibration classes. For each threshold, the table has, from all
between-class pairs and with the same weight per class:

- FAR.
- s: gives the FPIR of galleries of these classes, each enrolled with a probability, at most 1, that makes
  N FAR about 1. Where few probes have two look-alikes, s is shrunk to that of the next lower threshold times
  (ratio of the FARs)^0.5.
- w: of the class pairs that exceed t with some images, the share of images that does, weighted by this share;
  shrunk to that of the next lower threshold.

The variance of FAR has a term of class pairs and one of classes (Hoeffding's decomposition of a U-statistic),
FAR w / pairs + 4 s FAR^2 / m. One gallery of N identities adds s FAR^2 / N. In units of variance / FAR, FAR
is about a Poisson count. Its interval is that of Fay and Feuer (1997, "Confidence intervals for directly
standardized rates"): no model of the tail, and the rule of three where no pair exceeds t.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import numpy as np

from plsc.errors import DataError, OptionError, PlscError
from plsc.evaluate.identification import norms_of
from plsc.evaluate.report import Result, Table
from plsc.storage.disk import Size, read_record

FEWEST_CLASSES = 20
FEWEST_PAIRS = 5.0  # exceeding class pairs, and independent events among them, for a point prediction
HIGHEST_FAR = 0.05  # of the table
MOST_CLAIMED, _HALF = 0.1, 0.5  # FPIR up to which intervals hold; upper limits above say little
_ROWS = 6  # per factor of ten of the FAR
_GROWTH, _WEDGES = 0.5, 20.0  # s ~ FAR^-0.5 counts like 20 probes with two look-alikes,
_EVENTS = 4.0  # and the w of the next lower threshold like 4 class pairs
_Z90 = 1.6448536269514722  # 95 % quantile of the normal distribution
_ROUNDING = 1e-6  # above that of a cosine in float32
_SCORES = 20_000_000  # in memory


class Prediction(NamedTuple):
    """An FPIR, 0..1, with its 90 % interval; estimate None: these data give only the interval.

    The interval is claimed for an FPIR of at most 0.1: above, a few probes of low quality make it too narrow.
    """

    estimate: float | None
    low: float
    high: float

    def sentence(self, identities: int, reached: str = "score as high") -> str:
        """Return what it says of a score that is the threshold, for people: ``about 1 in 200 strangers``."""
        if self.estimate is not None:
            share = f"about {_one_in(self.estimate)}"
        elif self.high <= _HALF:
            share = f"at most {_one_in(self.high)}"
        else:  # a small lower limit would read as a small share
            share = f"at least {_one_in(self.low)}" if self.low >= MOST_CLAIMED else "an unknown share of"
        enrolled = f"among the {identities:,} enrolled" if identities > 1 else "with the one enrolled"
        return f"{share} strangers would {reached} {enrolled}"


class Holding(NamedTuple):
    """A gallery of at least so many identities has at most this FPIR at the threshold."""

    identities: int
    fpir: float
    threshold: float


class Row(NamedTuple):
    """What the calibration classes say about one threshold; rates are fractions, 0..1."""

    threshold: Annotated[float, (-1.01, 1.01)]  # cosine; a score at the threshold is accepted
    far: Annotated[float, (0, 1)]
    spread: Annotated[float, (0, 1e6)]  # s of the module
    weight: Annotated[float, (1e-9, 1)]  # w of the module
    accepted: Annotated[float, (0, 1)] | None  # share of same-class pairs; None: one image per class


class _Table(TypedDict):
    format: Literal[1]
    columns: list[str]
    classes: Size
    images: Size
    rows: list[Row]


@dataclass(frozen=True)
class Capacity:
    """FPIR of galleries by threshold and size; build it with `measure_capacity`."""

    classes: int
    images: int
    rows: tuple[Row, ...]  # by rising threshold; the last one is above all scores, with FAR 0

    def fpir(self, threshold: float, identities: int) -> Prediction:
        """Predict the FPIR of one gallery of so many identities; below the table, only the lower limit."""
        if identities < 1 or not math.isfinite(threshold):
            raise DataError(f"cannot predict the FPIR of {identities} identities at threshold {threshold}")
        if threshold < self.rows[0].threshold:
            return Prediction(None, self._predict(self.rows[0], identities).low, 1.0)
        return self._predict(self._row(threshold), identities)

    def threshold(self, fpir: float, identities: int, sure: bool = False) -> float | None:
        """Return the lowest threshold of the table with at most this FPIR; None: these data cannot say.

        Decides by the estimate or, where there is none, by the upper limit. sure: always by the upper limit.
        """

        def passes(threshold: float) -> bool:
            estimate, _, high = self.fpir(threshold, identities)
            return (high if sure or estimate is None else estimate) <= fpir

        _check(fpir)
        first = next((k for k, row in enumerate(self.rows) if passes(row.threshold)), None)
        if not first:
            return None if first is None else self.rows[0].threshold
        low, high = self.rows[first - 1].threshold, self.rows[first].threshold
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if passes(middle) else (middle, high)
        return high

    def holds(self, fpir: float | None = None, threshold: float | None = None) -> Holding | None:
        """Return how many identities a gallery holds at least (95 % confidence).

        Stricter than the upper limit of `fpir`: a pair of classes that the data do not show may exceed the
        threshold as often as two images of one class.

        Args:
            fpir: None: the lowest of 0.001, 0.002, 0.005, 0.01, ... that m classes can show for m identities:
                at least 6 / m, three times one of their pairs.
            threshold: None: the highest of the table that accepts 90 % of the same-class pairs.

        Returns None if these data cannot say: the threshold is below the table.
        """
        fpir = self._fpir(fpir)
        _check(fpir)
        if threshold is None:
            fitting = [row.threshold for row in self.rows if (row.accepted or 0.0) >= 0.9]
            threshold = max(fitting, default=-math.inf)
        if threshold < self.rows[0].threshold:
            return None
        row = self._row(threshold)
        row = row._replace(weight=max(row.weight, 1.0 if row.accepted is None else row.accepted))
        low, high = 0, 1
        while high < 2**40 and self._predict(row, high).high <= fpir:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._predict(row, middle).high <= fpir else (low, middle)
        return Holding(low, fpir, threshold)

    def strictest(self, fpir: float, identities: int) -> float:
        """Return `threshold`; where these data cannot say, that above all scores of different classes.

        `expected` has the FPIR there, which may be higher.
        """
        found = self.threshold(fpir, identities)
        return self.rows[-1].threshold if found is None else found

    def expected(self, fpir: float, identities: int) -> tuple[Prediction, str]:
        """Return the FPIR at `strictest`, and what it says, for people."""
        found = self.fpir(self.strictest(fpir, identities), identities)
        return found, found.sentence(identities, "reach the threshold")

    def warning(self, identities: int, fpir: float | None = None) -> str | None:
        """Return what to expect of a gallery of more identities than `holds` says; None if it holds them."""
        found, wanted = self.holds(fpir), self._fpir(fpir)
        held = 0 if found is None else found.identities
        if identities <= held:
            return None
        holds = f"more than the {held:,} that this model holds"
        if found is None:
            holds = f"but {self.classes:,} unseen classes are too few to tell how many may be"
        elif held == 0:
            holds = "but this model takes too many strangers for one of any number"
        return (
            f"{identities:,} images are enrolled, {holds} (FPIR {wanted:g}): "
            f"{self.expected(wanted, identities)[1]}; to know more, export it with more classes for --unseen"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        rows = [list(row) for row in self.rows]
        values = {"format": 1, "classes": self.classes, "images": self.images}
        return {**values, "columns": list(Row._fields), "rows": rows}

    @classmethod
    def from_dict(cls, values: dict[str, Any], error: type[PlscError] = DataError) -> Capacity:
        """Return the table that `as_dict` wrote. Raises `error` if it is damaged."""
        table = read_record(_Table, values, "the capacity table is damaged", error)
        thresholds = [row.threshold for row in table["rows"]]
        is_sound = FEWEST_CLASSES <= table["classes"] <= table["images"] and bool(thresholds)
        is_sound &= table["columns"] == list(Row._fields) and thresholds == sorted(set(thresholds))
        if not is_sound or table["rows"][-1].far:
            raise error("the capacity table is damaged; measure it again")
        return cls(table["classes"], table["images"], tuple(table["rows"]))

    def _fpir(self, fpir: float | None) -> float:
        steps = (step * 10.0**power for power in (-3, -2, -1) for step in (1, 2, 5))
        return next(step for step in steps if step * self.classes >= 6) if fpir is None else fpir

    def _row(self, threshold: float) -> Row:
        """Interpolate between two rows, the FAR on a logarithmic scale."""
        place = bisect_right(self.rows, threshold, key=lambda row: row.threshold) - 1
        row, after = self.rows[place], self.rows[min(place + 1, len(self.rows) - 1)]
        if threshold == row.threshold or not after.far:
            return row
        share = (threshold - row.threshold) / (after.threshold - row.threshold)
        far = row.far ** (1 - share) * after.far**share
        spread, weight = (a + share * (b - a) for a, b in zip(row[2:4], after[2:4], strict=True))
        return Row(threshold, far, spread, weight, row.accepted)

    def _predict(self, row: Row, identities: int) -> Prediction:
        pairs = self.classes * (self.classes - 1) / 2
        unit = row.weight / pairs + row.spread * row.far * (4 / self.classes + 1 / identities)
        events = row.far / unit
        fars = row.far, unit * _gamma_quantile(events, -_Z90), unit * _gamma_quantile(events + 1, _Z90)
        estimate, low, high = (_fpir(far, row.spread, identities) for far in fars)
        return Prediction(estimate if min(row.far * pairs, events) >= FEWEST_PAIRS else None, low, high)


def _one_in(rate: float) -> str:
    """Return a rate for people, with two digits."""
    if rate >= 0.095:
        return f"{100 * rate:.0f} in 100"
    return f"1 in {float(f'{1 / rate:.1e}'):,.0f}" if rate > 0 else "0 in 100"


def _fpir(far: float, spread: float, identities: int) -> float:
    expected = identities * far
    exponent = math.log1p(spread * expected) / spread if spread * expected > 1e-9 else expected
    return -math.expm1(-exponent)


def _gamma_quantile(shape: float, z: float) -> float:
    """Return a quantile of the gamma distribution, z standard deviations from the middle.

    Wilson and Hilferty (1931); for z = 1.645 and shape >= 1 within 1 %.
    """
    root = 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape)) if shape > 0 else 0.0
    return shape * max(0.0, root) ** 3


def _check(fpir: float) -> None:
    if not 0 < fpir < 1:
        raise OptionError(f"FPIR {fpir} is not between 0 and 1; use a value such as 0.01")


def capacity_of_search(capacity: Capacity | None, of_classes: bool, fpir: float | None) -> Capacity | None:
    """Return the capacity that fits what is searched; None if it is unknown, or for class weights.

    Raises OptionError if an FPIR is wanted, but the capacity is not known.
    """
    if fpir is not None:
        if of_classes:
            raise OptionError("fpir is set, but class weights are searched, whose scores are of another kind")
        if capacity is None:
            raise OptionError("fpir is set, but the model was exported without --unseen; export it again")
        _check(fpir)
    return None if of_classes else capacity


def measure_capacity(embeddings: np.ndarray, labels: np.ndarray) -> Capacity:
    """Measure the table from images of m >= 20 classes that the network was not trained on.

    Takes 2 seconds for 6,000 images of 500 classes on one core, and grows with the square of the images.

    Args:
        embeddings: [n, D], not necessarily normalised.
        labels: int64 [n]. One image per class is enough, except for `Row.accepted`.

    Raises:
        DataError: the shapes do not match, an embedding is not finite, there are too few classes, or an image
            is in two classes.
    """
    embeddings, labels = np.asarray(embeddings), np.asarray(labels)
    norms = norms_of(embeddings, "calibration image", labels)
    _, number, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if len(counts) < FEWEST_CLASSES:
        raise DataError(
            f"there are images of {len(counts)} classes; expected {FEWEST_CLASSES} unseen ones or more"
        )
    order = np.argsort(number, kind="stable")
    unit = (embeddings / norms[:, None])[order].astype(np.float32)
    grid, far, pair = _choose_thresholds(unit, number[order])
    if grid[-1] > 1:  # `_ROUNDING` above the highest score
        first, second = order[pair]
        both = f"labels {labels[first]} and {labels[second]}"
        raise DataError(f"images {first} and {second} have the same embedding, but {both}; remove one")
    enrolled = np.minimum(1, 1 / (len(counts) * far))  # probability of each class
    sums = np.zeros((4, len(grid)))
    for own, end in enumerate(np.cumsum(counts)):
        sums += _sum_class(unit[end - counts[own] : end] @ unit.T, own, number[order], counts, grid, enrolled)
    return Capacity(len(counts), len(unit), _rows(sums, grid, counts, enrolled))


def _choose_thresholds(unit: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return rising between-class scores, `_ROWS` per factor of ten, and one above all.

    Also returns about their FARs, and the pair with the highest score.
    """
    n = len(unit)
    some = np.random.default_rng(0).choice(n, min(n, 1000), replace=False)
    sample = (unit[some] @ unit.T)[number[some, None] != number]
    floor = np.quantile(sample, 1 - min(HIGHEST_FAR, 2 * _SCORES / n**2))
    found, best = [], [-math.inf, 0, 0]
    for start in range(0, n, 1000):  # each pair once
        scores = unit[start : start + 1000] @ unit[start:].T
        scores[number[start : start + 1000, None] >= number[start:]] = -math.inf
        x, y = divmod(int(scores.argmax()), scores.shape[1])
        best = max(best, [float(scores[x, y]), start + x, start + y])
        found.append(scores[scores >= floor])
    ranked = np.sort(np.concatenate(found))[::-1]
    size = max(2, round(_ROWS * math.log10(len(ranked))))
    grid = np.unique(ranked[np.geomspace(1, len(ranked), size).round().astype(int) - 1])
    grid = np.append(grid, grid[-1] + _ROUNDING).astype(np.float64)
    far = np.maximum(1, np.searchsorted(-ranked, -grid, side="right")) / (n * (n - 1) / 2)
    return grid, far, [int(place) for place in best[1:]]


def _sum_class(
    scores: np.ndarray,
    own: int,
    number: np.ndarray,
    counts: np.ndarray,
    grid: np.ndarray,
    enrolled: np.ndarray,
) -> np.ndarray:
    """Return the sums of one class for `_rows`, [4, K]; scores: of its images with all images, [images, n].

    Over other classes: the share of image pairs that exceed a threshold, and its square. Then the FPIR of the
    other classes, each enrolled with a probability, and the share of its own pairs.
    """
    images, m, size = len(scores), len(counts), len(grid)
    mean, fpir = np.zeros((size, m)), np.ones(size)
    step = max(1, 4_000_000 // (size * m))
    for start in range(0, images, step):
        part = scores[start : start + step]
        x, y = np.nonzero(part >= grid[0])
        level = np.searchsorted(grid, part[x, y], side="right") - 1
        cells = np.bincount((level * len(part) + x) * m + number[y], minlength=size * len(part) * m)
        share = cells.reshape(size, len(part), m)[::-1].cumsum(0)[::-1] / counts
        mean += share.sum(1) / images
        share[:, :, own] = 0
        fpir -= np.prod(1 - share * enrolled[:, None, None], axis=2).sum(1) / images
    same = (mean[:, own] * images - 1) / max(1, images - 1)  # without the pairs of an image with itself
    mean[:, own] = 0
    return np.stack([mean.sum(1), (mean**2).sum(1), fpir, same])


def _rows(sums: np.ndarray, grid: np.ndarray, counts: np.ndarray, enrolled: np.ndarray) -> tuple[Row, ...]:
    m, repeated = len(counts), int((counts > 1).sum())
    pairs, squares, fpir, same = sums
    far = pairs / (m * (m - 1))
    spread, weight = 0.0, float(squares[0] / pairs[0])
    rows = []
    for k, threshold in enumerate(grid):
        if far[k]:
            grown = spread * (far[max(0, k - 1)] / far[k]) ** _GROWTH
            expected = float(enrolled[k] * pairs[k] / m)
            found = _spread(expected, float(fpir[k] / m))
            known = max(0.0, pairs[k] * enrolled[k] - fpir[k])  # second and further look-alikes
            spread = float((known * found + _WEDGES * grown) / (known + _WEDGES)) if k else found
        weight = float((squares[k] / 2 + _EVENTS * weight**2) / (pairs[k] / 2 + _EVENTS * weight))
        accepted = min(1.0, max(0.0, float(same[k] / repeated))) if repeated else None  # but for rounding
        rows.append(Row(float(threshold), float(far[k]), spread, weight, accepted))
    return tuple(rows)


def _spread(expected: float, fpir: float) -> float:
    """Return the spread, at least 0, with this FPIR for this product of FAR and identities."""
    low, high = 0.0, 1000.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _fpir(expected, middle, 1) > fpir else (low, middle)
    return low


_MOST_IMAGES = 10_000  # 6 seconds


@dataclass(frozen=True)
class CapacityResult(Result):
    """What a gallery of one image per identity holds, for a report; `evaluate_capacity` returns it."""

    capacity: Capacity
    holding: Holding | None  # None: these data cannot say
    threshold: float  # that of holding, if any

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        holds = None if self.holding is None else self.holding._asdict()
        return {"holds": holds, "threshold": self.threshold, "table": self.capacity.as_dict()}

    def summary(self) -> str:
        """Return the figure that models are compared by."""
        known = f"one image per identity, from {self.capacity.classes:,} classes"
        if self.holding is None:
            return f"these data cannot say how many identities a gallery holds ({known})"
        identities, fpir, threshold = self.holding
        if identities == 0:
            return (
                f"too many strangers reach the threshold {threshold:.4f}, which accepts 90 % of the pairs of "
                f"a class, for any gallery at FPIR {fpir:g} ({known})"
            )
        return (
            f"holds at least {identities:,} identities at FPIR {fpir:g}, threshold {threshold:.4f} ({known})"
        )

    def _choices(self) -> list[str]:
        return [
            "At least: 95 % confidence, at the highest threshold that accepts 90 % of the pairs of a "
            "class, and the lowest FPIR that so many classes can show.",
            f"The classes must not have been trained. {self.capacity.images:,} images of "
            f"{self.capacity.classes:,} classes, without distractors.",
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
                "cannot say" if chosen is None else f"{chosen:.4f}",
            ])  # fmt: skip
        header = ["Identities", "FPIR", "90 % interval", "Threshold for FPIR 0.01"]
        text = f"{self.summary()}; FPIR at threshold {self.threshold:.4f}"
        return [Table(header, rows, f"{text[0].upper()}{text[1:]}")]

    def _largest(self) -> int:
        held = self.holding.identities if self.holding is not None else 0
        return max(4 * self.capacity.classes, 2 * min(held, 2**30))


def _sizes(largest: int) -> list[int]:
    """Return 10, 30, 100, 300, ... identities."""
    return [step * 10**power for power in range(1, 11) for step in (1, 3) if step * 10**power <= largest]


def evaluate_capacity(embeddings: np.ndarray, labels: np.ndarray) -> CapacityResult:
    """Measure the capacity for a report.

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
    return CapacityResult(capacity, holding, threshold)
