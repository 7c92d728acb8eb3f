"""The optimizers of class weights: settings and states; and the reduction of sub-centres, with their states.

`RowOptimizer` is the base class; weights.py has the update formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plsc.errors import CheckpointError, OptionError
from plsc.heads.sharded import ShardedHead
from plsc.heads.softmax import ForwardContext, rows_of
from plsc.heads.weights import (
    MOMENTUM,
    Rows,
    Rule,
    States,
    apply_rule,
    copy_states_to_device,
    read_dtype,
    write_back,
)
from plsc.parallel.world import sum_over_ranks
from plsc.seeds import hash_key


class RowOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers of class weights.

    A torch optimizer over the head's parameters, so learning-rate schedules and state dicts work. But
    `step()` consumes saved contexts instead of `.grad`: it reads and writes each class weight once, and never
    allocates the gradient of all class weights. Several backward passes before a step accumulate.

    head: its backward() no longer sets `weight.grad`. Raises OptionError for settings out of range.
    """

    kind: str
    _empty_states: Callable[[Tensor], States]

    def __init__(self, head: ShardedHead, state_dtype: str | torch.dtype, **settings: Any) -> None:
        for name, value in settings.items():
            if min(value if isinstance(value, tuple) else (value,)) < 0:
                raise OptionError(f"{name} is {value}; expected 0 or more")
        self.head = head
        self._dtype = read_dtype("state_dtype", state_dtype, ("float32", "bfloat16"))
        if head.weight.dtype is torch.float64:
            self._dtype = torch.float64
        parameters = [head.weight] + ([] if head.bias is None else [head.bias])
        super().__init__([{"params": parameters}], dict(settings))
        head.contexts.has_consumer = True
        for parameter in parameters:
            self.state[parameter] = self._empty_states(parameter)
        if head.file is not None:
            head.file.add_states(self.state[head.weight])

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
        # Before consume(), which starts the next step: the rounding is keyed by this one.
        rule = Rule(kind=self.kind, key=hash_key(head.seed, head.step, 3), **settings)
        contexts = head.contexts.consume()
        for context in contexts:
            if isinstance(clip, Tensor):
                context.weight = context.weight * clip.to(context.weight)
            context.factor = (1.0 if isinstance(clip, Tensor) else clip) / grad_scale
        if contexts:
            self._update(contexts, rule)
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
        # Up to C D squares are added: float32 would lose the small ones.
        total = torch.zeros((), dtype=torch.float64, device=device)
        if contexts:
            _, rows = rows_of(contexts)
            for _, dw, db in contexts[0].backend.summed_gradients(contexts, rows):
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
        # copy_() would cast states of another dtype, and broadcast smaller ones.
        given, expected = (
            [{name: f"{t.dtype} {list(t.shape)}" for name, t in state.items()} for state in every]
            for every in (saved.values(), states)
        )
        if others or given != expected:
            raise CheckpointError(
                f"the states of the row optimizer are {given}; expected {expected} on this rank"
            )
        for state, values in zip(states, saved.values(), strict=True):
            for name, tensor in state.items():
                tensor.copy_(values[name])
        self.param_groups[0].update((n, value) for n, value in group.items() if n != "params")

    def _update(self, contexts: list[ForwardContext], rule: Rule) -> None:
        """Update with the sum of the gradients of some forward contexts."""
        (stored, rows), states = rows_of(contexts), self._states(self.head.weight)
        copies = states
        if rows is not stored:
            copies = copy_states_to_device(states, stored, rows.weight.device)
        biases = contexts[0].backend.update(contexts, rows, rule, copies)
        if rows is not stored:
            write_back(rows, stored, copies, states)
        if biases is not None:
            self._update_biases(stored, biases, rule)

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
        shape = list(parameter.shape)
        if parameter.ndim > 1:
            shape[-1:] = [] if per_row else [self.head.emb_size]
        kept = parameter.dtype if parameter is self.head.bias else self._dtype
        return parameter.new_zeros(shape, dtype=dtype or kept)


class RowSGD(RowOptimizer):
    """SGD with momentum and L2 decay, as torch.optim.SGD. State per class: D values of 4 or 2 bytes.

    state_dtype: of the momentum: 'float32' or 'bfloat16' (stochastic rounding).
    """

    kind = "sgd"

    def __init__(
        self,
        head: ShardedHead,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        state_dtype: str | torch.dtype = "float32",
    ) -> None:
        super().__init__(
            head, state_dtype, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov
        )

    def _empty_states(self, parameter: Tensor) -> States:
        return {MOMENTUM: self._zeros(parameter)} if self.defaults["momentum"] else {}


class RowAdamW(RowOptimizer):
    """AdamW (Loshchilov and Hutter 2019); the bias correction counts the updates of each class separately.

    State per class: 2 D values of 4 or 2 bytes, and a 4-byte count. state_dtype: 'float32' or 'bfloat16'.
    """

    kind = "adamw"

    def __init__(
        self,
        head: ShardedHead,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        state_dtype: str | torch.dtype = "float32",
    ) -> None:
        super().__init__(head, state_dtype, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _empty_states(self, parameter: Tensor) -> States:
        return {
            "exp_avg": self._zeros(parameter),
            "exp_avg_sq": self._zeros(parameter),
            "steps": self._zeros(parameter, torch.int32, per_row=True),
        }


class RowAdagrad(RowOptimizer):
    """Row-wise Adagrad: one state per class, the sum of its mean squared gradients (Duchi et al. 2011).

    State per class: one value of 4 or 2 bytes. state_dtype: 'float32' or 'bfloat16'.
    """

    kind = "adagrad"

    def __init__(
        self,
        head: ShardedHead,
        lr: float = 0.1,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        state_dtype: str | torch.dtype = "float32",
    ) -> None:
        super().__init__(head, state_dtype, lr=lr, eps=eps, weight_decay=weight_decay)

    def _empty_states(self, parameter: Tensor) -> States:
        return {"sum_of_squares": self._zeros(parameter, per_row=True)}


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {"sgd": RowSGD, "adamw": RowAdamW, "adagrad": RowAdagrad}
