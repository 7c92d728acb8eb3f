"""The optimizer of the backbone, by name or by a factory of the user's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from plsc.config.optim import (
    OPTIMIZERS,
    RESERVED,
    OptimizerKind,
    OptimOptions,
    check_named_arguments,
    known_settings,
)
from plsc.errors import OptionError, PlscError, kind_and_line, suggest
from plsc.optim.groups import L1_DECAY, LR_FACTOR
from plsc.optim.hooks import add_l1_decay, check_before_fused
from plsc.parallel.sharding import split_rows

Groups = Sequence[dict[str, Any]]
"""Groups of an optimizer as torch takes them: each has its `params`, and may have settings of its own."""

Factory = Callable[..., torch.optim.Optimizer]

# torch's other ways have no rule for DTensors.
_FUSED_WHERE_SHARDED = ("Adam", "AdamW")
_NO_FOREACH_WHERE_SHARDED = ("Rprop",)

FULL_RATE = "initial_lr"
"""Key of a group's learning rate at the schedule's full height, named as torch's own schedules name it."""


def build_optimizer(
    options: OptimOptions, groups: Groups, base_rate: float, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer that `options` name, over parameter groups.

    groups: of `Assignment.groups`; a group's LR_FACTOR multiplies its rate, its L1_DECAY is added to its
    gradients. base_rate: the learning rate at the schedule's full height. Weight decay is added to the
    gradient (L2), but AdamW takes it from the weights, and so does Adafactor.

    Raises OptionError for settings that the optimizer has not, or refuses.
    """
    kind = OPTIMIZERS[options.optimizer.lower()]
    arguments = {**(options.optimizer_arguments or {}), "lr": base_rate}
    expected = check_named_arguments(options.optimizer_arguments or {})
    if expected is not None:
        raise OptionError(f"optim.optimizer is {options.optimizer}; expected {expected}")
    for name in kind.takes:
        value = getattr(options, name)
        if name in (options.optimizer_arguments or {}):
            raise OptionError(
                f"optim.optimizer_arguments has {name}, which is an option by itself: set_{name}({value})"
            )
        arguments[name] = value
    sharded = any(_is_split(group) for group in groups)
    if sharded and kind.class_name == "Adafactor":
        raise OptionError(
            "optim.optimizer adafactor cannot update a sharded backbone, of whose matrices each rank has "
            "some rows; use another one, or set_backbone_parallel('replicated')"
        )
    arguments |= implementation_flags(options, kind, device, sharded)
    what = f"optim.optimizer {options.optimizer}"
    make = getattr(torch.optim, kind.class_name)
    known = set(inspect.signature(make).parameters) - {*RESERVED, *kind.takes}
    unknown = next((name for name in options.optimizer_arguments or {} if name not in known), None)
    if unknown is not None:
        raise OptionError(f"{what} has no argument {unknown!r}; {suggest(unknown, known)}")
    optimizer = _make(make, what, groups, arguments)
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
    optimizer = _make(factory, what, given, arguments)
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
    _check_fused(optimizer, what)
    _check_step(optimizer, what)
    return _finished(optimizer)


def cannot_update_sharded(name: str, error: Exception) -> OptionError:
    """Return what to say of an optimizer whose first step over a sharded backbone failed.

    name: as in `optim.optimizer`. error: of the step, in torch's words, which speak of its operators.
    """
    way = "have the factory make one that" if ":" in name else "use one that"
    return OptionError(
        f"the optimizer {name} cannot update a sharded backbone: {kind_and_line(error)[:300]}; {way} "
        "computes each number by itself, without fused, or set_backbone_parallel('replicated')"
    )


def implementation_flags(
    options: OptimOptions, kind: OptimizerKind, device: torch.device, sharded: bool = False
) -> dict[str, bool]:
    """Return the arguments by which torch chooses what computes a step. Raises OptionError."""
    wanted = options.implementation
    if sharded and wanted == "fused" and kind.class_name not in _FUSED_WHERE_SHARDED:
        raise OptionError(
            f"optim.implementation is 'fused', but torch's fused {options.optimizer} takes no sharded "
            "backbone; use 'auto' or 'foreach'"
        )
    if sharded and wanted == "foreach" and kind.class_name in _NO_FOREACH_WHERE_SHARDED:
        raise OptionError(
            f"optim.implementation is 'foreach', in which torch's {options.optimizer} takes no sharded "
            "backbone; use 'auto' or 'for_loop'"
        )
    if sharded and wanted == "auto":
        wanted = "for_loop" if kind.class_name in _NO_FOREACH_WHERE_SHARDED else "foreach"
    if wanted == "fused" and not kind.has_fused:
        names = ", ".join(name for name, one in OPTIMIZERS.items() if one.has_fused)
        raise OptionError(
            f"optim.implementation is 'fused', but torch has no fused {options.optimizer}; expected one of "
            f"{names}, or 'auto'"
        )
    if wanted == "auto":
        # Measured, see docs/optimizers.md: fused is the fastest where there is one. Where there is none,
        # torch's own default: on a GPU fewer launches count, on a CPU the temporaries of all tensors do.
        unfused = "foreach" if device.type == "cuda" else "for_loop"
        wanted = "fused" if kind.has_fused and device.type in ("cpu", "cuda") else unfused
    flags = {"foreach": wanted == "foreach"}
    return {**flags, "fused": wanted == "fused"} if kind.has_fused else flags


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


def _make(make: Factory, what: str, groups: Groups, arguments: dict[str, Any]) -> Any:
    try:
        return make(groups, **arguments)
    except PlscError:
        raise
    except Exception as error:  # torch's are of many kinds, a user's function may raise anything
        raise OptionError(f"{what} cannot be made: {kind_and_line(error)}") from error


def _check_fused(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Refuse a fused step of torch's that would fail over a sharded backbone."""
    for kind in OPTIMIZERS.values():
        is_one = isinstance(optimizer, getattr(torch.optim, kind.class_name))
        if not is_one or not kind.has_fused or kind.class_name in _FUSED_WHERE_SHARDED:
            continue
        if any(group.get("fused") and _is_split(group) for group in optimizer.param_groups):
            raise OptionError(
                f"{what} makes torch's fused {kind.class_name}, which takes no sharded backbone; have it "
                "pass foreach=True instead of fused=True, or set_backbone_parallel('replicated')"
            )


def _is_split(group: dict[str, Any]) -> bool:
    """Whether a group has parameters of which each rank has some rows."""
    return any(split_rows(parameter) is not None for parameter in group["params"])


def _check_settings(optimizer: torch.optim.Optimizer, groups: Groups, what: str) -> None:
    """Refuse settings of a group that the optimizer does not know, or that a factory lost."""
    ours = (LR_FACTOR, L1_DECAY)
    for group in groups:
        for name, value in group.items():
            is_off = name == "weight_decay" and not value
            if name != "params" and name not in (*optimizer.defaults, *ours) and not is_off:
                raise OptionError(
                    f"{what} has no setting {name!r}, which a parameter group has; "
                    f"{suggest(name, known_settings(optimizer.defaults))}"
                )
            holder = _group_of(group["params"][0], optimizer) if group["params"] else group
            if name != "params" and holder.get(name) != value:
                raise OptionError(
                    f"{what} lost the {name} {value} of a parameter group; hand the groups on as they "
                    "are given"
                )


def _check_inner(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Refuse an optimizer that holds others whose states a checkpoint would not have."""
    for name, value in vars(optimizer).items():
        held = value.values() if isinstance(value, dict) else value
        for inner in held if isinstance(held, Iterable) and not isinstance(held, str) else [held]:
            if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:
                raise OptionError(
                    f"{what} returned a {type(optimizer).__name__} that holds the {type(inner).__name__} "
                    f"{name!r} with a state of its own, which no checkpoint would have; let it share "
                    "the outer one: inner.state = self.state"
                )


def _check_step(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Refuse an optimizer that wants the loss again within a step, and rates that are none."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptionError(
            f"{what} returned a {type(optimizer).__name__}, whose step wants a closure that computes the "
            "loss again; a step here has one pass"
        )
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is not None and not 0 <= float(rate) < math.inf:
            raise OptionError(
                f"{what} gave a group the learning rate {float(rate)}; expected a finite number of 0 or more"
            )


def _group_of(parameter: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = optimizer.param_groups
    return next(group for group in groups if any(p is parameter for p in group["params"]))


def _finished(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        if group.get("lr") is None:
            raise OptionError(
                f"{type(optimizer).__name__} has no learning rate in its groups for the schedule to set; "
                "give it one"
            )
        group[FULL_RATE] = float(group["lr"]) * group.get(LR_FACTOR, 1.0)
    add_l1_decay(optimizer)
    check_before_fused(optimizer)
    return optimizer
