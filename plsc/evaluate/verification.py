"""Verification of pairs of images: ten-fold accuracy, TAR at FAR, ROC and AUC.

The accuracy follows the LFW protocol (Huang et al., 2007, "Labeled Faces in the Wild") as implemented by
insightface, so it is comparable with published results: normalised embeddings, squared L2 distances,
thresholds 0, 0.01, ..., 3.99, ten contiguous folds without shuffling. Each fold is evaluated with the best
threshold of the other nine; the lowest one wins a tie.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np

from plsc.errors import DataError

THRESHOLDS = np.arange(0, 4, 0.01)  # squared L2 distance of unit vectors, 0..4
FARS = (1e-1, 1e-2, 1e-3)  # false accept rates at which the true accept rate is reported
_CHUNK = 8192  # pairs per chunk in double precision


@dataclass(frozen=True)
class VerificationResult:
    """The result of `verify`; rates and accuracies are fractions, 0..1."""

    METRICS: ClassVar = ("accuracy",)  # that a checkpoint stores, and that callbacks can monitor

    accuracy: float  # mean over the folds
    accuracy_std: float  # population standard deviation over the folds
    threshold: float  # mean over the folds: pairs with a smaller squared L2 distance count as same
    threshold_cosine: float  # the same threshold as a cosine: 1 - threshold / 2
    tar_at_far: dict[float, float]
    unresolved_fars: tuple[float, ...]  # FARs below 1 / negatives: their TAR is that of zero false accepts
    auc: float
    pairs: int
    positives: int
    negatives: int
    mean_norm: float  # mean L2 norm of the embeddings before normalisation
    cosines: np.ndarray = field(repr=False, compare=False)  # of each pair, float64 [P]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the cosines; FARs are strings such as ``"0.001"``."""
        values = asdict(self)
        del values["cosines"]
        return {
            **values,
            "tar_at_far": {f"{far:g}": tar for far, tar in self.tar_at_far.items()},
            "unresolved_fars": [f"{far:g}" for far in self.unresolved_fars],
        }

    def summary(self) -> str:
        """Return the accuracy for the log."""
        return f"accuracy {self.accuracy:.4f} +- {self.accuracy_std:.4f}"


def verify(embeddings: np.ndarray, is_same: np.ndarray, folds: int = 10) -> VerificationResult:
    """Compute the verification metrics of pairs of embeddings.

    Args:
        embeddings: [2P, D], not necessarily normalised; pair p is rows 2p and 2p + 1.
        is_same: bool [P].
        folds: number of folds of the cross-validation, at least 2.

    Raises:
        DataError: an embedding is not finite, there are fewer pairs than folds, or the pairs are all same or
            all different.
    """
    is_same = np.asarray(is_same, dtype=bool)
    distances, cosines, norms = _compare(embeddings)
    _check_labels(cosines, is_same)
    if len(is_same) < folds:
        raise DataError(f"there are {len(is_same)} pairs for {folds} folds; use more pairs or fewer folds")
    accuracies, thresholds = _cross_validate(distances, is_same, folds)
    positives = int(is_same.sum())
    negatives = len(is_same) - positives
    threshold = float(thresholds.mean())
    return VerificationResult(
        accuracy=float(accuracies.mean()),
        accuracy_std=float(accuracies.std()),
        threshold=threshold,
        threshold_cosine=1 - threshold / 2,
        tar_at_far={far: tar_at_far(cosines, is_same, far) for far in FARS},
        unresolved_fars=tuple(far for far in FARS if 1 / negatives > far),
        auc=area_under_roc(cosines, is_same),
        pairs=len(is_same),
        positives=positives,
        negatives=negatives,
        mean_norm=float(norms.mean()),
        cosines=cosines,
    )


def scores(embeddings: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair, float64 [P]; pair p is rows 2p and 2p + 1 of [2P, D].

    A zero embedding has cosine 0 with every other.

    Raises:
        DataError: an embedding is not finite, or their number is odd.
    """
    return _compare(embeddings)[1]


def tar_at_far(cosines: np.ndarray, is_same: np.ndarray, far: float) -> float:
    """Return the highest true accept rate with a false accept rate of at most ``far``.

    Exact, over all possible thresholds. Pairs with equal scores are accepted together.

    Raises:
        DataError: the pairs are all same or all different, or a score is not finite.
    """
    rates, accepted = roc_curve(cosines, is_same)
    return float(accepted[np.searchsorted(rates, far, side="right") - 1])


def area_under_roc(cosines: np.ndarray, is_same: np.ndarray) -> float:
    """Return the AUC: the probability that a same pair scores above a different pair; ties count 1/2.

    Raises:
        DataError: the pairs are all same or all different, or a score is not finite.
    """
    far, tar = roc_curve(cosines, is_same)
    return float(np.sum(np.diff(far) * (tar[1:] + tar[:-1]) / 2))


def roc_curve(cosines: np.ndarray, is_same: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(far, tar)``, each float64 [K + 1] for K distinct scores, from (0, 0) to (1, 1).

    Raises:
        DataError: the pairs are all same or all different, or a score is not finite.
    """
    cosines, is_same = np.asarray(cosines), np.asarray(is_same, dtype=bool)
    _check_labels(cosines, is_same)
    order = np.argsort(-cosines, kind="stable")
    ranked = cosines[order]
    last_of_score = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    true_accepts = np.cumsum(is_same[order])[last_of_score]
    false_accepts = last_of_score + 1 - true_accepts
    far = np.append(0.0, false_accepts / false_accepts[-1])
    tar = np.append(0.0, true_accepts / true_accepts[-1])
    return far, tar


def _compare(embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return squared distances [P], cosines [P] and the norms of the embeddings [2P], in float64."""
    embeddings = np.asarray(embeddings)
    if embeddings.ndim != 2 or len(embeddings) % 2:
        raise DataError(
            f"the embeddings have shape {list(embeddings.shape)}; expected [2 x pairs, embedding size]"
        )
    pairs = embeddings.reshape(len(embeddings) // 2, 2, embeddings.shape[1])
    distances, cosines = np.empty(len(pairs)), np.empty(len(pairs))
    norms = np.empty((len(pairs), 2))
    for start in range(0, len(pairs), _CHUNK):
        part = slice(start, start + _CHUNK)
        chunk = pairs[part].astype(np.float64)
        finite = np.isfinite(chunk).all(axis=(1, 2))
        if not finite.all():
            pair = start + int(np.argmin(finite))
            raise DataError(
                f"an embedding of pair {pair} is not finite; the training has diverged, or the weights are "
                "damaged"
            )
        norms[part] = np.linalg.norm(chunk, axis=2)
        chunk /= np.where(norms[part] == 0, 1, norms[part])[:, :, None]
        distances[part] = np.square(chunk[:, 0] - chunk[:, 1]).sum(axis=1)
        cosines[part] = (chunk[:, 0] * chunk[:, 1]).sum(axis=1)
    return distances, cosines, norms.reshape(-1)


def _check_labels(cosines: np.ndarray, is_same: np.ndarray) -> None:
    if cosines.shape != is_same.shape or is_same.ndim != 1:
        raise DataError(
            f"the scores have shape {list(cosines.shape)} and is_same has shape {list(is_same.shape)}; "
            "expected one value of each per pair"
        )
    if not np.isfinite(cosines).all():
        raise DataError(f"the score of pair {int(np.argmin(np.isfinite(cosines)))} is not finite")
    if is_same.all() or not is_same.any():
        kind = "no" if not len(is_same) else "only same" if is_same.all() else "only different"
        raise DataError(f"verification needs same and different pairs; there are {kind} pairs")


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
