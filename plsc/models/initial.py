"""First values of parameters by rule: Xavier's, Kaiming's, constants and others."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from plsc.config.model import Initialization
from plsc.config.patterns import find_parameters, label_parameters
from plsc.errors import OptionError, first_line
from plsc.seeds import hash_key

_OPTION = "model.initialization"
_STREAM = 11  # a part of the key: other draws of the seed are not these


def initialise_by_rule(network: nn.Module, rules: Sequence[Initialization], seed: int) -> None:
    """Give the parameters that the rules match their first values; the first rule that matches counts.

    What a parameter gets depends on the seed, its name and shape alone: it is the same on every rank and
    device, and whatever other rules there are. Values are drawn in float32 on the CPU, by torch.nn.init.

    Raises OptionError for a pattern that matches no parameter, or none of two dimensions or more where the
    rule wants them, and for arguments that the rule cannot take.
    """
    labels = label_parameters(network)
    named = dict(network.named_parameters())
    taken: set[str] = set()
    for rule in rules:
        found = find_parameters(rule.pattern, labels, _OPTION)
        if rule.wants_matrices:
            found = [name for name in found if named[name].ndim > 1]
            if not found:
                raise OptionError(
                    f"{_OPTION}: the rule {rule.rule} is for parameters of two dimensions or more, and "
                    f"{rule.pattern!r} matches others alone; use normal, uniform or constant for them"
                )
        for name in found:
            if name not in taken:
                _initialise(named[name], name, rule, seed)
        taken.update(found)


def _initialise(parameter: nn.Parameter, name: str, rule: Initialization, seed: int) -> None:
    function: Any = getattr(nn.init, f"{rule.rule}_")
    drawn = torch.empty(parameter.shape)
    arguments = dict(rule.arguments)
    if "generator" in inspect.signature(function).parameters:
        generator = torch.Generator().manual_seed(
            hash_key(seed, _STREAM, zlib.crc32(name.encode()))
        )
        arguments["generator"] = generator
    try:
        function(drawn, **arguments)
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise OptionError(
            f"{_OPTION}: the rule {rule.rule} cannot be used for {name} {list(drawn.shape)}: "
            f"{first_line(error)}"
        ) from error
    with torch.no_grad():
        parameter.copy_(drawn)
