"""How class weights are updated, from backward() of the head to the optimizer step.

1. The forward pass creates a `ForwardContext` (softmax.py) and passes it to `HeadLoss`.
2. backward() through that loss returns the gradient of the embeddings and saves the context
   (`SavedContexts.save`). Without a row optimizer, it computes the gradients of all class weights instead.
3. `RowOptimizer.step` consumes the saved contexts (`SavedContexts.consume`), one per micro-batch. It computes
   gradients and updates one tile of class weights at a time. A skipped step discards the contexts.

optimizers.py has the optimizers, rules.py the update formulas.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plsc.errors import CheckpointError, OptionError
from plsc.heads.geometry import normalisation_backward
from plsc.heads.margins import Margin
from plsc.heads.rules import Rule, apply_rule
from plsc.heads.softmax import ForwardContext
from plsc.heads.weights import Rows, States, copy_states_to_device, read_dtype, write_back
from plsc.parallel.collectives import ScatteredSum, sum_over_ranks
from plsc.seeds import hash_key

if TYPE_CHECKING:
    from plsc.heads.sharded import ShardedHead

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
        self.step += 1
        return contexts

    def discard(self) -> None:
        """Drop all contexts, restore the margin's running statistics, and start the next step."""
        if self._statistics is not None:
            self._margin.load_state_dict(self._statistics)
        self.consume()


def rows_of(contexts: list[ForwardContext]) -> Rows:
    """Return the stored rows that any of the forward passes selected."""
    every = [context.stored for context in contexts]
    if every[0].selected is None:
        return every[0]
    selected = torch.cat([stored.selected for stored in every if stored.selected is not None])
    return dataclasses.replace(every[0], selected=torch.unique(selected))


def summed_gradients(
    contexts: list[ForwardContext], rows: Rows
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield (tile, gradient [t, D], gradient of the biases [t] or None), summed over the contexts.

    rows: from `rows_of`.
    """
    for tile in rows.tiles(contexts[0].backend.tile):
        count, unit = tile.stop - tile.start, contexts[0].queries.unit
        dw = unit.new_zeros(count, unit.shape[1])
        db = None if rows.bias is None else unit.new_zeros(count)
        for context in contexts:
            part, index = _overlap(context, rows, tile)
            more, more_biases = context.backend.gradients(context, part)
            dw[index] += more
            if db is not None and more_biases is not None:
                db[index] += more_biases
        yield tile, dw, db


def _overlap(context: ForwardContext, rows: Rows, tile: slice) -> tuple[slice, Tensor | slice]:
    """Return which selected rows of a context are in a tile of `rows`, and their indices in the tile."""
    mine = context.stored.selected
    if rows.selected is None or mine is None:
        return tile, slice(None)
    wanted = rows.selected[tile]
    low = torch.searchsorted(mine, wanted[0])
    high = torch.searchsorted(mine, wanted[-1], right=True)
    part = slice(int(low), int(high))
    return part, torch.searchsorted(wanted, mine[part]).to(context.rows.weight.device)


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
        head: ShardedHead,
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
            else:
                to_weight, to_bias = _full_gradients(head, context)
                head.contexts.step += 1
        return to_embeddings, to_weight, to_bias, None, None, None, None


def _full_gradients(head: ShardedHead, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of all class weights and biases of this rank; zero for classes not sampled."""
    weight = torch.zeros_like(head.weight)
    bias = None if head.bias is None else torch.zeros_like(head.bias)
    flat = weight.view(-1, weight.shape[-1])
    for tile, dw, db in summed_gradients([context], context.stored):
        index = context.stored.positions(tile)
        flat[index] = dw.to(flat)
        if bias is not None and db is not None:
            bias[index] = db.to(bias)
    return weight, bias


class RowOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers of class weights.

    A torch optimizer over the head's parameters, so learning-rate schedules and state dicts work. But
    `step()` consumes saved contexts instead of `.grad`: it reads and writes each class weight once, and never
    allocates the gradient of all class weights. Several backward passes before a step accumulate.

    head: its backward() no longer sets `weight.grad`. Raises OptionError for settings out of range.
    """

    kind: str
    state_dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def __init__(self, head: ShardedHead, state_dtype: str | torch.dtype, **settings: Any) -> None:
        for name, value in settings.items():
            if min(value if isinstance(value, tuple) else (value,)) < 0:
                raise OptionError(f"{name} is {value}; expected 0 or more")
        if not isinstance(getattr(head, "contexts", None), SavedContexts):
            raise OptionError(f"the head is a {type(head).__name__}; expected a ShardedHead")
        self.head = head
        if str(state_dtype).removeprefix("torch.") == "int8" and "int8" not in self.state_dtypes:
            raise OptionError(
                f"state_dtype is 'int8', which {self.kind} does not support; use float32 or bfloat16, or the "
                "optimizer sgd"
            )
        self._dtype = read_dtype("state_dtype", state_dtype, self.state_dtypes)
        if head.weight.dtype is torch.float64:
            self._dtype = torch.float64
        parameters = [head.weight] + ([] if head.bias is None else [head.bias])
        super().__init__([{"params": parameters}], dict(settings))
        head.contexts.has_consumer = True
        for parameter in parameters:
            self.state[parameter] = self._empty_states(parameter)

    def _empty_states(self, parameter: Tensor) -> States:
        raise NotImplementedError

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0, clip: float | Tensor = 1.0
    ) -> Any:
        """Update the class weights and start the next step. Not a collective.

        grad_scale: factor by which the loss was multiplied before backward() (GradScaler.get_scale()); the
        gradients are divided by it. clip: factor for the gradients, see `gradient_norm`; a scalar tensor
        avoids a synchronisation with the GPU.
        """
        outcome = None
        if closure is not None:
            with torch.enable_grad():
                outcome = closure()
        head, group = self.head, self.param_groups[0]
        names = ("lr", "momentum", "nesterov", "weight_decay", "eps")
        settings = {name: group[name] for name in names if name in group}
        if "betas" in group:
            settings["beta1"], settings["beta2"] = group["betas"]
        rule = Rule(kind=self.kind, key=hash_key(head.seed, head.step, 3), **settings)
        contexts = head.contexts.consume()
        for context in contexts:
            if isinstance(clip, Tensor):
                context.weight = context.weight * clip.to(context.weight)
            context.factor = (1.0 if isinstance(clip, Tensor) else clip) / grad_scale
        if len(contexts) == 1:
            self._update(contexts[0], rule)
        elif contexts:
            self._accumulate(contexts, rule)
        return outcome

    def skip(self) -> None:
        """Skip this update, for example after an overflow: drop gradients, restore running statistics."""
        self.head.contexts.discard()

    @torch.no_grad()
    def gradient_norm(self, grad_scale: float = 1.0) -> Tensor:
        """Return the 2-norm of the gradient of the class weights of all ranks, a scalar; a collective.

        Costs one more pass over the class weights. To clip the norm over all parameters, add its square to
        that of the backbone's norm.
        """
        contexts = list(self.head.contexts)
        device = contexts[0].log_total.device if contexts else self.head.weight.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if contexts:
            for _, dw, db in summed_gradients(contexts, rows_of(contexts)):
                total += dw.double().square().sum()
                if db is not None:
                    total += db.double().square().sum()
        return sum_over_ranks(total, self.head.group).sqrt() / grad_scale

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore settings and states from `state_dict()`, in place.

        Raises CheckpointError for states of another optimizer, head or number of ranks.
        """
        (group, *others), saved = state_dict["param_groups"], state_dict["state"]
        states = [self.state[parameter] for parameter in self.param_groups[0]["params"]]
        found, expected = (
            [{name: f"{t.dtype} {list(t.shape)}" for name, t in one.items()} for one in every]
            for every in (saved.values(), states)
        )
        if others or found != expected:
            raise CheckpointError(
                f"the states of the row optimizer are {found}; expected {expected} on this rank: use the "
                "optimizer settings and the number of ranks that it was saved with"
            )
        for state, values in zip(states, saved.values(), strict=True):
            for name, tensor in state.items():
                tensor.copy_(values[name])
        self.param_groups[0].update((n, value) for n, value in group.items() if n != "params")

    def _update(self, context: ForwardContext, rule: Rule) -> None:
        """Update from one forward context."""
        rows, stored = context.rows, context.stored
        is_offloaded = rows is not stored
        states = self._states(self.head.weight)
        copies = copy_states_to_device(states, stored, rows.weight.device) if is_offloaded else states
        biases = context.backend.update(context, rule, copies)
        if is_offloaded:
            write_back(rows, stored, copies, states)
        if biases is not None:
            self._update_biases(stored, biases, rule)

    def _accumulate(self, contexts: list[ForwardContext], rule: Rule) -> None:
        """Update from several forward contexts with the sum of their gradients."""
        rows, states, biases = rows_of(contexts), self._states(self.head.weight), []
        for tile, dw, db in summed_gradients(contexts, rows):
            apply_rule(rule, rows, tile, dw, states)
            if db is not None:
                biases.append(db)
        if biases:
            self._update_biases(rows, torch.cat(biases), rule)

    def _update_biases(self, rows: Rows, gradients: Tensor, rule: Rule) -> None:
        """Update the biases of the selected rows, as rows with one column in full precision."""
        bias = self.head.bias
        assert bias is not None
        as_rows = Rows(bias.detach()[:, None], selected=rows.selected, first_row=rows.first_row)
        states = {
            name: state[:, None] if name in ("momentum_buffer", "exp_avg", "exp_avg_sq") else state
            for name, state in self._states(bias).items()
        }
        every = slice(0, len(as_rows))
        apply_rule(rule, as_rows, every, gradients.to(bias.device)[:, None], states)

    def _states(self, parameter: Tensor) -> States:
        """Return the states of a parameter, with classes and sub-centres flattened into one dimension."""
        states = self.state[parameter]
        if parameter.ndim < 3:
            return dict(states)
        rows = parameter.shape[0] * parameter.shape[1]
        return {name: state.view(rows, *state.shape[2:]) for name, state in states.items()}

    def _zeros(self, parameter: Tensor, dtype: torch.dtype | None = None, per_row: bool = False) -> Tensor:
        """Return zeros of the parameter's shape, or [rows] if `per_row`; for biases in full precision."""
        shape = parameter.shape[:-1] if per_row and parameter.ndim > 1 else parameter.shape
        kept = parameter.dtype if parameter is self.head.bias else self._dtype
        return parameter.new_zeros(shape, dtype=dtype or kept)
