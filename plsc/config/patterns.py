"""Patterns that select parameters of a network.

A pattern is one of

- the name of a parameter (``neck.fc.weight``, ``*.bias``) or of a module, which selects all parameters in it
  (``stem``, ``stages.0``); with shell wildcards ``*``, ``?``, ``[ab]``, where ``*`` also matches dots;
- ``type:`` and the class of a module, with the same wildcards (``type:BatchNorm*``): selects all parameters
  in such modules;
- ``re:`` and a regular expression that matches the full name of a parameter (``re:stages\\.[01]\\..*``).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plsc.errors import OptionError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

Labels = Mapping[str, Sequence[str]]
"""Name of each parameter: all labels that a pattern may match, its own name first."""

_TYPE, _REGEX = "type:", "re:"
_SHOWN = 12


def check_pattern(pattern: Any) -> str | None:
    """Return None for a valid pattern, else what was expected."""
    if not isinstance(pattern, str) or not pattern.strip():
        return "a string such as 'stem', '*.bias', 'type:BatchNorm2d' or 're:stages\\..*'"
    if pattern.startswith(_REGEX):
        try:
            re.compile(pattern.removeprefix(_REGEX))
        except (re.error, OverflowError, RecursionError) as error:
            return f"a regular expression after 're:' ({error})"
    return None


def label_parameters(network: nn.Module) -> dict[str, list[str]]:
    """Return the labels of each parameter: its name, and names and types of the modules that contain it."""
    types = {name: type(module).__name__ for name, module in network.named_modules()}
    return {
        name: [name, *_surroundings(name, types)]
        for name, _ in network.named_parameters()  # a shared parameter appears once
    }


def _surroundings(name: str, types: Mapping[str, str]) -> Iterator[str]:
    module = name.rpartition(".")[0]
    while module:
        yield module
        if module in types:
            yield f"{_TYPE}{types[module]}"
        module = module.rpartition(".")[0]


def find_parameters(pattern: str, labels: Labels, option: str) -> list[str]:
    """Return the names of the parameters that match a pattern, in the order of the network.

    option: the option that holds the pattern, for the error. Raises OptionError, with similar names, if
    nothing matches.
    """
    matches = _matcher(pattern)
    found = [name for name, own in labels.items() if any(map(matches, own))]
    if not found:
        raise OptionError(
            f"{option}: the pattern {pattern!r} matches no parameter of the network{_hint(pattern, labels)}"
        )
    return found


def _matcher(pattern: str) -> Callable[[str], bool]:
    if pattern.startswith(_REGEX):
        expression = re.compile(pattern.removeprefix(_REGEX))
    else:
        expression = re.compile(fnmatch.translate(pattern))
    return lambda label: expression.fullmatch(label) is not None


def _hint(pattern: str, labels: Labels) -> str:
    known = list(dict.fromkeys(label for own in labels.values() for label in own))
    top = dict.fromkeys(name.partition(".")[0] for name in labels)
    return f"; its modules are {', '.join([*top][:_SHOWN])}{did_you_mean(pattern.strip('*.'), known)}"
