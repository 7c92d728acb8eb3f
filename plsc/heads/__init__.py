"""Classification heads: embeddings and labels in, the loss of the global batch out."""

from __future__ import annotations

import torch.distributed as dist

from plsc.errors import OptionError, suggest
from plsc.heads.base import Head, HeadOutput
from plsc.heads.dense import DenseHead
from plsc.heads.margins import ArcFaceFormula, Formula, SoftmaxFormula
from plsc.heads.sharded import ShardedHead

__all__ = ["LOSS_TYPES", "DenseHead", "Head", "HeadOutput", "ShardedHead", "build_head"]

LOSS_TYPES = ("dist_arcface", "dist_softmax", "arcface", "softmax")


def build_head(
    loss_type: str,
    class_num: int,
    emb_size: int,
    *,
    scale: float = 64.0,
    margin: float = 0.5,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Head:
    """Return the head of a loss type: ``dist_*`` ones are sharded over the ranks of `group`.

    class_num: number of all classes; emb_size: D; scale, margin (radians): of the cosine losses.
    Raises OptionError for an unknown loss type.
    """
    if loss_type not in LOSS_TYPES:
        raise OptionError(f"loss type {loss_type!r} is not known; {suggest(loss_type, LOSS_TYPES)}")
    formula: Formula = (
        ArcFaceFormula(scale, margin) if loss_type.endswith("arcface") else SoftmaxFormula()
    )
    head = ShardedHead if loss_type.startswith("dist_") else DenseHead
    return head(class_num, emb_size, formula, seed=seed, group=group)
