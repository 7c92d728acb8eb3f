"""How class weights are updated, from backward() of the head to the optimizer step.

1. The forward pass creates a `ForwardContext` (softmax.py) and passes it to `HeadLoss`.
2. backward() through that loss returns the gradient of the embeddings and saves the context
   (`SavedContexts.save`). Without a row optimizer, it computes the gradients of all class weights instead.
3. `RowOptimizer.step` (optimizers.py) consumes the saved contexts (`SavedContexts.consume`), one per
   micro-batch. It computes gradients and updates one tile of class weights at a time. A skipped step discards
   the contexts.

weights.py has the update formulas. The head is a `ShardedHead`, which imports this file.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plsc.errors import OptionError
from plsc.heads.margins import Margin
from plsc.heads.softmax import ForwardContext, normalisation_backward
from plsc.heads.weights import Rows, copy_to_device
from plsc.parallel.collectives import ScatteredSum

_MANY_CONTEXTS = 256  # more than any reasonable number of micro-batches


class SavedContexts(list[ForwardContext]):
    """The forward contexts that backward() saved since the last step of the row optimizer.

    The protocol between a head and its row optimizer: the head calls `begin` in each training forward pass
    and `save` in each backward pass; the optimizer calls `consume` in step(), or `discard` in skip().

    Attributes:
        has_consumer: the head has a row optimizer, so backward() saves contexts.
        step: number of steps so far; seeds sampling and stochastic rounding.
    """

    def __init__(self, margin: Margin) -> None:
        super().__init__()
        self.has_consumer = False
        self.step = 0
        self._margin = margin
        self._statistics: dict[str, Tensor] | None = None  # the margin's buffers before this step

    def begin(self) -> None:
        """Save the margin's running statistics before the step, for `discard`."""
        if self._statistics is None:
            state = self._margin.state_dict()
            self._statistics = {name: value.clone() for name, value in state.items()}

    def save(self, context: ForwardContext) -> None:
        """Keep a context until the next step; warn if step() is apparently never called."""
        self.append(context)
        if len(self) == _MANY_CONTEXTS:
            warnings.warn(
                f"{len(self)} backward passes since the last step of the row optimizer: the class weights "
                "are not trained and memory grows; call step() or skip() of the row optimizer after each "
                "step of the backbone's optimizer",
                stacklevel=2,
            )

    def consume(self) -> list[ForwardContext]:
        """Return and remove all contexts, and start the next step."""
        contexts = list(self)
        self.clear()
        self._statistics = None
        # Skipped steps count as well (`discard`), so a repeated batch draws other classes and other noise.
        self.step += 1
        return contexts

    def discard(self) -> None:
        """Drop all contexts, restore the margin's running statistics, and start the next step."""
        if self._statistics is not None:
            self._margin.load_state_dict(self._statistics)
        self.consume()


def rows_of(contexts: list[ForwardContext]) -> tuple[Rows, Rows]:
    """Return the stored rows that any of the forward passes selected, and these rows on the device."""
    first, stored = contexts[0], contexts[0].stored
    if len(contexts) == 1:
        return stored, first.rows
    chosen = [context.stored.on_host for context in contexts if context.stored.on_host is not None]
    if chosen:
        stored = stored.of_rows(torch.unique(torch.cat(chosen)))
    is_copied = first.rows is not first.stored
    return stored, copy_to_device(stored, first.rows.weight.device) if is_copied else stored


@dataclass
class EmbeddingGradient:
    """The gradient of this rank's embeddings, while its reduce-scatter runs.

    unit [b, D], length [b]: of the local embeddings. radial [b]: dL / d|x|, or None.
    """

    scattered: ScatteredSum
    unit: Tensor
    length: Tensor | None
    radial: Tensor | None

    def wait(self) -> Tensor:
        """Wait for the reduce-scatter and return dL / dx [b, D]."""
        de = self.scattered.wait()
        if self.length is not None:
            de = normalisation_backward(de, self.unit, self.length)
        if self.radial is not None:
            de = de + self.radial[:, None] * self.unit
        return de


class HeadLoss(torch.autograd.Function):
    """Connects the loss of a forward pass to autograd; backward() works once per forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Any,
        loss: Tensor,
        context: ForwardContext,
        gradient: EmbeddingGradient | None,
    ) -> Tensor:
        """Return the loss."""
        ctx.parts = (head, context, gradient)
        ctx.like = embeddings.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, and save the context for the row optimizer if there is one."""
        if ctx.parts is None:
            raise RuntimeError(
                "backward() was called twice for the same forward pass of the head; call the head again "
                "before the second backward()"
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
            elif head.weight.dtype is torch.int8:
                raise OptionError(
                    "int8 class weights have no gradient, so torch's optimizers cannot update them; use a "
                    "row optimizer, such as plsc.heads.RowSGD"
                )
            else:
                to_weight, to_bias = _full_gradients(head, context)
                head.contexts.step += 1
        return to_embeddings, to_weight, to_bias, None, None, None, None


def _full_gradients(head: Any, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of all class weights and biases of this rank; zero for classes not sampled."""
    weight = torch.zeros_like(head.weight)
    bias = None if head.bias is None else torch.zeros_like(head.bias)
    flat = weight.view(-1, weight.shape[-1])
    for tile, dw, db in context.backend.summed_gradients([context], context.rows):
        index = context.stored.positions(tile)
        flat[index] = dw.to(flat)
        if bias is not None and db is not None:
            bias[index] = db.to(bias)
    return weight, bias
