"""Verification of pairs of images: ten-fold accuracy, TAR at FAR, ROC, AUC and EER.

The accuracy follows the LFW protocol (Huang et al., 2007, "Labeled Faces in the Wild") as implemented by
insightface, so it is comparable with published results: squared L2 distances of normalised embeddings,
thresholds 0, 0.01, ..., 3.99, ten contiguous folds without shuffling. Each fold is evaluated with the best
threshold of the other nine; the lowest one wins a tie.

Scores are cosines rounded to multiples of 2^-20, distances 2 - 2 * score: rounding orders no equal pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from plsc.data.sources.base import printable
from plsc.errors import DataError
from plsc.evaluate.curves import area_under, check_pairs, curve_and_thresholds, equal_error_rate
from plsc.evaluate.identification import check_finite
from plsc.evaluate.report import Result, Section, Table, stem_of
from plsc.storage.publish import replacing

GRID = 2**20  # scores per unit
THRESHOLDS = np.arange(0, 4, 0.01)  # squared L2 distance of unit vectors, 0..4
FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # false accept rates at which the true accept rate is reported
_CHUNK = 8192  # pairs per chunk in double precision
_Z95 = 1.959963984540054  # 97.5% quantile of the normal distribution


class PairRates(Result):
    """Rates of same and different pairs at FARs, which a dataclass has as fields."""

    tar_at_far: dict[float, float]
    unresolved_fars: tuple[float, ...]
    negatives: int

    def resolved_fars(self) -> list[float]:
        """Return the FARs for which there are enough different pairs."""
        return [far for far in self.tar_at_far if far not in self.unresolved_fars]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; FARs are strings such as ``"0.001"``."""
        return {**super().as_dict(), "unresolved_fars": [f"{far:g}" for far in self.unresolved_fars]}

    def warning(self) -> str | None:
        """Return a warning if there are too few different pairs for some FARs."""
        if not self.unresolved_fars:
            return None
        fars = ", ".join(f"{far:g}" for far in self.unresolved_fars)
        return (
            f"{self.negatives:,} different pairs are too few for FAR {fars}: the TAR there is that of no "
            f"false accept; use at least {1 / min(self.unresolved_fars):,.0f}"
        )

    def rates(self, digits: int = 4, title: str = "") -> Table:
        """Return a row per FAR; with intervals and thresholds, if the result has them."""
        intervals, thresholds = getattr(self, "tar_intervals", None), getattr(self, "threshold_at_far", None)
        rows = []
        for far, tar in self.tar_at_far.items():
            rows.append([f"{far:g}", f"{tar:.{digits}f}"])
            if intervals is not None:
                rows[-1].append("{:.4f} to {:.4f}".format(*intervals[far]))
            if thresholds is not None:  # above 1 or None: no pair is accepted
                limit = thresholds[far]
                rows[-1].append("none" if limit is None or limit > 1 else f"{limit:.{digits}f}")
            rows[-1].append("too few different pairs" if far in self.unresolved_fars else "")
        columns = ["95% interval"] * (intervals is not None) + ["threshold (cosine)"] * (
            thresholds is not None
        )
        return Table(["FAR", "TAR", *columns, "warning"], rows, title)


@dataclass(frozen=True)
class VerificationResult(PairRates):
    """The result of `verify`; rates and accuracies are fractions, 0..1."""

    METRICS: ClassVar = ("accuracy",)  # that a checkpoint stores, and that callbacks can monitor

    accuracy: float  # mean over the folds
    accuracy_std: float  # population standard deviation over the folds
    threshold: float  # mean over the folds: pairs with a smaller squared L2 distance count as same
    threshold_cosine: float  # the same threshold as a cosine: 1 - threshold / 2
    tar_at_far: dict[float, float]
    tar_intervals: dict[float, tuple[float, float]]  # 95% confidence interval of the TAR, by FAR
    threshold_at_far: dict[float, float | None]  # lowest accepted cosine; None: no pair is accepted
    unresolved_fars: tuple[float, ...]  # FARs below 1 / negatives: their TAR is that of zero false accepts
    auc: float
    eer: float
    pairs: int
    positives: int
    negatives: int
    mean_norm: float  # mean L2 norm of the embeddings before normalisation
    cosines: np.ndarray = field(repr=False, compare=False)  # of each pair, float64 [P]
    is_same: np.ndarray = field(repr=False, compare=False)  # of each pair, bool [P]

    def summary(self) -> str:
        """Return the accuracy for the log."""
        return f"accuracy {self.accuracy:.4f} +- {self.accuracy_std:.4f}"

    def _choices(self) -> list[str]:
        return [
            "The score of a pair is the cosine of its embeddings, computed in double precision and rounded "
            "to a multiple of 2^-20; a score at the threshold is accepted.",
            "Accuracy: mean and standard deviation over ten contiguous folds; each uses the threshold, on "
            "squared L2 distances (2 - 2 x score) 0, 0.01, ..., 3.99, with the best accuracy on the other "
            "nine.",
            "TAR at FAR: the highest true accept rate of all thresholds whose false accept rate is at most "
            "FAR.",
            "Intervals: 95% Wilson score intervals of the TAR at that threshold, for independent pairs.",
            "EER: where the false accept rate equals the false reject rate, interpolated on the ROC curve.",
        ]

    def _tables(self) -> list[Table]:
        header = ("pairs", "same", "different", "accuracy", "threshold (cosine)", "AUC", "EER")
        row = [
            f"{self.pairs:,}", f"{self.positives:,}", f"{self.negatives:,}",
            f"{self.accuracy:.4f} ± {self.accuracy_std:.4f}", f"{self.threshold_cosine:.4f}",
            f"{self.auc:.5f}", f"{self.eer:.4f}",
        ]  # fmt: skip
        return [Table(header, [row]), self.rates()]

    def _pictures(self, name: str, stem: str) -> dict[str, Callable[[Path], None]]:
        from plsc.evaluate.plots import plot_roc, plot_scores  # matplotlib is slow to import

        pairs = self.cosines, self.is_same
        return {
            f"{stem}_roc.png": lambda path: plot_roc({name: pairs}, path),
            f"{stem}_scores.png": lambda path: plot_scores(*pairs, path, self.threshold_cosine),
        }

    def section(
        self, name: str, images: Sequence[Any] | None = None, labels: Sequence[str] | None = None
    ) -> Section:
        """Return the section of a report.

        Args:
            name: name of the pairs, which is part of the names of the files.
            images: the encoded images, to draw the hardest pairs; pair p is images 2p and 2p + 1.
            labels: names of the images for the score file, in the same order; by default their numbers.
        """
        from plsc.evaluate.plots import plot_hardest_pairs

        section, stem, pairs = super().section(name), stem_of(name), (self.cosines, self.is_same)
        pictures = dict(section.pictures)
        if images is not None:
            pictures[f"{stem}_hardest.png"] = lambda path: plot_hardest_pairs(images, *pairs[::-1], path)
        files = {f"{stem}_scores.tsv": lambda path: write_scores(path, *pairs, labels)}
        return replace(section, pictures=pictures, files=files)


def verify(
    embeddings: np.ndarray, is_same: np.ndarray, folds: int = 10, pairs: np.ndarray | None = None
) -> VerificationResult:
    """Compute the verification metrics of pairs of embeddings.

    Args:
        embeddings: [N, D], not necessarily normalised.
        is_same: bool [P].
        folds: number of folds of the cross-validation, at least 2.
        pairs: rows of the embeddings of each pair, integers [P, 2]; by default 2p and 2p + 1.

    Raises:
        DataError: an embedding is not finite, there are fewer pairs than folds, or the pairs are all same or
            all different.
    """
    is_same = np.asarray(is_same, dtype=bool)
    cosines, mean_norm = _compare(embeddings, pairs)
    check_pairs(cosines, is_same)
    if len(is_same) < folds:
        raise DataError(f"there are {len(is_same)} pairs for {folds} folds; use more pairs or fewer folds")
    accuracies, thresholds = _cross_validate(2 - 2 * cosines, is_same, folds)
    threshold = float(thresholds.mean())
    far, tar, accepted = curve_and_thresholds(cosines, is_same)
    at = {rate: int(np.searchsorted(far, rate, side="right")) - 1 for rate in FARS}
    return VerificationResult(
        accuracy=float(accuracies.mean()),
        accuracy_std=float(accuracies.std()),
        threshold=threshold,
        threshold_cosine=1 - threshold / 2,
        threshold_at_far={rate: float(accepted[index]) if index else None for rate, index in at.items()},
        eer=equal_error_rate(far, tar),
        mean_norm=mean_norm,
        cosines=cosines,
        is_same=is_same,
        **rates_of_curve(far, tar, is_same),
    )


def rates_of_curve(far: np.ndarray, tar: np.ndarray, is_same: np.ndarray) -> dict[str, Any]:
    """Return what `VerificationResult` and `TemplatePairs` both say of a curve of `roc_curve`."""
    positives = int(is_same.sum())
    negatives = len(is_same) - positives
    at = {rate: float(tar[np.searchsorted(far, rate, side="right") - 1]) for rate in FARS}
    return {
        "tar_at_far": at,
        "tar_intervals": {
            rate: wilson_interval(round(share * positives), positives) for rate, share in at.items()
        },
        "unresolved_fars": tuple(rate for rate in FARS if 1 / negatives > rate),
        "auc": area_under(far, tar),
        "pairs": len(is_same),
        "positives": positives,
        "negatives": negatives,
    }


def write_scores(
    path: Path, cosines: np.ndarray, is_same: np.ndarray, names: Sequence[str] | None = None
) -> None:
    """Write a line per pair, separated by tabs: score, 1 for the same class or 0, and the two names.

    names: of 2P images; pair p is names 2p and 2p + 1; by default their numbers.
    """
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write("score\tsame\tfirst\tsecond\n")
        for pair, (cosine, same) in enumerate(zip(cosines.tolist(), is_same.tolist(), strict=True)):
            numbers = (2 * pair, 2 * pair + 1)
            first, second = numbers if names is None else (printable(names[index]) for index in numbers)
            file.write(f"{cosine!r}\t{same:d}\t{first}\t{second}\n")


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Return the 95% Wilson score interval of a rate (Wilson, 1927)."""
    rate, square = successes / trials, _Z95**2 / trials
    centre = rate + square / 2
    half = (square * rate * (1 - rate) + square**2 / 4) ** 0.5
    low, high = (centre - half) / (1 + square), (centre + half) / (1 + square)
    return (low if successes else 0.0), (high if successes < trials else 1.0)


def scores(embeddings: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair, float64 [P], rounded to a multiple of 2^-20.

    Pair p is rows 2p and 2p + 1 of [2P, D]. A zero embedding has cosine 0 with every other.

    Raises:
        DataError: an embedding is not finite.
    """
    return _compare(embeddings)[0]


def _compare(embeddings: np.ndarray, pairs: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """Return the cosines on the grid, float64 [P], and the mean norm of the embeddings."""
    embeddings = np.asarray(embeddings)
    rows = np.arange(len(embeddings)).reshape(-1, 2) if pairs is None else pairs
    cosines = np.empty(len(rows))
    total = 0.0
    for start in range(0, len(rows), _CHUNK):
        part = slice(start, start + _CHUNK)
        chunk = embeddings[rows[part]].astype(np.float64)  # [pairs, 2, D]
        check_finite(chunk, "pair ", range(start, len(rows)))
        norms = np.linalg.norm(chunk, axis=2)
        total += float(norms.sum())
        chunk /= np.where(norms == 0, 1, norms)[:, :, None]
        cosines[part] = np.rint((chunk[:, 0] * chunk[:, 1]).sum(axis=1) * GRID) / GRID
    return cosines, total / max(1, 2 * len(rows))


def _cross_validate(distances: np.ndarray, is_same: np.ndarray, folds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the accuracy of each fold, and the threshold chosen on the other folds."""
    sizes = np.full(folds, len(is_same) // folds)
    sizes[: len(is_same) % folds] += 1  # the first folds take the remainder
    fold = np.repeat(np.arange(folds), sizes)
    # A pair is accepted if distance < threshold, so from this index of THRESHOLDS on.
    first_accept = np.searchsorted(THRESHOLDS, distances, side="right")
    bins = len(THRESHOLDS) + 1

    def accepted(chosen: np.ndarray) -> np.ndarray:  # [folds, thresholds]
        counts = np.bincount(fold[chosen] * bins + first_accept[chosen], minlength=folds * bins)
        return counts.reshape(folds, bins).cumsum(axis=1)[:, :-1]

    true_accepts, false_accepts = accepted(is_same), accepted(~is_same)
    negatives = np.bincount(fold[~is_same], minlength=folds)
    correct = true_accepts + negatives[:, None] - false_accepts
    best = (correct.sum(axis=0) - correct).argmax(axis=1)  # argmax returns the first maximum
    return correct[np.arange(folds), best] / sizes, THRESHOLDS[best]
