"""FPIR of galleries of any size, predicted from classes that the network never saw.

A probe of an unknown identity is a false positive if its best score against N enrolled identities, one image
each, is at least the threshold t. With q the share of identities that a probe reaches at t,

    FPIR(t, N) = 1 - E[(1 - q)^N]      over probes;      FAR(t) = E[q].

Probes differ: some have many look-alikes. If q has a gamma distribution with mean FAR and squared coefficient of
variation s ("spread"), this is, for small q, the zero term of a negative binomial distribution:

    FPIR(t, N) = 1 - (1 + s N FAR)^(-1 / s),      for s = 0: 1 - exp(-N FAR).

N may be larger than the number m of calibration classes. A row of the table has, for one threshold, from all
between-class pairs and with the same weight per class:

- FAR.
- s = E[q q'] / FAR^2 - 1, where q and q' are of one probe and two other classes, so it is unbiased. The higher
  the threshold, the fewer pairs there are: s is shrunk to that of the next lower threshold times
  (ratio of the FARs)^0.5, about its growth among characters.
- w: the mean share of image pairs that exceed t, in a class pair that does, weighted by this share; it is
  shrunk to that of the next lower threshold.

The variance of FAR has two terms, from class pairs and from classes (Hoeffding's decomposition of a
U-statistic): FAR w / pairs + 4 s FAR^2 / m. One gallery of N identities adds s FAR^2 / N. With the ratio of
variance and FAR as the unit, FAR is a Poisson count; its interval is that of Fay and Feuer (1997, "Confidence
intervals for directly standardized rates"), which is Garwood's for equal weights. It needs no tail model, and
becomes the rule of three where no pair exceeds t.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from plsc.errors import DataError
from plsc.evaluate.identification import norms_of

FEWEST_CLASSES = 20
HIGHEST_FAR = 0.05  # of the first row
ROWS = 6  # per factor of ten of the FAR
FEWEST_PAIRS = 5.0  # exceeding class pairs for a point prediction
FEWEST_EVENTS = 5.0  # the same as independent events: 1 / squared relative error of the FAR
GROWTH = 0.5  # spread ~ FAR^-GROWTH, if the data do not say otherwise
PRIOR = 20.0  # weight of this assumption, as a number of wedges: a probe class with two look-alikes
_Z90 = 1.6448536269514722  # 95 % quantile of the normal distribution
_SAME = 1 - 1e-6  # cosine from which two images are the same image
EVENTS = 4.0  # weight of the assumption that w is that of the next lower threshold
_MOST = 20_000_000  # scores in memory
_FORMAT = 1


class Prediction(NamedTuple):
    """An FPIR, 0..1, with a 90 % interval; estimate None: these data give only the interval."""

    estimate: float | None
    low: float
    high: float


class Holding(NamedTuple):
    """A lower bound of the size of a gallery: at least `identities` with this FPIR at this threshold."""

    identities: int
    fpir: float
    threshold: float


@dataclass(frozen=True)
class Row:
    """What the calibration classes say about one threshold; rates are fractions, 0..1."""

    threshold: float  # cosine; a score at the threshold is accepted
    far: float  # of one image per class
    spread: float  # squared coefficient of variation of FAR over probes, at least 0
    weight: float  # w above, 0..1
    accepted: float | None  # share of same-class pairs; None: one image per class


@dataclass(frozen=True)
class Capacity:
    """Table of a network's tail; see the module. Rows in the order of the thresholds."""

    classes: int
    images: int
    rows: tuple[Row, ...]

    def fpir(self, threshold: float, identities: int) -> Prediction:
        """Predict the FPIR of a gallery of this many identities, one image each.

        The interval is that of one such gallery, not of the mean over galleries. Below the first threshold of
        the table, only the lower limit is known.
        """
        if identities < 1 or not math.isfinite(threshold):
            raise DataError(
                f"cannot predict the FPIR of {identities} identities at threshold {threshold}; expected at "
                "least 1 and a finite threshold"
            )
        if threshold < self.rows[0].threshold:
            return Prediction(None, self._at(self.rows[0], identities).low, 1.0)
        return self._at(self._row(threshold), identities)

    def threshold(self, fpir: float, identities: int, sure: bool = False) -> float | None:
        """Return the lowest threshold with at most this FPIR; None: these data cannot say.

        Decides by the estimate or, where there is none, by the upper limit. sure: always by the upper limit.
        """

        def passes(threshold: float) -> bool:
            found = self.fpir(threshold, identities)
            return (found.high if sure or found.estimate is None else found.estimate) <= fpir

        _check_fpir(fpir)
        first = next((k for k, row in enumerate(self.rows) if passes(row.threshold)), None)
        if not first:  # no row, or the first one: lower thresholds are not in the table
            return None if first is None else self.rows[0].threshold
        low, high = self.rows[first - 1].threshold, self.rows[first].threshold
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if passes(middle) else (middle, high)
        return high

    def holds(
        self, fpir: float | None = None, threshold: float | None = None, accepted: float = 0.9
    ) -> Holding | None:
        """Return how many identities a gallery holds at least (95 % confidence), one image each.

        Args:
            fpir: allowed FPIR; None: the lowest of 0.001, 0.002, 0.005, ... that the classes could show for as
                many identities as there are classes.
            threshold: None: the highest at which this share of same-class pairs is `accepted`.

        Returns None if these data cannot say: there is no such threshold in the table.
        """
        steps = [step * 10.0**power for power in range(-9, 0) for step in (1, 2, 5)]
        if fpir is None:
            fpir = next((step for step in steps if step * self.classes >= 6), 0.5)
        _check_fpir(fpir)
        if threshold is None:
            fitting = [one.threshold for one in self.rows if (one.accepted or 0.0) >= accepted]
            threshold = max(fitting, default=-math.inf)
        if threshold < self.rows[0].threshold:
            return None
        low, high = 0, 1
        while high < 2**40 and self.fpir(threshold, high).high <= fpir:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fpir(threshold, middle).high <= fpir else (low, middle)
        return Holding(low, fpir, threshold)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        columns = {name: [getattr(row, name) for row in self.rows] for name in Row.__dataclass_fields__}
        return {"format": _FORMAT, "classes": self.classes, "images": self.images, **columns}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Capacity:
        """Return the table that `as_dict` wrote; DataError if it is damaged."""
        try:
            if values["format"] != _FORMAT:
                raise DataError(f"the capacity table has format {values['format']}; expected {_FORMAT}")
            columns = zip(*(values[name] for name in Row.__dataclass_fields__), strict=True)
            return cls(int(values["classes"]), int(values["images"]), tuple(Row(*one) for one in columns))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the capacity table is damaged ({error!r}); write it again") from error

    def _row(self, threshold: float) -> Row:
        """Interpolate between two rows: log FAR linearly in the threshold. Above the table, FAR is 0."""
        place = bisect_right([row.threshold for row in self.rows], threshold) - 1
        row = self.rows[place]
        if place + 1 == len(self.rows) or threshold == row.threshold:
            return row
        after = self.rows[place + 1]
        share = (threshold - row.threshold) / (after.threshold - row.threshold)
        if not after.far:
            return Row(threshold, row.far, row.spread, row.weight, after.accepted)
        far = row.far ** (1 - share) * after.far**share
        spread = row.spread + share * (after.spread - row.spread)
        return Row(threshold, far, spread, row.weight + share * (after.weight - row.weight), after.accepted)

    def _at(self, row: Row, identities: int) -> Prediction:
        pairs = self.classes * (self.classes - 1) / 2
        unit = row.weight / pairs + row.spread * row.far * (4 / self.classes + 1 / identities)
        events = row.far / unit
        low, high = unit * _gamma_quantile(events, -_Z90), unit * _gamma_quantile(events + 1, _Z90)
        enough = row.far * pairs >= FEWEST_PAIRS and events >= FEWEST_EVENTS
        estimate = _fpir(row.far, row.spread, identities) if enough else None
        return Prediction(estimate, _fpir(low, row.spread, identities), _fpir(high, row.spread, identities))


def _fpir(far: float, spread: float, identities: int) -> float:
    expected = identities * far
    if spread * expected < 1e-9:
        return -math.expm1(-expected)
    return -math.expm1(-math.log1p(spread * expected) / spread)


def _gamma_quantile(shape: float, z: float) -> float:
    """Return a quantile of the gamma distribution with scale 1, z standard deviations from the middle.

    Wilson and Hilferty (1931); for z = 1.645 and shape >= 1 within 1 %.
    """
    if shape <= 0:
        return 0.0
    return float(shape * max(0.0, 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))) ** 3)


def _check_fpir(fpir: float) -> None:
    if not 0 < fpir < 1:
        raise DataError(f"FPIR {fpir} is not a probability; expected a value between 0 and 1, such as 0.01")


def measure_capacity(embeddings: np.ndarray, labels: np.ndarray) -> Capacity:
    """Measure the table from images of classes that the network was not trained on.

    The time grows with (images)^2: 10 seconds for 6,000 images of 500 classes on one core.

    Args:
        embeddings: [n, D], not necessarily normalised.
        labels: int64 [n]; at least 20 classes. One image per class is enough, except for `Row.accepted`.

    Raises:
        DataError: the shapes do not match, an embedding is not finite, there are too few classes, or an image
            is in two classes.
    """
    labels = np.asarray(labels)
    unit, number, order = _sorted_by_class(embeddings, labels)
    grid, pair = _choose_thresholds(unit, number)
    if pair is not None:
        first, second = (int(order[place]) for place in pair)
        raise DataError(
            f"images {first} and {second} have the same embedding, but the labels {labels[first]} and "
            f"{labels[second]}; expected each image in one class: remove one of them"
        )
    counts = np.bincount(number)
    m, sums = len(counts), _Sums.zeros(len(grid))
    parts = np.split(unit, np.cumsum(counts)[:-1])
    for own, images in enumerate(parts):
        sums.add(images @ unit.T, own, number, counts, grid)
    return Capacity(m, len(unit), _rows(sums, m, grid))


def _rows(sums: _Sums, m: int, grid: np.ndarray) -> tuple[Row, ...]:
    far = sums.pairs / (m * (m - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = sums.wedges / (m * (m - 1) * (m - 2)) / far**2 - 1
    rows: list[Row] = []
    before, weight = max(0.0, float(spread[0])), float(sums.squares[0] / sums.pairs[0])
    for k, threshold in enumerate(grid):
        if far[k]:
            known = sums.wedges[k] / 2
            grown = before * (far[k - 1] / far[k]) ** GROWTH if k else before
            before = max(0.0, float((known * spread[k] + PRIOR * grown) / (known + PRIOR)))
        # One more pair, of the weight of the row before, so that a few small shares do not decide.
        weight = float((sums.squares[k] / 2 + EVENTS * weight**2) / (sums.pairs[k] / 2 + EVENTS * weight))
        accepted = float(sums.same[k] / sums.repeated) if sums.repeated else None
        rows.append(Row(float(threshold), float(far[k]), before, weight, accepted))
    return tuple(rows)


def _sorted_by_class(embeddings: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the normalised embeddings by class, float32 [n, D], their classes 0 to m - 1, and the order."""
    if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
        raise DataError(
            f"the embeddings have shape {list(embeddings.shape)} and the labels {list(labels.shape)}; "
            "expected [n, embedding size] and [n]"
        )
    classes, number = np.unique(labels, return_inverse=True)
    if len(classes) < FEWEST_CLASSES:
        raise DataError(
            f"there are images of {len(classes)} classes; expected at least {FEWEST_CLASSES} that the network "
            "was not trained on, and hundreds for a narrow interval"
        )
    norms = norms_of(embeddings, "calibration")
    order = np.argsort(number, kind="stable")
    unit = (embeddings[order] / np.where(norms == 0, 1, norms)[order, None]).astype(np.float32)
    return unit, number[order], order


def _choose_thresholds(unit: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, tuple[int, int] | None]:
    """Return rising scores of between-class pairs, `ROWS` per factor of ten, and one above all of them.

    Also returns the pair with the highest score, if these are the same image.
    """
    n = len(unit)
    some = np.random.default_rng(0).choice(n, min(n, 1000), replace=False)
    scores = unit[some] @ unit.T
    floor = np.quantile(scores[number[some][:, None] != number], 1 - min(HIGHEST_FAR, 2 * _MOST / n**2))
    found = []
    pair = None
    for start in range(0, n, 1000):  # each pair once
        scores = unit[start : start + 1000] @ unit[start:].T
        x, y = np.nonzero(scores >= floor)
        is_pair = number[start + x] < number[start + y]
        x, y = x[is_pair], y[is_pair]
        found.append(scores[x, y])
        if len(x) and found[-1].max() > _SAME:
            highest = int(found[-1].argmax())
            pair = (start + int(x[highest]), start + int(y[highest]))
    ranked = np.sort(np.concatenate(found))[::-1]
    size = max(2, round(ROWS * math.log10(len(ranked))))
    wanted = np.unique(np.geomspace(1, len(ranked), size).round().astype(int)) - 1
    grid = np.unique(ranked[wanted])
    return np.append(grid, np.nextafter(grid[-1], np.float32(2))).astype(np.float64), pair


@dataclass
class _Sums:
    """Sums over classes per threshold, float64 [K]; each class has weight 1. See the module."""

    pairs: np.ndarray  # FAR of each ordered pair of classes
    squares: np.ndarray  # its square
    wedges: np.ndarray  # q q' of each probe and two other classes, in order
    same: np.ndarray  # share of same-class pairs, of classes with several images
    repeated: int = 0  # classes with several images

    @classmethod
    def zeros(cls, size: int) -> _Sums:
        return cls(*(np.zeros(size) for _ in range(4)))

    def add(
        self, scores: np.ndarray, own: int, number: np.ndarray, counts: np.ndarray, grid: np.ndarray
    ) -> None:
        """Add a class; scores: of its images with all images, [own images, n]."""
        images, m, size = len(scores), len(counts), len(grid)
        mean = np.zeros((size, m))  # share of image pairs, by class
        step = max(1, 4_000_000 // (size * m))
        for start in range(0, images, step):
            part = scores[start : start + step]
            x, y = np.nonzero(part >= grid[0])
            level = np.searchsorted(grid, part[x, y], side="right") - 1
            cells = (level * len(part) + x) * m + number[y]
            hits = np.bincount(cells, minlength=size * len(part) * m).reshape(size, len(part), m)
            share = hits[::-1].cumsum(0)[::-1] / counts  # [K, images, m]
            mean += share.sum(1) / images
            share[:, :, own] = 0
            self.wedges += (share.sum(2) ** 2 - (share**2).sum(2)).sum(1) / images
        if images > 1:
            self.same += (mean[:, own] * images**2 - images) / (images * (images - 1))
            self.repeated += 1
        mean[:, own] = 0
        self.pairs += mean.sum(1)
        self.squares += (mean**2).sum(1)
