"""Classification accuracy on labelled images: top-1 and top-5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from plsc.evaluate.report import Result
from plsc.heads import Head
from plsc.heads.topk import REPORTED, count_hits
from plsc.parallel.collectives import class_range, sum_over_ranks
from plsc.parallel.world import World


@dataclass(frozen=True)
class ClassificationResult(Result):
    """The result of `classify`; accuracies are fractions, 0..1."""

    METRICS: ClassVar = ("top1", "top5")

    top1: float  # the label has the highest logit without margin
    top5: float  # the label has one of the five highest logits
    count: int  # number of images

    def summary(self) -> str:
        """Return the accuracies for the log."""
        return f"top-1 {self.top1:.4f} top-5 {self.top5:.4f} ({self.count:,} images)"


def classify(
    head: Head, embeddings: np.ndarray, labels: np.ndarray, *, batch_size: int, world: World
) -> ClassificationResult:
    """Return the accuracy of the head on the images of all ranks; a collective.

    Args:
        head: with the class weights, on the device of `world`.
        embeddings: [n, D], of the images of this rank, from `embed_images` with ``gather=False``.
        labels: int64 [N], class numbers of the images of all ranks.
        batch_size: images per rank for which logits are computed at a time.
    """
    mine = torch.from_numpy(labels[slice(*class_range(len(labels), world.rank, world.size))])
    x = torch.from_numpy(embeddings.reshape(-1, head.emb_size))
    hits = torch.zeros(2, dtype=torch.int64, device=world.device)
    # Every rank takes part equally often: rank 0 has the most images.
    for start in range(0, -(-len(labels) // world.size), batch_size):
        some = slice(start, start + batch_size)
        _, classes = head.topk(x[some].to(world.device), REPORTED)
        hits += count_hits(classes, mine[some].to(world.device))
    first, any_of_five = sum_over_ranks(hits, world.head_group).tolist()
    return ClassificationResult(first / len(labels), any_of_five / len(labels), len(labels))
