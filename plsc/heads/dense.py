"""The dense twins: every rank holds all class rows, and computes the loss of its own samples.

The whole matrix [b, C], by autograd: what most code does, and what the sharded head is measured against.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from plsc.heads.base import Head, HeadOutput, check_batch, effective_rank, gather_batch
from plsc.heads.geometry import Normalise, norms
from plsc.heads.margins import Margin
from plsc.parallel.collectives import gather_rows, sum_over_ranks


class DenseHead(Head):
    """Softmax over C classes with all rows on every rank; parameters as in `Head`."""

    is_sharded = False

    def __init__(
        self,
        class_num: int,
        emb_size: int,
        margin: Margin,
        *,
        centers: int = 1,
        initial_norm: float | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            class_num,
            (0, class_num),
            emb_size,
            margin,
            seed,
            group,
            centers,
            initial_norm=initial_norm,
        )

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        with_accuracy: bool = False,
        with_gauge: bool = False,
        sizes: list[int] | None = None,
    ) -> HeadOutput:
        """Return a loss whose gradient is that of the global mean. See `Head.forward`.

        It is the sum of the local losses over the GLOBAL batch size: what it lacks is on other ranks.
        """
        check_batch(embeddings, labels, self.emb_size)
        batch = gather_batch(embeddings.detach(), labels, self.class_num, self.group, sizes)
        total = len(batch.labels)
        plain = self._plain_logits(embeddings)
        c = plain.gather(1, labels[:, None])[:, 0] / self.margin.scale
        norm = norms(embeddings)
        cosines = None
        if self.margin.needs_all_cosines:
            cosines = gather_rows(c.detach(), batch.sizes, self.group)
        lengths = norms(batch.embeddings)
        if self.training:
            self.margin.observe(cosines, lengths)
        logits = plain
        if cosines is not None:
            hard = self.margin.hard(c.detach())
            if hard is not None:
                other = plain / self.margin.scale
                raised = plain * (hard[1] + other)
                logits = torch.where(other > hard[0][:, None], raised, plain)
        target = self.margin.shared_target(c, norm) * self.margin.scale
        logits = logits.scatter(1, labels[:, None], target[:, None])
        loss = F.cross_entropy(logits, labels, reduction="sum") / total
        addition = self.margin.regulariser(norm)
        if addition is not None:
            loss = loss + addition.sum() / total
        correct = (plain.detach().argmax(dim=1) == labels).sum().to(loss.dtype)
        measured = sum_over_ranks(torch.stack([loss.detach(), correct]), self.group)
        return HeadOutput(
            loss=loss,
            mean_loss=measured[0],
            batch=total,
            accuracy=measured[1] / total if with_accuracy else None,
            effective_rank=effective_rank(batch.embeddings) if with_gauge else None,
            finite=lengths.isfinite().all(),
        )

    def sync_gradients(self) -> None:
        """Sum the gradients of the rows over the ranks: each has those of its own samples."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                sum_over_ranks(parameter.grad, self.group)

    def _plain_logits(self, embeddings: Tensor) -> Tensor:
        """Return the logits without margin [b, C], of the nearest sub-centre."""
        if not self.margin.is_cosine:
            return F.linear(embeddings, self.weight, self.bias)
        rows = self.weight.flatten(0, -2)
        c = F.linear(Normalise.apply(embeddings), Normalise.apply(rows))
        return c.view(len(c), self.class_num, self.centers).amax(dim=2) * self.margin.scale
