"""A rule for the first values of some parameters: what `model.initialization` lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plsc.errors import OptionError, suggest
from plsc.option import is_finite_number, shown_value
from plsc.patterns import read_pattern

RULES: dict[str, tuple[str, ...]] = {
    "xavier_uniform": ("gain",),
    "xavier_normal": ("gain",),
    "kaiming_uniform": ("a", "mode", "nonlinearity"),
    "kaiming_normal": ("a", "mode", "nonlinearity"),
    "orthogonal": ("gain",),
    "normal": ("mean", "std"),
    "trunc_normal": ("mean", "std", "a", "b"),
    "uniform": ("a", "b"),
    "constant": ("val",),
}
"""The rules, which are functions of torch.nn.init, and the arguments that each takes."""

OF_MATRICES = ("xavier_", "kaiming_", "orthogonal")
"""Beginnings of the rules that want two dimensions or more."""

_TEXTS = ("mode", "nonlinearity")


@dataclass(frozen=True)
class Initialization:
    """Which parameters (see `plsc.patterns`) begin by which rule, with which arguments."""

    pattern: str
    rule: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def wants_matrices(self) -> bool:
        """Whether parameters of fewer than two dimensions are passed over."""
        return self.rule.startswith(OF_MATRICES)

    def as_dict(self) -> dict[str, Any]:
        """Return what `model.initialization` holds of it."""
        return {"pattern": self.pattern, "rule": self.rule, **self.arguments}


def read_initializations(values: Sequence[Mapping[str, Any]]) -> list[Initialization]:
    """Return what `model.initialization` lists. Raises OptionError for one that is wrong."""
    return [_read(value) for value in values]


def _read(value: Mapping[str, Any]) -> Initialization:
    pattern, rule = read_pattern(value, "an initialization"), value.get("rule")
    if not isinstance(rule, str) or rule not in RULES:
        raise OptionError(
            f"initialization {pattern!r}: no rule is named {shown_value(rule)}; "
            f"{suggest(str(rule), RULES)}"
        )
    arguments = {key: given for key, given in value.items() if key not in ("pattern", "rule")}
    for key, given in arguments.items():
        if key not in RULES[rule]:
            raise OptionError(
                f"initialization {pattern!r}: the rule {rule} has no {key!r}; "
                f"{suggest(str(key), RULES[rule])}"
            )
        is_sound = isinstance(given, str) if key in _TEXTS else is_finite_number(given)
        if not is_sound:
            kind = "a text" if key in _TEXTS else "a finite number"
            raise OptionError(
                f"initialization {pattern!r}: {key} is {shown_value(given)}; expected {kind}"
            )
    if rule == "constant" and "val" not in arguments:
        raise OptionError(f"initialization {pattern!r}: the rule constant needs val, the value")
    return Initialization(pattern, rule, arguments)
