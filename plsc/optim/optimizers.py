"""The optimizer of the backbone, by name or by a factory of the user's, over groups of its parameters."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plsc.config.optim import (
    OPTIMIZERS,
    RESERVED,
    OptimizerKind,
    OptimOptions,
    ParameterGroup,
    check_named_arguments,
    known_settings,
    read_parameter_groups,
)
from plsc.config.patterns import find_parameters, label_parameters
from plsc.errors import OptionError, kind_and_line, refusing, suggest
from plsc.parallel.backbone import local_part, split_rows

Groups = Sequence[dict[str, Any]]
"""Groups of an optimizer as torch takes them: each has its `params`, and may have settings of its own."""

Factory = Callable[..., torch.optim.Optimizer]

FULL_RATE = "initial_lr"
"""Key of a group's learning rate at the schedule's full height, named as torch's own schedules name it."""

LR_FACTOR, L1_DECAY = "lr_factor", "l1_decay"
"""Keys of ours in an optimizer's groups, next to its own settings."""

# torch's other way has no rule for DTensors.
_NO_FOREACH_WHERE_SHARDED = ("Rprop",)


@dataclass
class Assignment:
    """What becomes of each parameter, by its name.

    groups: the names in each group of the optimizer, and the settings that it has of its own: those of the
    optimizer, and LR_FACTOR and L1_DECAY. First comes what no pattern matches. frozen: names of parameters
    that are not trained.
    """

    groups: list[tuple[list[str], dict[str, Any]]]
    frozen: set[str] = field(default_factory=set)


def assign_parameters(network: nn.Module, options: OptimOptions) -> Assignment:
    """Work out the groups of `options`. Nothing is changed.

    Call it before the network's modules are replaced (synchronised batch norm) or its parameters sharded:
    types and shapes are looked at; the names stay. Parameters that need no gradient are left as they are.
    Raises OptionError for a pattern that matches nothing, or nothing that an earlier group left.
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
                f"optim.groups: all that {group.pattern!r} matches is frozen or in an earlier group, and "
                "the first that matches counts; put the narrower pattern first"
            )
        taken.update(mine)
        if group.frozen:
            frozen.update(mine)
        else:
            groups += _split_by_decay(mine, named, options, group)
    rest = [name for name in named if name not in taken]
    groups = _split_by_decay(rest, named, options, ParameterGroup("*")) + groups
    return Assignment(
        [([one for one in names if named[one].requires_grad], own) for names, own in groups], frozen
    )


def _split_by_decay(
    names: list[str],
    named: Mapping[str, nn.Parameter],
    options: OptimOptions,
    group: ParameterGroup,
) -> list[tuple[list[str], dict[str, Any]]]:
    """Return the group, in two where parameters of one dimension are not decayed."""
    own: dict[str, Any] = dict(group.arguments)
    if group.lr_factor != 1:
        own[LR_FACTOR] = group.lr_factor
    decays = {"weight_decay": group.weight_decay, L1_DECAY: group.l1_decay}
    own.update({name: value for name, value in decays.items() if value is not None})
    if options.l1_decay and L1_DECAY not in own:
        own[L1_DECAY] = options.l1_decay
    if options.decay_norm_and_bias:
        return [(names, own)]
    # What a group says itself holds for all that it has.
    undecayed = {
        name: 0.0 for name, value in decays.items() if value is None and (name != L1_DECAY or L1_DECAY in own)
    }
    matrices = [name for name in names if named[name].ndim > 1]
    vectors = [name for name in names if named[name].ndim <= 1]
    return [(matrices, own), (vectors, {**own, **undecayed})]


def build_optimizer(
    options: OptimOptions, groups: Groups, base_rate: float, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer that `options` name, over parameter groups.

    groups: of `Assignment.groups`; a group's LR_FACTOR multiplies its rate, its L1_DECAY is added to its
    gradients. base_rate: the learning rate at the schedule's full height. Weight decay is added to the
    gradient (L2), but AdamW and Adafactor subtract it from the weights.

    Raises OptionError for settings that the optimizer does not have, or refuses.
    """
    kind = OPTIMIZERS[options.optimizer.lower()]
    what = f"optim.optimizer {options.optimizer}"
    more = options.optimizer_arguments or {}
    expected = check_named_arguments(more)
    if expected is not None:
        raise OptionError(f"optim.optimizer is {options.optimizer}; expected {expected}")
    make = getattr(torch.optim, kind.class_name)
    known = set(inspect.signature(make).parameters) - {*RESERVED, *kind.takes}
    for name in more:
        if name in kind.takes:
            raise OptionError(
                f"optim.optimizer_arguments has {name}, which is an option by itself: "
                f"set_{name}({getattr(options, name)})"
            )
        if name not in known:
            raise OptionError(f"{what} has no argument {name!r}; {suggest(name, known)}")
    is_sharded = any(split_rows(p) is not None for group in groups for p in group["params"])
    if is_sharded and kind.class_name == "Adafactor":
        raise OptionError(
            "optim.optimizer adafactor cannot update a sharded backbone, of whose matrices each rank has "
            "some rows; use another one, or set_backbone_parallel('replicated')"
        )
    arguments = {
        **more,
        **{name: getattr(options, name) for name in kind.takes},
        **implementation_flags(options, kind, device, is_sharded),
        "lr": base_rate,
    }
    with refusing(f"{what} cannot be made"):
        optimizer: torch.optim.Optimizer = make(groups, **arguments)
    _check_settings(optimizer, groups, what)
    return _finished(optimizer)


def build_custom(
    factory: Factory, name: str, groups: Groups, arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return what a factory of the user's makes of the parameter groups: ``factory(groups, **arguments)``.

    Its learning rates are those at the schedule's full height, times a group's LR_FACTOR; its other settings
    hold where a group has none of its own. Raises OptionError where it fails, returns no optimizer, or one
    over other parameters than it was given.
    """
    what = f"the optimizer factory {name}"
    given = [dict(group) for group in groups]  # torch puts the defaults into these
    with refusing(f"{what} cannot be made"):
        optimizer = factory(given, **arguments)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"{what} returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer over the "
            "parameter groups that it is given"
        )
    wanted = {id(p) for group in groups for p in group["params"]}
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if wanted != mine:
        raise OptionError(
            f"{what} returned an optimizer without {len(wanted - mine)} of the {len(wanted)} parameters that "
            f"it was given, and with {len(mine - wanted)} others; use them all, and set_freeze for those "
            "that are not to be trained"
        )
    _check_settings(optimizer, groups, what)
    _check_inner(optimizer, what)
    return _finished(optimizer)


def cannot_update_sharded(name: str, error: Exception) -> OptionError:
    """Return the error for an optimizer whose first step over a sharded backbone failed.

    name: as in `optim.optimizer`. error: of the step, in torch's words, which are about its operators.
    """
    way = "have the factory make one that" if ":" in name else "use one that"
    return OptionError(
        f"the optimizer {name} cannot update a sharded backbone: {kind_and_line(error)[:300]}; {way} "
        "computes each number by itself, without fused, or set_backbone_parallel('replicated')"
    )


def implementation_flags(
    options: OptimOptions, kind: OptimizerKind, device: torch.device, is_sharded: bool = False
) -> dict[str, bool]:
    """Return the arguments by which torch chooses what computes a step. Raises OptionError."""
    wanted = options.implementation
    if is_sharded and wanted == "auto":
        wanted = "for_loop" if kind.class_name in _NO_FOREACH_WHERE_SHARDED else "foreach"
    elif wanted == "auto":
        # Measured, see docs/optimizers.md: fused is the fastest where there is one. Where there is none,
        # torch's own default: on a GPU fewer launches count, on a CPU the temporaries of all tensors do.
        unfused = "foreach" if device.type == "cuda" else "for_loop"
        wanted = "fused" if kind.has_fused and device.type in ("cpu", "cuda") else unfused
    flags = {"foreach": wanted == "foreach"}
    return {**flags, "fused": wanted == "fused"} if kind.has_fused or wanted == "fused" else flags


def describe_implementation(optimizer: torch.optim.Optimizer) -> str:
    """Return what computes the step, as 'fused on cpu': it decides the last bits."""
    settings = optimizer.defaults
    chosen = next((name for name in ("fused", "foreach") if settings.get(name)), "for_loop")
    if settings.get("foreach") is None and not settings.get("fused"):
        chosen = "torch's choice"
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    return f"{chosen} on {', '.join(sorted(devices)) or 'nothing'}"


def set_rates(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Set the learning rates of groups to `factor` times their full height."""
    for group in groups:
        rate = group[FULL_RATE] * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _check_settings(optimizer: torch.optim.Optimizer, groups: Groups, what: str) -> None:
    """Refuse settings of a group that the optimizer does not have, or that a factory lost."""
    holders = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    known = (*optimizer.defaults, LR_FACTOR, L1_DECAY)
    for group in groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        holder = holders[id(group["params"][0])] if group["params"] else group
        for name, value in settings.items():
            is_off = name == "weight_decay" and not value
            if name not in known and not is_off:
                raise OptionError(
                    f"{what} has no setting {name!r}, which a parameter group has; "
                    f"{suggest(name, known_settings(optimizer.defaults))}"
                )
            if holder.get(name) != value:
                raise OptionError(
                    f"{what} lost the {name} {value} of a parameter group; hand the groups on as they "
                    "are given"
                )


def _check_inner(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Refuse an optimizer that holds others whose states a checkpoint would not have."""
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:
            raise OptionError(
                f"{what} returned a {type(optimizer).__name__} that holds the {type(inner).__name__} "
                f"{name!r} with a state of its own, which no checkpoint would have; let it share "
                "the outer one: inner.state = self.state"
            )


def _finished(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        if group.get("lr") is None:
            raise OptionError(
                f"{type(optimizer).__name__} has no learning rate in its groups for the schedule to set; "
                "give it one"
            )
        group[FULL_RATE] = float(group["lr"]) * group.get(LR_FACTOR, 1.0)
    if any(group.get(L1_DECAY) for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_add_l1_decay)
    if any(group.get("fused") for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_prepare_fused_step)
    return optimizer


@torch.no_grad()
def _add_l1_decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Add ``L1_DECAY * sign(weight)`` to the gradients of the groups that have one.

    That is the gradient of the decay times the sum of the absolute values (the lasso's penalty). It comes
    after clipping, as L2 decay does.
    """
    for group in optimizer.param_groups:
        decay = group.get(L1_DECAY)
        trained = [p for p in group["params"] if p.grad is not None]
        if decay and trained:
            gradients = [p.grad for p in trained]
            torch._foreach_add_(gradients, torch._foreach_sign(trained), alpha=decay)


@torch.no_grad()
def _prepare_fused_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Bring the tensors of a fused step into the form that it takes for granted.

    torch 2.15's fused steps go over memory from front to back: on a CPU, a gradient or a state whose layout
    (strides) is not the parameter's gives wrong results without a message. And the fused SGD fails if some
    parameters have a momentum and others, that had no gradient before, have none.
    """
    for group in optimizer.param_groups:
        needs_momentum = isinstance(optimizer, torch.optim.SGD) and group["momentum"]
        trained = [p for p in group["params"] if p.grad is not None]
        for parameter in trained:
            assert parameter.grad is not None
            if parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        late = [p for p in trained if "momentum_buffer" not in optimizer.state[p]]
        if needs_momentum and len(late) < len(trained):
            for parameter in late:
                # The m of ``momentum * m + (1 - dampening) * g = g``, with the decayed gradient g.
                decayed = parameter.grad.add(parameter, alpha=group["weight_decay"])
                before = decayed * (group["dampening"] / group["momentum"])
                optimizer.state[parameter]["momentum_buffer"] = before


StateInfo = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of one state; of a split parameter the whole shape."""


class ExpectedStates:
    """The states that an optimizer of torch's makes, found by a step of its like over small tensors.

    Some of torch's kernels (the fused ones) take a state for as large as its parameter and read and write
    beyond its end otherwise; all of them take states for complete. So what comes from a file is compared with
    this.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._found: dict[tuple[int, int, torch.dtype], dict[str, StateInfo | None]] = {}

    def of(self, parameter: nn.Parameter) -> dict[str, StateInfo | None] | None:
        """Return the states by name, None for one that is a plain number.

        None for all: the optimizer is not torch's, and its states are unknown.
        """
        group, shape = self._groups.get(id(parameter)), tuple(parameter.shape)
        is_torchs = f"{type(self._optimizer).__module__}.".startswith("torch.optim.")
        if group is None or not is_torchs:
            return None
        key = (id(group), len(shape), parameter.dtype)
        small = tuple(range(2, 2 + len(shape)))  # each size is another one
        if key not in self._found:
            self._found[key] = self._try(group, parameter, small)
        # A size is the parameter's, or 1 where the state has one number for many.
        enlarged = dict(zip(small, shape, strict=True))
        return {
            name: info
            if info is None or len(info[0]) != len(shape)
            else (tuple(enlarged.get(size, size) for size in info[0]), info[1])
            for name, info in self._found[key].items()
        }

    def _try(
        self, group: dict[str, Any], like: nn.Parameter, small: tuple[int, ...]
    ) -> dict[str, StateInfo | None]:
        """Return the states of a small parameter, after a step with the settings of the group."""
        number = nn.Parameter(torch.ones(small, dtype=like.dtype, device=local_part(like).device))
        number.grad = torch.ones_like(number)
        if type(self._optimizer) is torch.optim.Adagrad:  # whose constructor makes the states
            return {"step": ((), torch.float32), "sum": (small, like.dtype)}
        trial = type(self._optimizer).__new__(type(self._optimizer))
        # As torch restores a pickled optimizer; the constructors take other arguments, each its own.
        groups = [{**group, "params": [number]}]
        defaults = dict(self._optimizer.defaults)
        trial.__setstate__({"defaults": defaults, "state": defaultdict(dict), "param_groups": groups})
        trial.step()
        return {
            name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
            for name, value in trial.state[number].items()
        }
