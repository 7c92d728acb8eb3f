"""Check the numbers of the report: compute them again from the saved embeddings, with plain numpy.

    python demo/recompute.py demo/output/run

Does not import plsc. Fails if a number differs from the report.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

TOLERANCE = 0.001  # rounding may change the result of a pair at a threshold


def main() -> None:
    """Compare every number of figures.json."""
    run = Path(sys.argv[1])
    reported = json.loads((run / "figures.json").read_text())
    with np.load(run / "embeddings.npz") as file:
        data = {name: file[name] for name in file.files}
    same, easy = data["is_same"], ~data["is_hard"]
    wrong = []
    for name, figures in reported.items():
        e = data[name].astype(np.float64)
        e /= np.maximum(np.linalg.norm(e, axis=1, keepdims=True), 1e-12)
        cosine = np.sum(e[0::2] * e[1::2], axis=1)
        again = {
            "accuracy": ten_fold_accuracy(cosine, same),
            "tar_at_far_0.01": tar_at_far(cosine, same, 0.01),
            "accuracy_without_hard": ten_fold_accuracy(cosine[easy], same[easy]),
            "tar_at_far_0.01_without_hard": tar_at_far(cosine[easy], same[easy], 0.01),
        }
        for key, value in figures.items():
            if not abs(again[key] - value) <= TOLERANCE:
                wrong.append(f"{name} {key}: reported {value}, recomputed {again[key]}")
    if wrong:
        sys.exit("recompute: the report is wrong: " + "; ".join(wrong))
    print(f"recompute: all {sum(map(len, reported.values()))} numbers of the report are correct")


def ten_fold_accuracy(cosine: np.ndarray, same: np.ndarray) -> float:
    """Return the mean accuracy over ten folds, each with the best threshold of the others (LFW protocol)."""
    distance = 2 - 2 * cosine  # squared distance of unit vectors
    thresholds = np.arange(0, 4, 0.01)
    right = (distance[:, None] < thresholds) == same[:, None]  # [pairs, thresholds]
    accuracies = []
    for fold in np.array_split(np.arange(len(same)), 10):
        others = np.delete(right, fold, axis=0)
        accuracies.append(right[fold, others.sum(axis=0).argmax()].mean())
    return float(np.mean(accuracies))


def tar_at_far(cosine: np.ndarray, same: np.ndarray, far: float) -> float:
    """Return the highest true accept rate with a false accept rate of at most `far`."""
    best = 0.0
    for threshold in np.unique(cosine):
        if np.mean(cosine[~same] >= threshold) <= far:
            best = max(best, float(np.mean(cosine[same] >= threshold)))
    return best


if __name__ == "__main__":
    main()
