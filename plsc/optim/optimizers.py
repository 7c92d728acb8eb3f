"""Build the backbone's optimizer, by name or by a custom factory, over parameter groups.

Optimizers of parameters with sparse gradients: those of `nn.Embedding(sparse=True)`.

A step updates only the rows that occur in the batch. Momentum and decay would change every row, so these
parameters have neither.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plsc.config.optim import (
    RESERVED,
    OptimOptions,
    ParameterGroup,
    known_settings,
    read_parameter_groups,
)
from plsc.config.patterns import find_parameters, label_parameters
from plsc.errors import OptionError, refusing, suggest
from plsc.names import names_code

Groups = Sequence[dict[str, Any]]
"""Parameter groups as in torch.optim: dicts with `params` and optional settings."""

Factory = Callable[..., torch.optim.Optimizer]

FULL_RATE = "initial_lr"
"""Key of a group's learning rate before the schedule's factor, as in torch's schedulers."""

LR_FACTOR, L1_DECAY = "lr_factor", "l1_decay"
"""Additional keys in an optimizer's parameter groups."""


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
        groups: (parameter names, settings) of each group. Settings are those of the optimizer, LR_FACTOR,
            L1_DECAY and SPARSE. The first group has the parameters that no pattern matches.
        frozen: names of parameters that are not trained.
    """

    groups: list[tuple[list[str], dict[str, Any]]]
    frozen: set[str] = field(default_factory=set)


def assign_parameters(network: nn.Module, options: OptimOptions) -> Assignment:
    """Assign the network's parameters to the groups of `options`, without changing the network.

    Call it before modules are replaced (synchronised batch norm) or parameters are sharded, because it uses
    module types and shapes. Parameters with requires_grad=False are left out. Raises OptionError for a
    pattern that matches no parameter, or only parameters of earlier groups.
    """
    labels = label_parameters(network)
    named = dict(network.named_parameters())
    frozen = {name for p in options.freeze for name in find_parameters(p, labels, "optim.freeze")}
    taken = set(frozen)
    groups = []
    for group in read_parameter_groups(options.groups):
        found = find_parameters(group.pattern, labels, "optim.groups")
        mine = [name for name in found if name not in taken]
        if not mine:
            raise OptionError(
                f"optim.groups: all parameters that {group.pattern!r} matches are frozen or in an earlier "
                "group; the first match applies, so put the more specific pattern first"
            )
        taken.update(mine)
        if group.frozen:
            frozen.update(mine)
        else:
            groups += _split_by_decay(mine, named, options, group)
    rest = [name for name in named if name not in taken]
    groups = _split_by_decay(rest, named, options, ParameterGroup("*")) + groups
    sparse = sparse_parameters(network)
    if sparse and not names_code(options.optimizer):  # a factory decides itself
        groups = _split_sparse(groups, {name for name, one in named.items() if one in sparse}, options)
    return Assignment(
        [([one for one in names if named[one].requires_grad], own) for names, own in groups], frozen
    )


def _split_by_decay(
    names: list[str], named: Mapping[str, nn.Parameter], options: OptimOptions, group: ParameterGroup
) -> list[tuple[list[str], dict[str, Any]]]:
    """Return the group, split in two if 1-dimensional parameters are not decayed."""
    own: dict[str, Any] = dict(group.arguments)
    if group.lr_factor != 1:
        own[LR_FACTOR] = group.lr_factor
    decays = {"weight_decay": group.weight_decay, L1_DECAY: group.l1_decay}
    own.update({name: value for name, value in decays.items() if value is not None})
    if options.l1_decay and L1_DECAY not in own:
        own[L1_DECAY] = options.l1_decay
    if options.decay_norm_and_bias:
        return [(names, own)]
    # A decay that the group sets itself applies to all its parameters.
    undecayed = {
        name: 0.0 for name, value in decays.items() if value is None and (name != L1_DECAY or L1_DECAY in own)
    }
    matrices = [name for name in names if named[name].ndim > 1]
    vectors = [name for name in names if named[name].ndim <= 1]
    return [(matrices, own), (vectors, {**own, **undecayed})]


def _split_sparse(
    groups: list[tuple[list[str], dict[str, Any]]], sparse: set[str], options: OptimOptions
) -> list[tuple[list[str], dict[str, Any]]]:
    """Move the parameters with sparse gradients of each group to a group without momentum and decay.

    In the first step, torch refuses sparse gradients for most optimizers.
    """
    kind = OPTIMIZERS[options.optimizer.lower()]
    split = []
    for names, own in groups:
        mine = [name for name in names if name in sparse]
        split.append(([name for name in names if name not in sparse], own))
        if not mine:
            continue
        wrong = next((name for name in ("momentum", "weight_decay", L1_DECAY) if own.get(name)), None)
        if wrong is not None:
            raise OptionError(
                f"{mine[0]} has sparse gradients, which do not support {wrong} {own[wrong]:g}; set it to 0 "
                "in a parameter group"
            )
        split.append((mine, {**own, **settings_of_sparse(kind.takes, kind.has_fused), SPARSE: True}))
    return split


def build_optimizer(
    options: OptimOptions, groups: Groups, base_rate: float, device: torch.device
) -> torch.optim.Optimizer:
    """Return the built-in optimizer of `options` over parameter groups.

    Weight decay is L2 decay, except for AdamW and Adafactor, where it is decoupled.

    Args:
        options: the options of the optimizer.
        groups: parameter groups; LR_FACTOR multiplies a group's learning rate, L1_DECAY its L1 decay.
        base_rate: the learning rate before the schedule's factor.
        device: of the parameters.

    Raises:
        OptionError: a setting that the optimizer does not have or does not accept.
    """
    kind = OPTIMIZERS[options.optimizer.lower()]
    what = f"optim.optimizer {options.optimizer}"
    more = options.optimizer_arguments or {}
    is_sparse_adam = options.optimizer.lower() == "sparse_adam"
    make = SparseAdam if is_sparse_adam else getattr(torch.optim, kind.class_name)
    known = set(inspect.signature(make).parameters) - {*RESERVED, *kind.takes}
    for name in more:
        if name not in known:
            # The value of the option would replace this one without a word.
            expected = f"use optim.{name}" if name in kind.takes else suggest(name, known)
            raise OptionError(f"{what} has no argument {name!r}; {RESERVED.get(name) or expected}")
    arguments = {
        **({} if {"fused", "foreach"} & more.keys() else implementation_flags(kind, device)),
        **more,
        **{name: getattr(options, name) for name in kind.takes},
        "lr": base_rate,
    }
    with refusing(f"cannot create {what}"):
        optimizer: torch.optim.Optimizer = make(groups, **arguments)
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
    given = [dict(group) for group in groups]  # torch puts the defaults into these
    with refusing(f"{what} failed"):
        optimizer = factory(given, **arguments)
    if not (isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks")):
        raise OptionError(
            f"{what} returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer over the given "
            "parameter groups, which has called super().__init__()"
        )
    wanted = {id(p) for group in groups for p in group["params"]}
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if wanted != taken:
        raise OptionError(
            f"{what} returned an optimizer without {len(wanted - taken)} of the {len(wanted)} given "
            f"parameters, and with {len(taken - wanted)} others; optim.freeze leaves parameters untrained"
        )
    _check_settings(optimizer, groups, what)
    _check_inner(optimizer, what)
    return _finished(optimizer)


def implementation_flags(kind: OptimizerKind, device: torch.device) -> dict[str, bool]:
    """Return torch's arguments that select the implementation of step(): foreach, and fused if supported."""
    # Measured (docs/benchmarks/head.md): fused is the fastest. Without it, torch's own default: foreach
    # saves launches on a GPU, for_loop saves temporaries on a CPU.
    unfused = "foreach" if device.type == "cuda" else "for_loop"
    wanted = "fused" if kind.has_fused and device.type in ("cpu", "cuda") else unfused
    flags = {"foreach": wanted == "foreach"}
    return {**flags, "fused": wanted == "fused"} if kind.has_fused else flags


def describe_implementation(optimizer: torch.optim.Optimizer) -> str:
    """Return the implementation of step(), such as 'fused on cpu'; it determines the last bits."""
    settings = optimizer.defaults
    chosen = next((name for name in ("fused", "foreach") if settings.get(name)), "for_loop")
    if settings.get("foreach") is None and not settings.get("fused"):
        chosen = "torch's choice"
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    return f"{chosen} on {', '.join(sorted(devices)) or 'nothing'}"


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
    known = (*optimizer.defaults, LR_FACTOR, L1_DECAY, SPARSE)
    for group in groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        holder = holders[id(group["params"][0])] if group["params"] else group
        for name, value in settings.items():
            is_off = name == "weight_decay" and not value
            if (name not in known and not is_off) or holder.get(name) != value:
                raise OptionError(
                    f"{what} has no setting {name!r}, or drops it, but a parameter group sets it to {value}; "
                    f"{suggest(name, known_settings(optimizer.defaults))}"
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


def finish_group(group: dict[str, Any]) -> None:
    """Set the learning rate before the schedule's factor."""
    group[FULL_RATE] = float(group["lr"]) * group.get(LR_FACTOR, 1.0)


def _finished(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        finish_group(group)
    if any(group.get(L1_DECAY) for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_add_l1_decay)
    if any(group.get("fused") for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_prepare_fused_step)
    return optimizer


@torch.no_grad()
def _add_l1_decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Add ``L1_DECAY * sign(weight)`` to the gradients of groups with L1_DECAY.

    This is the gradient of the L1 (lasso) penalty. Like L2 decay, it is added after clipping.
    """
    for group in optimizer.param_groups:
        decay = group.get(L1_DECAY)
        trained = [p for p in group["params"] if p.grad is not None]
        if decay and trained:
            gradients = [p.grad for p in trained]
            torch._foreach_add_(gradients, torch._foreach_sign(trained), alpha=decay)


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


SPARSE = "sparse"
"""Key in an optimizer's parameter groups: the gradients of the group are sparse."""

_OFF: dict[str, Any] = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}


def sparse_parameters(network: nn.Module) -> set[Tensor]:
    """Return the trained weights of the layers with `sparse=True`."""
    layers = (one for one in network.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag)))
    return {layer.weight for layer in layers if layer.sparse and layer.weight.requires_grad}


def settings_of_sparse(takes: tuple[str, ...], has_fused: bool) -> dict[str, Any]:
    """Return the settings of a group with sparse gradients; takes, has_fused: those of the optimizer."""
    off = {name: value for name, value in _OFF.items() if name in takes}
    return {**off, "foreach": False, **({"fused": False} if has_fused else {})}


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
