"""Classification heads: map embeddings and labels to the loss of the global batch.

Usable without the rest of plsc: docs/head.md.
"""

from plsc.heads.base import DenseHead, Head, HeadOutput
from plsc.heads.margins import MARGINS, Margin, build_margin, margins_of_counts
from plsc.heads.optimizers import ROW_OPTIMIZERS, RowAdagrad, RowAdamW, RowOptimizer, RowSGD
from plsc.heads.sharded import LOSS_TYPES, Sampling, ShardedHead, build_head
from plsc.heads.softmax import Execution

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
