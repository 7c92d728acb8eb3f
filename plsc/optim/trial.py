"""The settings of an optimizer by name, tried before a run: torch itself looks at few of them, and at none
of a parameter group's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from plsc.config.optim import (
    DEFAULT_RATE,
    OPTIMIZERS,
    OptimOptions,
    ParameterGroup,
    read_parameter_groups,
)
from plsc.config.option import shown_value, specs_of
from plsc.errors import OptionError
from plsc.optim.factory import build_optimizer
from plsc.optim.groups import L1_DECAY

_OPTIONS = specs_of("optim", OptimOptions)
_CPU = torch.device("cpu")


def try_settings(options: OptimOptions) -> None:
    """Make a step of the named optimizer on one number, with its settings and with those of each group.

    Raises OptionError for settings that it does not have, does not take, or cannot compute with.
    """
    _try(options, ParameterGroup("*"))
    for group in read_parameter_groups(options.groups):
        if group.frozen:
            continue
        try:
            _try(options, group)
        except OptionError as error:
            raise OptionError(f"parameter group {group.pattern!r}: {error}") from error


def _try(options: OptimOptions, group: ParameterGroup) -> None:
    """Try the settings of a group: made the optimizer's defaults, for torch checks those alone."""
    kind = OPTIMIZERS[options.optimizer.lower()]
    own: dict[str, Any] = dict(group.arguments)
    if group.weight_decay is not None:
        own["weight_decay"] = group.weight_decay
    l1_decay = options.l1_decay if group.l1_decay is None else group.l1_decay
    rate = options.lr or DEFAULT_RATE
    build_optimizer(options, [{"params": [_number()], **own}], rate, _CPU)  # names alone
    more = {**(options.optimizer_arguments or {}), **own}
    _check_kinds(getattr(torch.optim, kind.class_name), more)
    as_options = {
        name: _OPTIONS[f"optim.{name}"].checked(more.pop(name))
        for name in kind.takes
        if name in own
    }
    if "weight_decay" not in kind.takes:
        more.pop("weight_decay", None)  # 0, as building it has seen
    defaults = replace(options, optimizer_arguments=more, **as_options)
    number = _number()
    groups = [{"params": [number], L1_DECAY: l1_decay}]
    optimizer = build_optimizer(defaults, groups, rate, _CPU)
    what = f"optim.optimizer {options.optimizer} cannot make a step with these settings"
    try:
        optimizer.step()
    except Exception as error:  # torch takes what it does not check for what it should be
        said = str(error).strip().splitlines()[:1]
        raise OptionError(f"{what}: {': '.join([type(error).__name__, *said])}") from error
    if not bool(number.isfinite().all()):
        raise OptionError(f"{what}: a weight of 0.5 with a gradient of 0.5 becomes {number.item()}")


def _number() -> nn.Parameter:
    number = nn.Parameter(torch.full((1, 1), 0.5))
    number.grad = torch.full((1, 1), 0.5)
    return number


def _check_kinds(kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> None:
    """Refuse a text where a flag belongs, which torch takes for True, and a flag where a number does."""
    known = inspect.signature(kind).parameters
    for name, value in arguments.items():
        default = known[name].default if name in known else None
        if isinstance(default, bool) and not isinstance(value, bool):
            raise OptionError(f"{name} is {shown_value(value)}; expected True or False")
        if type(default) in (int, float) and isinstance(value, bool):
            raise OptionError(f"{name} is {value}; expected a number")
