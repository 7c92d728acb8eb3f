"""The backbone's optimizer over parameter groups, and its learning rate.

Optimizers of parameters with sparse gradients, those of `nn.Embedding(sparse=True)`: a step updates only the
rows that occur in the batch. Momentum and decay would change every row, so these parameters have neither.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plsc.errors import OptionError, refusing, suggest
from plsc.names import find_parameters

Groups = Sequence[dict[str, Any]]
"""Parameter groups as in torch.optim: dicts with `params` and optional settings."""

Settings = dict[str, Any]
"""Settings of a parameter group: those of the optimizer, LR_FACTOR and SPARSE."""

Factory = Callable[..., torch.optim.Optimizer]

FULL_RATE = "initial_lr"
"""Key of a group's learning rate before the schedule's factor, as in torch's schedulers."""

LR_FACTOR, SPARSE = "lr_factor", "sparse"
"""Additional keys in an optimizer's parameter groups; SPARSE: its gradients are sparse."""


@dataclass(frozen=True)
class OptimizerKind:
    """One of the classes of torch.optim.

    takes: options of the group ``optim`` that are passed to it. has_fused: whether torch has a fused
    implementation.
    """

    class_name: str
    takes: tuple[str, ...]
    has_fused: bool = False


_DECAY = ("weight_decay",)

OPTIMIZERS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind("SGD", ("momentum", "weight_decay"), has_fused=True),
    "adam": OptimizerKind("Adam", _DECAY, has_fused=True),
    "adamw": OptimizerKind("AdamW", _DECAY, has_fused=True),
    "rmsprop": OptimizerKind("RMSprop", _DECAY),
    "adadelta": OptimizerKind("Adadelta", _DECAY),
    "adagrad": OptimizerKind("Adagrad", _DECAY, has_fused=True),
    # SparseAdam for parameters with sparse gradients, Adam for all others.
    "sparse_adam": OptimizerKind("Adam", _DECAY),
    "adamax": OptimizerKind("Adamax", _DECAY),
    "nadam": OptimizerKind("NAdam", _DECAY),
    "radam": OptimizerKind("RAdam", _DECAY),
    "asgd": OptimizerKind("ASGD", _DECAY),
    "rprop": OptimizerKind("Rprop", ()),
    "adafactor": OptimizerKind("Adafactor", _DECAY),
}


@dataclass
class Assignment:
    """The parameter group of each parameter, by name.

    Attributes:
        groups: parameter names and settings of each group. The first group has the parameters that no
            pattern matches.
        frozen: names of parameters that are not trained.
    """

    groups: list[tuple[list[str], Settings]]
    frozen: set[str] = field(default_factory=set)


def assign_parameters(
    network: nn.Module,
    groups: Iterable[tuple[str, Settings | None]] = (),
    freeze: Iterable[str] = (),
    *,
    optimizer: str = "sgd",
) -> Assignment:
    """Assign the network's parameters to groups, without changing the network.

    Call it before modules are replaced (synchronised batch norm), because patterns match module types.
    Parameters with requires_grad=False are left out.

    Args:
        network: the network.
        groups: the pattern (see `plsc.names.find_parameters`) and the settings of each group; None: frozen.
            The first pattern that matches applies.
        freeze: patterns of more parameters to freeze.
        optimizer: its name, or ``module:factory``.

    Raises:
        OptionError: a pattern that matches no parameter, or only parameters of earlier groups; or momentum or
            decay of a parameter with sparse gradients.
    """
    named = dict(network.named_parameters())
    frozen = {name for pattern in freeze for name in find_parameters(pattern, network, "optim.freeze")}
    taken = set(frozen)
    chosen: list[tuple[list[str], Settings]] = []
    for pattern, settings in groups:
        names = [name for name in find_parameters(pattern, network, "optim.groups") if name not in taken]
        if not names:
            raise OptionError(
                f"optim.groups: all parameters that {pattern!r} matches are frozen or in an earlier group; "
                "the first match applies, so put the more specific pattern first"
            )
        taken.update(names)
        if settings is None:
            frozen.update(names)
        else:
            chosen.append((names, settings))
    chosen.insert(0, ([name for name in named if name not in taken], {}))
    sparse = sparse_parameters(network)
    kind = OPTIMIZERS.get(optimizer.lower())  # a factory decides itself
    assigned: list[tuple[list[str], Settings]] = []
    for names, settings in chosen:
        trained = [name for name in names if named[name].requires_grad]
        rows = [name for name in trained if named[name] in sparse] if kind else []
        assigned.append(([name for name in trained if name not in rows], settings))
        if kind and rows:
            assigned.append((rows, _settings_of_sparse(rows[0], settings, kind)))
    return Assignment(assigned, frozen)


_OFF: Settings = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}


def _settings_of_sparse(name: str, own: Settings, kind: OptimizerKind) -> Settings:
    """Return the settings of a group whose gradients are sparse; name: its first parameter."""
    # In the first step, torch refuses sparse gradients for most optimizers.
    wrong = next((key for key in ("momentum", "weight_decay") if own.get(key)), None)
    if wrong is not None:
        raise OptionError(
            f"{name} has sparse gradients, which do not support {wrong} {own[wrong]:g}; set it to 0 in a "
            "parameter group"
        )
    off = {key: value for key, value in _OFF.items() if key in kind.takes}
    fused = {"fused": False} if kind.has_fused else {}
    return {**own, **off, "foreach": False, **fused, SPARSE: True}


def sparse_parameters(network: nn.Module) -> set[Tensor]:
    """Return the trained weights of the layers with `sparse=True`."""
    layers = (layer for layer in network.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)))
    return {layer.weight for layer in layers if layer.sparse and layer.weight.requires_grad}


def build_optimizer(
    name: str,
    groups: Groups,
    lr: float,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    arguments: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """Return one of the OPTIMIZERS over parameter groups.

    Args:
        name: its name in OPTIMIZERS.
        groups: parameter groups; LR_FACTOR multiplies a group's learning rate.
        lr: the learning rate before the schedule's factor.
        momentum: of SGD.
        weight_decay: L2 decay, except for AdamW and Adafactor, where it is decoupled.
        arguments: further ones of the optimizer.

    Raises:
        OptionError: a setting that the optimizer does not have or does not accept.
    """
    kind, what, more = OPTIMIZERS[name.lower()], f"optim.optimizer {name}", arguments or {}
    make = SparseAdam if name.lower() == "sparse_adam" else getattr(torch.optim, kind.class_name)
    known = set(inspect.signature(make).parameters) - {"params", "lr", *kind.takes}
    for argument in more:
        if argument not in known:
            # The value of the option would replace this one without a word.
            expected = f"use optim.{argument}" if argument in kind.takes else suggest(argument, known)
            raise OptionError(f"{what} has no argument {argument!r}; {expected}")
    decays = {"momentum": momentum, "weight_decay": weight_decay}
    device = next((p.device for group in groups for p in group["params"]), torch.device("cpu"))
    chosen = {
        **({} if {"fused", "foreach"} & more.keys() else implementation_flags(kind, device)),
        **more,
        **{option: decays[option] for option in kind.takes},
        "lr": lr,
    }
    with refusing(f"cannot create {what}"):
        optimizer: torch.optim.Optimizer = make(groups, **chosen)
    _check_settings(optimizer, groups, what)
    return _finished(optimizer)


def build_custom(
    factory: Factory, name: str, groups: Groups, arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return the optimizer of a custom factory, ``factory(groups, **arguments)``.

    The factory's learning rates are multiplied by a group's LR_FACTOR and the schedule's factor. Settings of
    a group have precedence over the factory's. Raises OptionError if the factory fails, or does not return an
    optimizer over exactly the given parameters.
    """
    what = f"the optimizer factory {name}"
    with refusing(f"{what} failed"):
        # Copies, because torch puts the defaults into the dicts.
        optimizer = factory([dict(group) for group in groups], **arguments)
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    wanted = {id(p) for group in groups for p in group["params"]}
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]} if is_optimizer else set()
    if wanted != taken:
        raise OptionError(
            f"{what} returned a {type(optimizer).__name__} with {len(wanted & taken)} of the {len(wanted)} "
            f"given parameters and {len(taken - wanted)} others; expected a torch.optim.Optimizer over "
            "exactly the given parameter groups; optim.freeze leaves parameters untrained"
        )
    _check_settings(optimizer, groups, what)
    _check_inner(optimizer, what)
    return _finished(optimizer)


def implementation_flags(kind: OptimizerKind, device: torch.device) -> dict[str, bool]:
    """Return torch's arguments that select the implementation of step(): foreach, and fused if supported."""
    # Measured (docs/benchmarks/measured.md): fused is the fastest. Without it, torch's own default: foreach
    # saves launches on a GPU, for_loop saves temporaries on a CPU.
    unfused = "foreach" if device.type == "cuda" else "for_loop"
    wanted = "fused" if kind.has_fused and device.type in ("cpu", "cuda") else unfused
    flags = {"foreach": wanted == "foreach"}
    return {**flags, "fused": wanted == "fused"} if kind.has_fused else flags


def finish_group(group: dict[str, Any]) -> None:
    """Set the learning rate before the schedule's factor."""
    group[FULL_RATE] = float(group["lr"]) * group.get(LR_FACTOR, 1.0)


def set_rates(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Set the learning rates of the groups to `factor` times their FULL_RATE."""
    for group in groups:
        rate = group[FULL_RATE] * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _check_settings(optimizer: torch.optim.Optimizer, groups: Groups, what: str) -> None:
    """Raise OptionError for a group's setting that the optimizer does not have, or that a factory dropped."""
    holders = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    known = (*optimizer.defaults, LR_FACTOR, SPARSE)
    for group in groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        holder = holders[id(group["params"][0])] if group["params"] else group
        for name, value in settings.items():
            is_off = name == "weight_decay" and not value
            if (name not in known and not is_off) or holder.get(name) != value:
                raise OptionError(
                    f"{what} has no setting {name!r}, or drops it, but a parameter group sets it to {value}; "
                    f"{suggest(name, [*optimizer.defaults, LR_FACTOR])}"
                )


def _check_inner(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Raise OptionError for an optimizer with an inner optimizer that checkpoints would not save."""
    is_saved = has_own_state_dict(optimizer)
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state and not is_saved:
            raise OptionError(
                f"{what} returned a {type(optimizer).__name__} whose inner {type(inner).__name__} {name!r} "
                "has a separate state, which checkpoints would not save; share the outer state: inner.state "
                "= self.state"
            )


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its class or a hook changes what ``state_dict`` returns."""
    is_other = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    return is_other or bool(optimizer._optimizer_state_dict_post_hooks)


def _finished(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        finish_group(group)
    if any(group.get("fused") for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_prepare_fused_step)
    return optimizer


@torch.no_grad()
def _prepare_fused_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Work around two limitations of torch's fused steps (torch 2.15).

    On a CPU, a gradient or state whose strides differ from the parameter's gives wrong results without an
    error. Fused SGD fails if only some parameters have a momentum buffer, because others had no gradient yet.
    """
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        needs_momentum = isinstance(optimizer, torch.optim.SGD) and group["momentum"]
        trained = [p for p in group["params"] if p.grad is not None]
        for parameter in trained:
            assert parameter.grad is not None
            if parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        late = [p for p in trained if "momentum_buffer" not in optimizer.state[p]]
        if needs_momentum and len(late) < len(trained):
            for parameter in late:
                # Solve ``momentum * m + (1 - dampening) * g = g`` for m, with the decayed gradient g.
                decayed = parameter.grad.add(parameter, alpha=group["weight_decay"])
                before = decayed * (group["dampening"] / group["momentum"])
                optimizer.state[parameter]["momentum_buffer"] = before


StateInfo = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one state; for a sharded parameter the global shape."""


class ExpectedStates:
    """The states that a torch optimizer creates, found by a step on small tensors.

    Used to validate states from a checkpoint: torch's optimizers do not check them, and fused kernels read
    and write out of bounds if a state is smaller than its parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parts = getattr(optimizer, "parts", [optimizer])  # of SparseAdam
        self._groups = {
            id(p): (part, group) for part in parts for group in part.param_groups for p in group["params"]
        }
        self._found: dict[tuple[int, int, torch.dtype], dict[str, StateInfo | None]] = {}

    def of(self, parameter: nn.Parameter) -> dict[str, StateInfo | None] | None:
        """Return shape and dtype of each state by name, None for a state that is a plain number.

        Returns None if the optimizer is not torch's, so that its states are unknown.
        """
        optimizer, group = self._groups.get(id(parameter), (None, {}))
        shape = tuple(parameter.shape)
        if optimizer is None or not f"{type(optimizer).__module__}.".startswith("torch.optim."):
            return None
        key = (id(group), len(shape), parameter.dtype)
        small = tuple(range(2, 2 + len(shape)))  # distinct sizes, to recognise dimensions
        if key not in self._found:
            self._found[key] = _try_step(optimizer, group, parameter, small)
        # A dimension of a state has the parameter's size, or 1.
        enlarged = dict(zip(small, shape, strict=True))
        return {
            name: info
            if info is None or len(info[0]) != len(shape)
            else (tuple(enlarged.get(size, size) for size in info[0]), info[1])
            for name, info in self._found[key].items()
        }


def _try_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], like: nn.Parameter, small: tuple[int, ...]
) -> dict[str, StateInfo | None]:
    """Return the states of a small parameter after one step with the settings of the group."""
    number = nn.Parameter(torch.ones(small, dtype=like.dtype, device=like.device))
    number.grad = torch.ones_like(number)
    if group.get(SPARSE):
        number.grad = number.grad.to_sparse(1)
    if type(optimizer) is torch.optim.Adagrad:  # its constructor creates the states
        return {"step": ((), torch.float32), "sum": (small, like.dtype)}
    trial = type(optimizer).__new__(type(optimizer))
    # As in unpickling, because the constructors have different arguments.
    groups = [{**group, "params": [number]}]
    trial.__setstate__(
        {"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups}
    )
    trial.step()
    return {
        name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
        for name, value in trial.state[number].items()
    }


class SparseAdam(torch.optim.Optimizer):
    """torch's SparseAdam for the groups with SPARSE, and Adam for all others.

    params: parameter groups. weight_decay, amsgrad, foreach: only of Adam.
    """

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        foreach: bool | None = None,
    ) -> None:
        dense = [group for group in params if not group.get(SPARSE)] or [{"params": []}]
        sparse = [group for group in params if group.get(SPARSE)]
        adam = torch.optim.Adam(dense, lr, betas, eps, weight_decay, amsgrad, foreach=foreach)
        self.parts: list[torch.optim.Optimizer] = [adam]
        if sparse:
            self.parts.append(torch.optim.SparseAdam(sparse, lr, betas, eps))
        joined = [group for part in self.parts for group in part.param_groups]
        super().__init__(joined, dict(adam.defaults))
        self.param_groups = joined  # the same dicts, so that all see a changed learning rate
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for part in self.parts:
            part.step()


Shape = Callable[[int], float]
"""The factor of the base rate, as a function of the number of previous updates."""
ScheduleFunction = Callable[..., float]
"""A script's own: ``f(step)`` or ``f(step, total_steps)``."""


@dataclass(frozen=True)
class Schedule:
    """A base rate times a factor: a linear warm-up, followed by a shape.

    During the first `warmup_steps` the factor increases linearly, from 1 / warmup_steps in the first step to
    1 in the last one.
    """

    base: float
    shape: Shape
    warmup_steps: int = 0

    def factor(self, step: int) -> float:
        """Return the factor of the base rates after `step` updates."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.shape(step)

    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` updates."""
        return self.base * self.factor(step)


def constant(step: int) -> float:
    """Keep the base rate."""
    return 1.0


def steps_down(boundaries: tuple[int, ...], decay_factor: float) -> Shape:
    """Multiply the base rate by `decay_factor` at each boundary."""
    return lambda step: decay_factor ** sum(step >= boundary for boundary in boundaries)


def polynomial(first: int, last: int, power: float = 1.0, end: float = 0.0) -> Shape:
    """Decay from base to base * end as (1 - t)^power, where t goes from 0 at `first` to 1 at `last`.

    From `last` on the rate is constant.
    """
    return lambda step: end + (1 - end) * (1 - _share(step, first, last)) ** power


def cosine(first: int, last: int, end: float = 0.0) -> Shape:
    """Decay from base to base * end as half a cosine (Loshchilov and Hutter 2017).

    From `last` on the rate is constant.
    """
    return lambda step: end + (1 - end) * (1 + math.cos(math.pi * _share(step, first, last))) / 2


def custom(function: Callable[[int], float], name: str) -> Shape:
    """Multiply the base rate by the result of a user's function, which must depend only on the step.

    Raises OptionError, at that step, if the function raises or does not return a finite number >= 0.
    """
    expected = "expected a function of the number of updates and, if it has that parameter, total_steps"

    def shape(step: int) -> float:
        with refusing(f"the schedule {name} failed for step {step}", expected):
            factor = float(function(step))
        if not 0 <= factor < math.inf:
            raise OptionError(
                f"the schedule {name} returned {factor} for step {step}; expected a factor of the learning "
                "rate, a finite number of 0 or more"
            )
        return factor

    return shape


def _share(step: int, first: int, last: int) -> float:
    return min(1.0, max(0, step - first) / max(1, last - first))
