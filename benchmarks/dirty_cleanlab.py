"""Rank labels and classes with cleanlab's confident learning, for `benchmarks/dirty.py`.

    python -m venv cleanlab && cleanlab/bin/pip install cleanlab    # AGPL: in its own environment
    cleanlab/bin/python benchmarks/dirty_cleanlab.py build/dirty/2/dirty-work/probabilities.npz

The file has `labels` [N] and `probabilities` [N, C] of networks that did not see the image. Writes
`cleanlab.npz` next to it: scores of the images by three rules, and of pairs of classes.
"""

import sys
from pathlib import Path

import numpy as np
from cleanlab.dataset import find_overlapping_classes, rank_classes_by_label_quality
from cleanlab.rank import get_label_quality_scores

path = Path(sys.argv[1])
with np.load(path) as file:
    labels, probabilities = file["labels"], file["probabilities"].astype(np.float64)
probabilities /= probabilities.sum(1, keepdims=True)
rules = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
scores = {
    rule: 1 - get_label_quality_scores(labels, probabilities, method=rule, adjust_pred_probs=False)
    for rule in rules
}
pairs = find_overlapping_classes(labels=labels, pred_probs=probabilities)
quality = rank_classes_by_label_quality(labels=labels, pred_probs=probabilities)
np.savez(
    path.parent / "cleanlab.npz",
    pairs=pairs[["Class Index A", "Class Index B"]].to_numpy(),
    joint=pairs["Joint Probability"].to_numpy(),
    classes=quality["Class Index"].to_numpy(),
    badness=1 - quality["Label Quality Score"].to_numpy(),
    **scores,
)
