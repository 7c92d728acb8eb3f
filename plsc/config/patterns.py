"""Patterns over the parameters of a network: which of them an option is about.

A pattern is one of

- a name with the wildcards of the shell (``*``, ``?``, ``[ab]``; ``*`` also goes over dots): of a parameter
  (``neck.fc.weight``, ``*.bias``), or of a module, and then of all parameters in it (``stem``, ``stages.0``);
- ``type:`` and the name of a module's class, with the same wildcards (``type:BatchNorm*``): the parameters of
  such modules, and of what they contain;
- ``re:`` and a regular expression that the whole name of a parameter matches (``re:stages\\.[01]\\..*``).
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
"""Names of parameters, to all that a pattern may match of each, its own name first."""

_TYPE, _REGEX = "type:", "re:"
_SHOWN = 12


def check_pattern(pattern: Any) -> str | None:
    """Return None for a sound pattern, else what was expected."""
    if not isinstance(pattern, str) or not pattern.strip():
        return "a string such as 'stem', '*.bias', 'type:BatchNorm2d' or 're:stages\\..*'"
    if pattern.startswith(_REGEX):
        try:
            re.compile(pattern.removeprefix(_REGEX))
        except (re.error, OverflowError, RecursionError) as error:
            return f"a regular expression after 're:' ({error})"
    return None


def read_pattern(entry: Mapping[str, Any], what: str) -> str:
    """Return the pattern that an entry of an option has. Raises OptionError without a sound one.

    what: the entry, 'a parameter group' say.
    """
    if "pattern" not in entry:
        others = f" but {', '.join(map(str, entry))}"[:100] if entry else ""
        raise OptionError(f"{what} has no pattern{others}; expected {check_pattern(None)}")
    expected = check_pattern(entry["pattern"])
    if expected is not None:
        raise OptionError(f"the pattern of {what} is {entry['pattern']!r}; expected {expected}")
    return str(entry["pattern"])


def label_parameters(network: nn.Module) -> dict[str, list[str]]:
    """Return of each parameter, by its name: that, and the names and types of the modules that it is in."""
    types = {name: type(module).__name__ for name, module in network.named_modules()}
    return {
        name: [name, *_surroundings(name, types)]
        for name, _ in network.named_parameters()  # one that is shared, once
    }


def _surroundings(name: str, types: Mapping[str, str]) -> Iterator[str]:
    module = name.rpartition(".")[0]
    while module:
        yield module
        if module in types:
            yield f"{_TYPE}{types[module]}"
        module = module.rpartition(".")[0]


def find_parameters(pattern: str, labels: Labels, option: str) -> list[str]:
    """Return the names of the parameters that a pattern matches, in the order of the network.

    option: where the pattern stands, for the error. Raises OptionError, with near names, if there is none.
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
    near = did_you_mean(pattern.strip("*."), known)
    top = list(dict.fromkeys(name.partition(".")[0] for name in labels))
    more = f" and {len(top) - _SHOWN} more" if len(top) > _SHOWN else ""
    return f"; it consists of {', '.join(top[:_SHOWN])}{more}{near}"
