"""A group of the network's parameters with settings of its own: what `optim.groups` lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plsc.errors import OptionError
from plsc.option import Check, OptionSpec, at_least, more_than
from plsc.options.optimizer_table import RESERVED, check_named_arguments
from plsc.patterns import read_pattern


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters that a pattern matches (see `plsc.patterns`), and how they are trained.

    lr_factor: of the learning rate. weight_decay, l1_decay: instead of the run's; None: the run's. frozen:
    not trained at all. arguments: settings of the optimizer, such as momentum, for this group.
    """

    pattern: str
    lr_factor: float = 1.0
    weight_decay: float | None = None
    l1_decay: float | None = None
    frozen: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return what `optim.groups` holds of it: what differs from the defaults, as plain values."""
        found: dict[str, Any] = {"pattern": self.pattern}
        if self.lr_factor != 1:
            found["lr_factor"] = self.lr_factor
        for name in ("weight_decay", "l1_decay"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.frozen:
            found["frozen"] = True
        return {**found, **self.arguments}


def known_settings(of_optimizer: Iterable[str]) -> list[str]:
    """Return what a group can set, given what the optimizer has settings for."""
    return sorted({*_SPECS, *of_optimizer} - RESERVED.keys())


def read_parameter_groups(values: Sequence[Mapping[str, Any]]) -> list[ParameterGroup]:
    """Return the groups that `optim.groups` lists. Raises OptionError for one that is wrong."""
    return [_read(value) for value in values]


def _read(value: Mapping[str, Any]) -> ParameterGroup:
    pattern = read_pattern(value, "a parameter group")
    read: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    try:
        for name, given in value.items():
            if name in _SPECS and given is not None:
                read[name] = _SPECS[name].checked(given)
            elif name not in _SPECS and name != "pattern":
                arguments[name] = given
    except OptionError as error:
        raise OptionError(f"parameter group {pattern!r}: {error}") from error
    expected = check_named_arguments(arguments)
    if expected is not None:
        raise OptionError(f"parameter group {pattern!r}: expected {expected}")
    group = ParameterGroup(pattern, arguments=arguments, **read)
    if group.frozen and group != ParameterGroup(pattern, frozen=True):
        raise OptionError(
            f"parameter group {pattern!r} is frozen, so nothing else can be set for it; leave the rest out"
        )
    return group


def _spec(name: str, kind: Any, meaning: str, check: Check | None = None) -> OptionSpec:
    return OptionSpec("optim.groups", name, kind, None, meaning, "add_parameter_group", name, check)


_SPECS = {
    spec.name: spec
    for spec in (
        _spec("lr_factor", float, "its learning rate is the run's times this", more_than(0)),
        _spec("weight_decay", float, "L2 decay", at_least(0)),
        _spec("l1_decay", float, "L1 decay", at_least(0)),
        _spec("frozen", bool, "not trained"),
    )
}
