"""One forward pass over the class rows: what backward() and the update of the rows need of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plsc.heads.engines import Passes
from plsc.heads.norms import through_normalisation
from plsc.heads.passes import Queries, RowGradient, Rows
from plsc.parallel.collectives import ScatteredSum

if TYPE_CHECKING:
    from plsc.heads.sharded import ShardedHead


@dataclass
class Visit:
    """A visit to the rows. home: the offloaded rows that `rows` is a copy of, or None.

    log_total [B]: log of the sum of exp(z_ij) over all classes; the rest as in `RowGradient`.
    """

    passes: Passes
    rows: Rows
    home: Rows | None
    queries: Queries
    log_total: Tensor
    target_row: Tensor
    target_coefficient: Tensor
    shift: Tensor
    kept: Tensor | None
    weight: Tensor = field(default_factory=lambda: torch.ones(()))  # what backward() was given

    def gradient(self, factor: float = 1.0) -> RowGradient:
        """Return what makes row gradients of this visit: those of the mean loss times `weight`."""
        batch = len(self.log_total)
        share = self.weight.to(self.log_total) * (self.queries.scale / batch)
        return RowGradient(
            log_total=self.log_total,
            weight=share.expand(batch).contiguous(),
            target_row=self.target_row,
            target_coefficient=self.target_coefficient,
            factor=factor,
            shift=self.shift,
            kept=self.kept,
        )


@dataclass
class EmbeddingGradient:
    """The gradient for this rank's embeddings, on its way.

    unit [b, D], length [b]: of the local embeddings; radial [b]: the slope of the loss in |x|, or None.
    """

    scattered: ScatteredSum
    unit: Tensor
    length: Tensor | None
    radial: Tensor | None

    def wait(self) -> Tensor:
        """Return dL / dx [b, D]: tangential, as the norm does not count, but for `radial`."""
        de = self.scattered.wait()
        if self.length is not None:
            de = through_normalisation(de, self.unit, self.length)
        if self.radial is not None:
            de = de + self.radial[:, None] * self.unit
        return de


class Loss(torch.autograd.Function):
    """Hands the loss of a visit to autograd; once, as the rows may have changed afterwards."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: ShardedHead,
        loss: Tensor,
        visit: Visit,
        gradient: EmbeddingGradient | None,
    ) -> Tensor:
        """Return the loss as it is."""
        ctx.parts = (head, visit, gradient)
        ctx.like = embeddings.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that are there, and leave the visit for the rows."""
        if ctx.parts is None:
            raise RuntimeError(
                "backward() a second time through the same forward pass of the head; call the head again "
                "(the first backward() has handed its parts to the update of the rows)"
            )
        head, visit, gradient = ctx.parts
        ctx.parts = None
        visit.weight = gradients[0].detach()
        to_embeddings = None
        if gradient is not None:
            to_embeddings = (gradient.wait() * visit.weight).to(ctx.like)
        to_weight, to_bias = None, None
        if head.updates_rows_itself:
            if ctx.needs_input_grad[1]:
                head.leave(visit)
        elif ctx.needs_input_grad[1]:
            to_weight, to_bias = _whole_gradients(head, visit)
            head.step += 1
        return to_embeddings, to_weight, to_bias, None, None, None, None


def _whole_gradients(head: ShardedHead, visit: Visit) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of all rows and biases of this rank, zero for those that took no part."""
    rows = visit.rows
    weight = torch.zeros_like(head.weight)
    bias = None if head.bias is None else torch.zeros_like(head.bias)
    flat = weight.view(-1, weight.shape[-1])
    place = visit.home or rows
    for tile in rows.tiles(visit.passes.tile):
        dw, db = visit.passes.gradients(rows, visit.queries, visit.gradient(), tile)
        flat[place.positions(tile)] = dw.to(flat)
        if bias is not None and db is not None:
            bias[place.positions(tile)] = db.to(bias)
    return weight, bias
