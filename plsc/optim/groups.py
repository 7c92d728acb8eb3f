"""Which parameters of the network are trained, and in which groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from plsc.config.optim import OptimOptions, ParameterGroup, read_parameter_groups
from plsc.config.patterns import find_parameters, label_parameters
from plsc.errors import OptionError

LR_FACTOR, L1_DECAY = "lr_factor", "l1_decay"
"""Keys of ours in an optimizer's groups, beside its own settings."""


@dataclass
class Assignment:
    """What is to become of each parameter, by its name.

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
    return Assignment([(_trained(names, named), own) for names, own in groups], frozen)


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
        name: 0.0
        for name, value in decays.items()
        if value is None and (name != L1_DECAY or L1_DECAY in own)
    }
    matrices = [name for name in names if named[name].ndim > 1]
    vectors = [name for name in names if named[name].ndim <= 1]
    return [(matrices, own), (vectors, {**own, **undecayed})]


def _trained(names: list[str], named: Mapping[str, nn.Parameter]) -> list[str]:
    return [name for name in names if named[name].requires_grad]
