"""Classification heads: embeddings and labels in, the loss of the global batch out.

Usable alone, without the rest of plsc: docs/head.md.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from plsc.errors import OptionError, suggest
from plsc.heads.base import DenseHead, Head, HeadOutput
from plsc.heads.margins import MARGINS, Margin, build_margin
from plsc.heads.optimizers import ROW_OPTIMIZERS, RowAdagrad, RowAdamW, RowSGD
from plsc.heads.sampling import Sampling
from plsc.heads.sharded import ShardedHead
from plsc.heads.softmax import Execution
from plsc.heads.update import RowOptimizer
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
    """Return the head of a loss type: ``dist_<margin>`` is sharded over the ranks of `group`.

    class_num: number of all classes; emb_size: D; margin: with settings of its own, of the kind that the
    loss type names; the rest: see `ShardedHead`. ``<margin>`` alone has all rows on every rank and, of the
    rest, initial_norm alone.

    Raises OptionError for an unknown loss type, and for options that it does not have.
    """
    if loss_type not in LOSS_TYPES:
        raise OptionError(f"loss type {loss_type!r} is not known; {suggest(loss_type, LOSS_TYPES)}")
    row_dtype = read_dtype("row_dtype", row_dtype, ROW_DTYPES)
    name = loss_type.removeprefix("dist_")
    margin = build_margin(name) if margin is None else margin
    if margin.name != name:
        raise OptionError(f"loss type {loss_type} was given the margin {margin.name}; expected {name}")
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
            f"{loss_type} has all rows on every rank and neither samples nor offloads nor rounds them; use "
            f"dist_{loss_type}"
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
