"""Classification heads: map embeddings and labels to the loss of the global batch.

Usable without the rest of plsc: docs/head.md.
"""

from __future__ import annotations

from typing import Any

import torch

from plsc.errors import OptionError, suggest
from plsc.heads.base import DenseHead, Head, HeadOutput
from plsc.heads.margins import MARGINS, Margin, build_margin, margins_of_counts
from plsc.heads.optimizers import (
    ROW_OPTIMIZERS,
    RowAdagrad,
    RowAdamW,
    RowOptimizer,
    RowSGD,
)
from plsc.heads.sampling import Sampling
from plsc.heads.sharded import ShardedHead
from plsc.heads.softmax import Execution
from plsc.heads.weights import ROW_DTYPES, read_dtype

__all__ = [
    "LOSS_TYPES",
    "MARGINS",
    "ROW_OPTIMIZERS",
    "DenseHead",
    "Execution",
    "Head",
    "HeadOutput",
    "Margin",
    "RowAdagrad",
    "RowAdamW",
    "RowOptimizer",
    "RowSGD",
    "Sampling",
    "ShardedHead",
    "build_head",
    "build_margin",
    "margins_of_counts",
]

LOSS_TYPES = tuple(f"dist_{name}" for name in MARGINS) + tuple(MARGINS)


def build_head(
    loss_type: str, class_num: int, emb_size: int, *, margin: Margin | None = None, **settings: Any
) -> Head:
    """Return the head for a loss type: ``dist_<margin>`` (sharded) or ``<margin>`` (replicated).

    Args:
        loss_type: one of LOSS_TYPES.
        class_num: total number of classes C.
        emb_size: embedding size D.
        margin: used instead of that of the loss type; None: that one, with its default settings.
        settings: the other arguments of `ShardedHead`. A replicated head supports only centers, row_dtype
            (float32 or float64), seed and group.

    Raises:
        OptionError: unknown loss type, or an option that this head does not support.
    """
    if loss_type not in LOSS_TYPES:
        raise OptionError(f"unknown loss type {loss_type!r}; {suggest(loss_type, LOSS_TYPES)}")
    margin = build_margin(loss_type.removeprefix("dist_")) if margin is None else margin
    if loss_type.startswith("dist_"):
        return ShardedHead(class_num, emb_size, margin, **settings)
    sampling, offload = settings.pop("sampling", None), settings.pop("offload", False)
    row_dtype = read_dtype("row_dtype", settings.pop("row_dtype", torch.float32), ROW_DTYPES)
    if (sampling is not None and sampling.is_partial) or offload or row_dtype in (torch.bfloat16, torch.int8):
        raise OptionError(
            f"{loss_type} is a replicated head, which does not support sampling, offload, bfloat16 or int8 "
            f"class weights; use dist_{loss_type}"
        )
    for unused in ("execution", "on_nonfinite", "file"):  # how a sharded head computes
        settings.pop(unused, None)
    return DenseHead(class_num, emb_size, margin, row_dtype=row_dtype, **settings)
