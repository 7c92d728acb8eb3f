"""Optimizers of class rows: each row is read, changed and written once, and no gradient of all rows exists.

They are torch optimizers over the head's parameters, so learning-rate schedules and state dicts work, but
`step()` takes what the head's backward() left instead of `.grad`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from plsc.errors import CheckpointError, OptionError
from plsc.heads.engines import update_rows
from plsc.heads.offload import bring_back, fetch_states
from plsc.heads.passes import Rows
from plsc.heads.rounding import BLOCK
from plsc.heads.rules import MOMENTUM, MOMENTUM_SCALE, Rule, States, apply_rule
from plsc.heads.sharded import ShardedHead
from plsc.heads.types import STATE_DTYPES, read_dtype
from plsc.heads.visit import Visit
from plsc.keys import hash_key
from plsc.parallel.collectives import sum_over_ranks


class RowOptimizer(torch.optim.Optimizer):
    """Base: updates the rows of a head from the forward passes that were backpropagated since the last step.

    head: from now on its backward() leaves no `weight.grad`. Several passes before a step accumulate.
    Raises OptionError for settings out of range.
    """

    kind: str

    def __init__(self, head: ShardedHead, state_dtype: str | torch.dtype, **settings: Any) -> None:
        for name, value in settings.items():
            if min(value if isinstance(value, tuple) else (value,)) < 0:
                raise OptionError(f"{name} is {value}; expected 0 or more")
        self.head = head
        self._dtype = read_dtype("state_dtype", state_dtype, STATE_DTYPES)
        if head.weight.dtype is torch.float64:
            self._dtype = torch.float64
        parameters = [head.weight] + ([] if head.bias is None else [head.bias])
        super().__init__([{"params": parameters}], dict(settings))
        head.updates_rows_itself = True
        for parameter in parameters:
            self.state[parameter] = self._empty_states(parameter)

    def _empty_states(self, parameter: Tensor) -> States:
        raise NotImplementedError

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: float = 1.0,
        clip: float | Tensor = 1.0,
    ) -> Any:
        """Update the rows, and begin the next step. Not a collective.

        grad_scale: what the loss was multiplied with before backward() (GradScaler.get_scale()); the rows
        are updated as if it had been 1. clip: multiplies the gradients, see `gradient_norm`; a scalar
        tensor on a GPU is not waited for.
        """
        if isinstance(clip, Tensor):
            for visit in self.head.pending:
                visit.weight = visit.weight * clip.to(visit.weight)
            clip = 1.0
        outcome = None
        if closure is not None:
            with torch.enable_grad():
                outcome = closure()
        key = hash_key(self.head.seed, self.head.step, 3)
        visits = self.head.take_pending()
        if not visits:
            return outcome
        factor = clip / grad_scale
        group = self.param_groups[0]
        names = ("lr", "momentum", "nesterov", "weight_decay", "eps")
        settings = {name: group[name] for name in names if name in group}
        if "betas" in group:
            settings["beta1"], settings["beta2"] = group["betas"]
        rule = Rule(kind=self.kind, key=key, **settings)
        if len(visits) == 1:
            self._update(visits[0], rule, factor)
        else:
            self._accumulate(visits, rule, factor)
        return outcome

    def skip(self) -> None:
        """Leave the rows as they are (an overflow): forget the gradients, restore running statistics."""
        self.head.skip()

    @torch.no_grad()
    def gradient_norm(self, grad_scale: float = 1.0) -> Tensor:
        """Return the 2-norm of the gradient of all rows of all ranks, a scalar; a collective.

        It costs one more pass over the rows. Nothing is changed. For clipping over all parameters, add
        its square to that of the backbone's.
        """
        visits = self.head.pending
        device = visits[0].log_total.device if visits else self.head.weight.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if visits:
            for _, dw, db in _summed_gradients(visits, _union(visits), 1 / grad_scale):
                total += dw.double().square().sum()
                if db is not None:
                    total += db.double().square().sum()
        return sum_over_ranks(total, self.head.group).sqrt()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the settings and states of `state_dict()`, in place and in the types they have here.

        Raises CheckpointError for states of another optimizer, head or rank count.
        """
        groups, states = state_dict["param_groups"], state_dict["state"]
        parameters = self.param_groups[0]["params"]
        if len(groups) != 1 or len(states) != len(parameters):
            raise CheckpointError("this is not the state of a row optimizer of such a head")
        for index, parameter in enumerate(parameters):
            mine, theirs = self.state[parameter], states[index]
            if mine.keys() != theirs.keys():
                raise CheckpointError(
                    f"the state has {sorted(theirs)}, this optimizer needs {sorted(mine)}; build it with the "
                    "settings it was saved with"
                )
            for name, tensor in mine.items():
                value = theirs[name]
                if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
                    raise CheckpointError(
                        f"the state {name} is {value.dtype} {list(value.shape)}, this rank needs "
                        f"{tensor.dtype} {list(tensor.shape)}"
                    )
                tensor.copy_(value)
        settings = {name: value for name, value in groups[0].items() if name != "params"}
        self.param_groups[0].update(settings)

    def _update(self, visit: Visit, rule: Rule, factor: float) -> None:
        rows, home = visit.rows, visit.home
        states = self._states(self.head.weight)
        here = states if home is None else fetch_states(states, home, rows.weight.device)
        biases = update_rows(visit.passes, rows, visit.queries, visit.gradient(factor), rule, here)
        if home is not None:
            bring_back(rows, home, here, states)
        if biases is not None:
            self._update_biases(home or rows, biases, rule)

    def _accumulate(self, visits: list[Visit], rule: Rule, factor: float) -> None:
        """Update from several passes: each row of any of them once, by the sum of its gradients."""
        rows, states, biases = _union(visits), self._states(self.head.weight), []
        for tile, dw, db in _summed_gradients(visits, rows, factor):
            apply_rule(rule, rows, tile, dw, states)
            if db is not None:
                biases.append(db)
        if biases:
            self._update_biases(rows, torch.cat(biases), rule)

    def _update_biases(self, rows: Rows, gradients: Tensor, rule: Rule) -> None:
        """Update the biases of the rows in play: rows of one number, in full precision."""
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
        """Return the states of a parameter with the rows in the first dimension, sub-centres among them."""
        states = self.state[parameter]
        if parameter.ndim < 3:
            return dict(states)
        rows = parameter.shape[0] * parameter.shape[1]
        return {name: state.view(rows, *state.shape[2:]) for name, state in states.items()}

    def _like(self, parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeros of the parameter's shape; biases, being few, have theirs in full precision."""
        kept = parameter.dtype if parameter is self.head.bias else (dtype or self._dtype)
        return torch.zeros_like(parameter, dtype=kept)


class RowSGD(RowOptimizer):
    """SGD with momentum and L2 decay: torch.optim.SGD. Bytes of state a row: D times 4, 2 or 1.

    state_dtype: of the momentum: 'float32', 'bfloat16' (rounded at random) or 'int8' (blocks of 256
    share a scale; rounded at random; 8-bit states: Dettmers et al. 2022).
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
            head,
            state_dtype,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )

    def _empty_states(self, parameter: Tensor) -> States:
        if not self.defaults["momentum"]:
            return {}
        states = {MOMENTUM: self._like(parameter)}
        if states[MOMENTUM].dtype is torch.int8:
            blocks = -(-parameter.shape[-1] // BLOCK)
            states[MOMENTUM_SCALE] = parameter.new_zeros(
                *parameter.shape[:-1], blocks, dtype=torch.float32
            )
        return states


class RowAdamW(RowOptimizer):
    """AdamW (Loshchilov and Hutter 2019); the bias correction counts the steps that a row itself made.

    Bytes of state a row: 2 D times 4 or 2, and 4. state_dtype: 'float32' or 'bfloat16'.
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
        _refuse_int8(state_dtype, "RowAdamW")
        super().__init__(head, state_dtype, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _empty_states(self, parameter: Tensor) -> States:
        steps = parameter.new_zeros(
            parameter.shape[:-1] if parameter.ndim > 1 else parameter.shape, dtype=torch.int32
        )
        return {
            "exp_avg": self._like(parameter),
            "exp_avg_sq": self._like(parameter),
            "steps": steps,
        }


class RowAdagrad(RowOptimizer):
    """Adagrad with one number a row, the sum of the mean squares of its gradients (Duchi et al. 2011).

    Bytes of state a row: 4 or 2. state_dtype: 'float32' or 'bfloat16'.
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
        _refuse_int8(state_dtype, "RowAdagrad")
        super().__init__(head, state_dtype, lr=lr, eps=eps, weight_decay=weight_decay)

    def _empty_states(self, parameter: Tensor) -> States:
        rows = parameter[..., 0] if parameter.ndim > 1 else parameter
        kept = parameter.dtype if parameter is self.head.bias else self._dtype
        return {"sum_of_squares": torch.zeros_like(rows, dtype=kept)}


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "sgd": RowSGD,
    "adamw": RowAdamW,
    "adagrad": RowAdagrad,
}


def _union(visits: list[Visit]) -> Rows:
    """Return the rows that took part in any of the visits, where they live."""
    homes = [visit.home or visit.rows for visit in visits]
    if homes[0].selected is None:
        return homes[0]
    selected = torch.unique(
        torch.cat([home.selected for home in homes if home.selected is not None])
    )
    return dataclasses.replace(homes[0], selected=selected)


def _summed_gradients(
    visits: list[Visit], union: Rows, factor: float
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield each tile of the union with the gradients of its rows [t, D] and biases [t], over all visits."""
    for tile in union.tiles(visits[0].passes.tile):
        dw = db = None
        for visit in visits:
            part, places = _part_of(visit, union, tile)
            gradient = visit.gradient(factor)
            more, more_biases = visit.passes.gradients(visit.rows, visit.queries, gradient, part)
            if dw is None:
                dw = more.new_zeros(tile.stop - tile.start, more.shape[1])
                db = None if more_biases is None else more.new_zeros(tile.stop - tile.start)
            dw[places] += more
            if db is not None and more_biases is not None:
                db[places] += more_biases
        assert dw is not None
        yield tile, dw, db


def _part_of(visit: Visit, union: Rows, tile: slice) -> tuple[slice, Tensor | slice]:
    """Return which of a visit's rows are in a tile of the union, and where in the tile."""
    if union.selected is None:
        return tile, slice(None)
    mine = (visit.home or visit.rows).selected
    assert mine is not None
    wanted = union.selected[tile]
    low, high = (
        torch.searchsorted(mine, wanted[0]),
        torch.searchsorted(mine, wanted[-1], right=True),
    )
    part = slice(int(low), int(high))
    return part, torch.searchsorted(wanted, mine[part]).to(visit.rows.weight.device)


def _refuse_int8(state_dtype: str | torch.dtype, name: str) -> None:
    if state_dtype in ("int8", torch.int8):
        raise OptionError(
            f"{name} has no int8 state; use 'float32' or 'bfloat16', or RowSGD ('sgd')"
        )
