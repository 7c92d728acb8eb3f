"""ROC curves of cosines of pairs, and what is read off them."""

from __future__ import annotations

import numpy as np

from plsc.errors import DataError


def roc_curve(cosines: np.ndarray, is_same: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(far, tar)``, each float64 [K + 1] for K distinct scores, from (0, 0) to (1, 1).

    Raises:
        DataError: the pairs are all same or all different, or a score is not finite.
    """
    cosines, is_same = np.asarray(cosines), np.asarray(is_same, dtype=bool)
    check_pairs(cosines, is_same)
    return curve_and_thresholds(cosines, is_same)[:2]


def curve_and_thresholds(
    cosines: np.ndarray, is_same: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return FAR, TAR and the threshold of each point of the ROC curve."""
    order = np.argsort(-cosines, kind="stable")
    ranked = cosines[order]
    last_of_score = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    true_accepts = np.cumsum(is_same[order])[last_of_score]
    false_accepts = last_of_score + 1 - true_accepts
    far = np.append(0.0, false_accepts / false_accepts[-1])
    tar = np.append(0.0, true_accepts / true_accepts[-1])
    return far, tar, np.append(np.inf, ranked[last_of_score])


def tar_at_far(far: np.ndarray, tar: np.ndarray, rate: float) -> float:
    """Return the highest TAR with a FAR of at most `rate` on a curve of `roc_curve`."""
    return float(tar[np.searchsorted(far, rate, side="right") - 1])


def area_under(far: np.ndarray, tar: np.ndarray) -> float:
    """Return the area under a curve of `roc_curve`.

    That is the probability that a same pair scores above a different pair; ties count 1/2.
    """
    return float(np.sum(np.diff(far) * (tar[1:] + tar[:-1]) / 2))


def equal_error_rate(far: np.ndarray, tar: np.ndarray) -> float:
    """Return the EER of a curve of `roc_curve`: FAR where it equals 1 - TAR, interpolated linearly."""
    excess = far + tar - 1  # from -1 to 1, strictly increasing
    after = int(np.searchsorted(excess, 0))
    before = after - 1
    share = -excess[before] / (excess[after] - excess[before])
    return float(far[before] + share * (far[after] - far[before]))


def check_pairs(cosines: np.ndarray, is_same: np.ndarray) -> None:
    """Raise DataError as `roc_curve`."""
    if cosines.shape != is_same.shape or is_same.ndim != 1:
        raise DataError(
            f"expected a score and a flag per pair, got shape {cosines.shape} and {is_same.shape}"
        )
    if not np.isfinite(cosines).all():
        raise DataError(f"the score of pair {int(np.argmin(np.isfinite(cosines)))} is not finite")
    if is_same.all() or not is_same.any():
        kind = "no" if not len(is_same) else "only same" if is_same.all() else "only different"
        raise DataError(f"verification needs same and different pairs; there are {kind} pairs")
