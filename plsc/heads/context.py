"""What a forward pass of the head saves for backward(), and backward() for the class weights' optimizer.

1. The forward pass makes a `ForwardContext` (softmax.py) and puts it into `HeadLoss`.
2. backward() through that loss returns the gradient of the embeddings and saves the context, once
   (`SavedContexts.save`). A head without such an optimizer gets whole gradients instead.
3. The optimizer's step consumes the saved contexts (`SavedContexts.consume`), one for each micro-batch, and
   computes from them the gradients of a tile of rows at a time. A skipped step discards them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plsc.heads.geometry import through_normalisation
from plsc.heads.margins import Margin
from plsc.heads.softmax import ForwardContext
from plsc.heads.weights import Rows
from plsc.parallel.collectives import ScatteredSum

if TYPE_CHECKING:
    from plsc.heads.sharded import ShardedHead

_MANY_CONTEXTS = 256  # more micro-batches than anyone accumulates


class SavedContexts(list[ForwardContext]):
    """The contexts that backward() saved since the last step of the optimizer of the class weights.

    The protocol between a head and that optimizer: the head calls `begin` in each forward pass in training
    and `save` in each backward pass; the optimizer calls `consume` when it steps, or `discard`.

    Attributes:
        has_consumer: an optimizer has been made for the head: backward() saves contexts for it.
        step: steps so far; keys sampling and rounding.
    """

    def __init__(self, margin: Margin) -> None:
        super().__init__()
        self.has_consumer = False
        self.step = 0
        self._margin = margin
        self._statistics: dict[str, Tensor] | None = None  # the margin's, before this step

    def begin(self) -> None:
        """Keep the margin's running statistics of before the step, for `discard`."""
        if self._statistics is None:
            state = self._margin.state_dict()
            self._statistics = {name: value.clone() for name, value in state.items()}

    def save(self, context: ForwardContext) -> None:
        """Keep a context until the step; warn where the steps seem to be forgotten."""
        self.append(context)
        if len(self) == _MANY_CONTEXTS:
            warnings.warn(
                f"{len(self)} backward passes went through the head since its row optimizer last stepped, so "
                "the class weights do not learn and memory grows; call step() (or skip()) of the row "
                "optimizer after each step of the backbone's optimizer",
                stacklevel=2,
            )

    def consume(self) -> list[ForwardContext]:
        """Return all contexts, for one update; the next step begins."""
        contexts = list(self)
        self.clear()
        self._statistics = None
        self.step += 1
        return contexts

    def discard(self) -> None:
        """Drop all contexts and restore the margin's running statistics; the next step begins."""
        if self._statistics is not None:
            self._margin.load_state_dict(self._statistics)
        self.consume()


def rows_of(contexts: list[ForwardContext]) -> Rows:
    """Return the rows that took part in any of the forward passes, at home."""
    homes = [context.home for context in contexts]
    if homes[0].selected is None:
        return homes[0]
    selected = torch.cat([home.selected for home in homes if home.selected is not None])
    return dataclasses.replace(homes[0], selected=torch.unique(selected))


def summed_gradients(
    contexts: list[ForwardContext], rows: Rows
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield each tile of `rows_of` with the gradients of its rows [t, D] and biases [t], summed."""
    for tile in rows.tiles(contexts[0].backend.tile):
        count, unit = tile.stop - tile.start, contexts[0].queries.unit
        dw = unit.new_zeros(count, unit.shape[1])
        db = None if rows.bias is None else unit.new_zeros(count)
        for context in contexts:
            part, places = _part_of(context, rows, tile)
            more, more_biases = context.backend.gradients(context, part)
            dw[places] += more
            if db is not None and more_biases is not None:
                db[places] += more_biases
        yield tile, dw, db


def _part_of(context: ForwardContext, rows: Rows, tile: slice) -> tuple[slice, Tensor | slice]:
    """Return which rows of a context are in a tile of all rows, and where in the tile."""
    mine = context.home.selected
    if rows.selected is None or mine is None:
        return tile, slice(None)
    wanted = rows.selected[tile]
    low = torch.searchsorted(mine, wanted[0])
    high = torch.searchsorted(mine, wanted[-1], right=True)
    part = slice(int(low), int(high))
    return part, torch.searchsorted(wanted, mine[part]).to(context.rows.weight.device)


@dataclass
class EmbeddingGradient:
    """The gradient of this rank's embeddings while it is communicated.

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


class HeadLoss(torch.autograd.Function):
    """Hands the loss of a forward pass to autograd; once, as the rows may have changed afterwards."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: ShardedHead,
        loss: Tensor,
        context: ForwardContext,
        gradient: EmbeddingGradient | None,
    ) -> Tensor:
        """Return the loss as it is."""
        ctx.parts = (head, context, gradient)
        ctx.like = embeddings.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that exist, and save the context for the optimizer of the class weights."""
        if ctx.parts is None:
            raise RuntimeError(
                "backward() a second time through the same forward pass of the head; call the head again "
                "(the first backward() has handed its parts to the update of the rows)"
            )
        head, context, gradient = ctx.parts
        ctx.parts = None
        loss_gradient = gradients[0].detach()
        context.weight = context.weight * loss_gradient.to(context.weight)
        to_embeddings = None
        if gradient is not None:
            to_embeddings = (gradient.wait() * loss_gradient).to(ctx.like)
        to_weight, to_bias = None, None
        if ctx.needs_input_grad[1]:
            if head.contexts.has_consumer:
                head.contexts.save(context)
            else:
                to_weight, to_bias = _whole_gradients(head, context)
                head.contexts.step += 1
        return to_embeddings, to_weight, to_bias, None, None, None, None


def _whole_gradients(head: ShardedHead, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of all rows and biases of this rank, zero for those that took no part."""
    weight = torch.zeros_like(head.weight)
    bias = None if head.bias is None else torch.zeros_like(head.bias)
    flat = weight.view(-1, weight.shape[-1])
    for tile, dw, db in summed_gradients([context], context.home):
        places = context.home.positions(tile)
        flat[places] = dw.to(flat)
        if bias is not None and db is not None:
            bias[places] = db.to(bias)
    return weight, bias
