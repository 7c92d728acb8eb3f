"""Classification heads: map embeddings and labels to the loss of the global batch.

Usable without the rest of plsc: docs/head.md.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from plsc.errors import OptionError, suggest
from plsc.heads.base import DenseHead, Head, HeadOutput
from plsc.heads.margins import MARGINS, Margin, build_margin
from plsc.heads.optimizers import ROW_OPTIMIZERS, RowAdagrad, RowAdamW, RowOptimizer, RowSGD
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
]

LOSS_TYPES = tuple(f"dist_{name}" for name in MARGINS) + tuple(MARGINS)


def build_head(
    loss_type: str,
    class_num: int,
    emb_size: int,
    *,
    margin: Margin | None = None,
    centers: int = 1,
    sampling: Sampling | None = None,
    execution: Execution | None = None,
    row_dtype: str | torch.dtype = torch.float32,
    initial_norm: float | None = None,
    offload: bool = False,
    on_nonfinite: str = "raise",
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Head:
    """Return the head for a loss type: ``dist_<margin>`` (sharded) or ``<margin>`` (replicated).

    Args:
        loss_type: one of LOSS_TYPES.
        class_num: total number of classes C.
        emb_size: embedding size D.
        margin: the margin with its settings; its name must match the loss type. None: default settings.

    The other arguments are those of `ShardedHead`. A replicated head supports only centers, row_dtype
    (float32 or float64), initial_norm, seed and group.

    Raises:
        OptionError: unknown loss type, or an option that this head does not support.
    """
    if loss_type not in LOSS_TYPES:
        raise OptionError(f"unknown loss type {loss_type!r}; {suggest(loss_type, LOSS_TYPES)}")
    row_dtype = read_dtype("row_dtype", row_dtype, ROW_DTYPES)
    name = loss_type.removeprefix("dist_")
    margin = build_margin(name) if margin is None else margin
    if margin.name != name:
        raise OptionError(f"loss type {loss_type} got the margin {margin.name}; expected {name}")
    if loss_type.startswith("dist_"):
        return ShardedHead(
            class_num,
            emb_size,
            margin,
            centers=centers,
            sampling=sampling,
            execution=execution,
            row_dtype=row_dtype,
            initial_norm=initial_norm,
            offload=offload,
            on_nonfinite=on_nonfinite,
            seed=seed,
            group=group,
        )
    if (sampling is not None and sampling.ratio < 1) or offload or row_dtype is torch.bfloat16:
        raise OptionError(
            f"{loss_type} is a replicated head, which does not support sampling, offload or bfloat16 class "
            f"weights; use dist_{loss_type}"
        )
    return DenseHead(
        class_num,
        emb_size,
        margin,
        centers=centers,
        row_dtype=row_dtype,
        initial_norm=initial_norm,
        seed=seed,
        group=group,
    )
