"""The dense twins: every rank holds all class rows, and computes the loss of its own samples."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from plsc.heads.base import Head, HeadOutput, gather_batch, mean_cosine
from plsc.heads.margins import Formula
from plsc.parallel.collectives import sum_over_ranks


class DenseHead(Head):
    """Softmax over C classes with all rows on every rank; parameters as in `ShardedHead`."""

    is_sharded = False

    def __init__(
        self,
        class_num: int,
        emb_size: int,
        formula: Formula,
        *,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(class_num, (0, class_num), emb_size, formula, seed, group)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        with_accuracy: bool = False,
        with_gauge: bool = False,
    ) -> HeadOutput:
        """Return a loss whose gradient is that of the global mean. See `Head.forward`.

        It is the sum of the local losses over the GLOBAL batch size: what it lacks is on other ranks.
        """
        batch = gather_batch(embeddings.detach(), labels, self.class_num, self.group)
        total = len(batch.labels)
        rows = torch.arange(len(labels), device=labels.device)
        logits, plain = self.formula.logits(embeddings, self.weight, self.bias, rows, labels)
        loss = F.cross_entropy(logits, labels, reduction="sum") / total
        correct = (plain.argmax(dim=1) == labels).sum().float()
        measured = sum_over_ranks(torch.stack([loss.detach(), correct.to(loss.dtype)]), self.group)
        return HeadOutput(
            loss=loss,
            mean_loss=measured[0],
            batch=total,
            accuracy=measured[1] / total if with_accuracy else None,
            mean_cosine=mean_cosine(batch.embeddings) if with_gauge else None,
        )

    def sync_gradients(self) -> None:
        """Sum the gradients of the rows over the ranks: each has those of its own samples."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                sum_over_ranks(parameter.grad, self.group)
