"""The distributed head: every rank holds the rows of its own classes, and no others.

Embeddings and labels are gathered (B x D numbers); each rank computes the logits of its own classes
for the whole global batch; the softmax needs three numbers a sample from every rank. Nothing that
travels grows with the number of classes. Here the logits of a rank, [B, C_local], are held in memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plsc.heads.base import GlobalBatch, Head, HeadOutput, gather_batch, mean_cosine
from plsc.heads.margins import Formula
from plsc.parallel.collectives import max_over_ranks, sum_over_ranks
from plsc.parallel.shard import class_range


class ShardedHead(Head):
    """Softmax over C classes whose rows are split over the ranks of `group` (None: one process).

    class_num: C; emb_size: D; the rest as in `Head`. A rank may own no class at all.
    """

    is_sharded = True

    def __init__(
        self,
        class_num: int,
        emb_size: int,
        formula: Formula,
        *,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        mine = class_range(class_num, rank, ranks)
        super().__init__(class_num, mine, emb_size, formula, seed, group)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        with_accuracy: bool = False,
        with_gauge: bool = False,
    ) -> HeadOutput:
        """Return the mean loss of the global batch. See `Head.forward`."""
        batch = gather_batch(embeddings, labels, self.class_num, self.group)
        start, stop = self.class_range
        rows = ((batch.labels >= start) & (batch.labels < stop)).nonzero()[:, 0]
        columns = batch.labels[rows] - start
        logits, plain = self.formula.logits(batch.embeddings, self.weight, self.bias, rows, columns)
        loss = _ShardedCrossEntropy.apply(logits, rows, columns, self.group)
        return HeadOutput(
            loss=loss,
            mean_loss=loss.detach(),
            batch=len(batch.labels),
            accuracy=self._accuracy(plain, batch) if with_accuracy else None,
            mean_cosine=mean_cosine(batch.embeddings) if with_gauge else None,
        )

    def _accuracy(self, plain: Tensor, batch: GlobalBatch) -> Tensor:
        """Return the share of samples whose best class over all shards is the label's."""
        count = len(batch.labels)
        value = plain.new_full((count,), -torch.inf)
        index = batch.labels.new_full((count,), self.class_num)
        if plain.shape[1]:
            value, index = plain.max(dim=1)
            index = index + self.class_range[0]
        best = max_over_ranks(value.clone(), self.group)
        # Of classes that tie, the lowest wins: a collapsed network must not count as right everywhere.
        candidate = torch.where(value == best, index, self.class_num)
        winner = -max_over_ranks(-candidate, self.group)
        return (winner == batch.labels).float().mean()


class _ShardedCrossEntropy(torch.autograd.Function):
    """Mean over the batch of log sum_j exp z_ij - z_iy, with the columns j spread over the ranks.

    Every rank passes its logits [B, C_local] and where the targets among them are; all ranks get the
    same loss. Backward gives (P_ij - [j = y_i]) / B for the rank's own columns.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, columns: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        batch, classes = logits.shape
        largest = logits.new_full((batch,), -torch.inf)
        if classes:
            largest = logits.amax(dim=1)
        max_over_ranks(largest, group)
        exponentials = (logits - largest[:, None]).exp_()
        target = logits.new_zeros(batch)
        target[rows] = logits[rows, columns]
        sums, target = sum_over_ranks(torch.stack([exponentials.sum(dim=1), target]), group)
        exponentials /= sums[:, None]
        ctx.save_for_backward(exponentials, rows, columns)
        return (sums.log() + largest - target).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, rows, columns = ctx.saved_tensors
        gradient = probabilities.clone()
        gradient[rows, columns] -= 1
        return gradient.mul_(gradients[0] / len(gradient)), None, None, None
