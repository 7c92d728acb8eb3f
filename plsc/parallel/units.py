"""Which parts of a network are sharded as units of their own.

A unit is put together just before its forward and dropped behind it, so the parameters of one or two units
are whole at a time. Small units cost a collective each for little memory; a unit whose parameters are used
while its forward does not run would be found split. So a unit is a module that a trial run calls exactly
once, and no parameter is in two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from plsc.errors import OptionError, did_you_mean

LEAST_BLOCK = 100_000
"""Parameters from which on an item of a Sequential or ModuleList, such as a residual block, is a unit."""

LEAST_OTHER = 1_000_000
"""The same for any other module, such as the layer that makes the embedding."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def choose_units(network: nn.Module, calls: Mapping[str, int]) -> list[str]:
    """Return the names of the modules to shard as units.

    These are the items of containers that have layers inside, if they have `LEAST_BLOCK` parameters, and
    elsewhere the smallest modules with `LEAST_OTHER`. calls: how often a trial run called each module.
    """
    return _without_shared(network, _collect(network, "", False, calls))


def match_units(network: nn.Module, patterns: Sequence[str], calls: Mapping[str, int]) -> list[str]:
    """Return the names of the modules that match patterns such as ``stages.*.*``.

    ``*`` stands for (a part of) one component of a name.

    Raises:
        OptionError: a pattern matches no module with parameters, or one that cannot be a unit.
    """
    names = [name for name, module in network.named_modules() if name and _size(module)]
    chosen: list[str] = []
    for pattern in patterns:
        matched = [name for name in names if _matches(name, pattern)]
        if not matched:
            raise OptionError(
                f"parallel.shard_units: no module with parameters is named {pattern!r}"
                f"{did_you_mean(pattern, names)}; '*' stands for one component, as in 'stages.*'"
            )
        chosen += [name for name in matched if name not in chosen]
    for name in chosen:
        if calls.get(name, 0) != 1:
            raise OptionError(
                f"parallel.shard_units: {name} is called {calls.get(name, 0)} times when the network runs; "
                "a unit must be called once: choose the module around it"
            )
    shared = set(chosen) - set(_without_shared(network, chosen))
    if shared:
        raise OptionError(
            f"parallel.shard_units: {', '.join(sorted(shared))} have a parameter that is used elsewhere, "
            "too; leave them out, or choose a module around all its uses"
        )
    return chosen


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _collect(module: nn.Module, name: str, is_item: bool, calls: Mapping[str, int]) -> list[str]:
    """Return the units in a module; is_item: whether it lies directly in a container."""
    is_container = (
        type(module) in _CONTAINERS
    )  # subclasses are layers of several, with a name of their own
    may_be = bool(name) and not is_container and calls.get(name, 0) == 1
    has_layers = next(module.children(), None) is not None
    if may_be and is_item and has_layers and _size(module) >= LEAST_BLOCK:
        return [name]
    inside = [
        unit
        for child_name, child in module.named_children()
        for unit in _collect(
            child, f"{name}.{child_name}" if name else child_name, is_container, calls
        )
    ]
    if inside or not may_be or _size(module) < LEAST_OTHER:
        return inside
    return [name]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _without_shared(network: nn.Module, units: Sequence[str]) -> list[str]:
    """Return the units without those that have a parameter in common with anything outside."""
    kept = list(units)
    while True:
        owners: dict[int, set[str]] = {}
        for name, parameter in network.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), set()).add(_owner(name, kept))
        shared = set().union(*(one for one in owners.values() if len(one) > 1))
        if not shared & set(kept):
            return kept
        kept = [name for name in kept if name not in shared]


def _owner(name: str, units: Sequence[str]) -> str:
    """Return the innermost unit that a parameter is in; nothing for the network around them."""
    return max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default="")
