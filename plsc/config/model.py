"""Options of the backbone, and the rules of `model.initialization`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plsc.config.option import (
    at_least,
    between,
    declare,
    is_finite_number,
    not_empty,
    of_model,
    of_run,
    shown_value,
)
from plsc.config.patterns import read_pattern
from plsc.errors import OptionError, suggest
from plsc.names import NETWORKS

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
"""The initialisation rules, all functions of torch.nn.init, with their arguments."""

OF_MATRICES = ("xavier_", "kaiming_", "orthogonal")
"""Prefixes of the rules that need parameters of two dimensions or more."""

_STRING_ARGUMENTS = ("mode", "nonlinearity")


@dataclass(frozen=True)
class Initialization:
    """An initialisation rule with its arguments, for the parameters that match a pattern.

    Patterns: see `plsc.config.patterns`.
    """

    pattern: str
    rule: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def wants_matrices(self) -> bool:
        """Whether the rule skips parameters of fewer than two dimensions."""
        return self.rule.startswith(OF_MATRICES)

    def as_dict(self) -> dict[str, Any]:
        """Return its entry in `model.initialization`."""
        return {"pattern": self.pattern, "rule": self.rule, **self.arguments}


def read_initializations(values: Sequence[Mapping[str, Any]]) -> list[Initialization]:
    """Return the rules listed in `model.initialization`. Raises OptionError for an invalid entry."""
    return [_read(value) for value in values]


def _read(value: Mapping[str, Any]) -> Initialization:
    pattern, rule = read_pattern(value, "an initialization"), value.get("rule")
    if not isinstance(rule, str) or rule not in RULES:
        raise OptionError(
            f"initialization {pattern!r}: unknown rule {shown_value(rule)}; {suggest(str(rule), RULES)}"
        )
    arguments = {key: given for key, given in value.items() if key not in ("pattern", "rule")}
    for key, given in arguments.items():
        if key not in RULES[rule]:
            raise OptionError(
                f"initialization {pattern!r}: the rule {rule} has no argument {key!r}; "
                f"{suggest(str(key), RULES[rule])}"
            )
        is_valid = isinstance(given, str) if key in _STRING_ARGUMENTS else is_finite_number(given)
        if not is_valid:
            kind = "a string" if key in _STRING_ARGUMENTS else "a finite number"
            raise OptionError(f"initialization {pattern!r}: {key} is {shown_value(given)}; expected {kind}")
    if rule == "constant" and "val" not in arguments:
        raise OptionError(f"initialization {pattern!r}: the rule constant needs the argument val")
    return Initialization(pattern, rule, arguments)


def _image_shape(shape: tuple[int, ...]) -> str | None:
    good = len(shape) == 3 and shape[0] in (1, 3) and min(shape) >= 1
    return None if good else "(channels, height, width) with 1 or 3 channels, such as (3, 112, 112)"


def check_network(name: str) -> str | None:
    """Return None for a known network, one of a library or a custom one, else what was expected."""
    if name in NETWORKS or ":" in name or name.startswith(("torchvision/", "timm/")):
        return None
    others = "'torchvision/NAME', 'timm/NAME', your own 'package.module:Class'"
    return f"{others}, or a name; {suggest(name, NETWORKS)}"


DEFAULT_NECK = "norm-dropout-linear-norm"
_NECK = re.compile(r"(norm-)?(dropout-)?linear(-norm)?")


def check_neck(parts: str) -> str | None:
    """Return None for a valid neck, else a description of valid ones."""
    if _NECK.fullmatch(parts):
        return None
    return (
        "'linear', optionally with 'norm-', 'dropout-' or 'norm-dropout-' before it and '-norm' after it, "
        "such as 'dropout-linear'"
    )


def _initializations(values: tuple[dict[str, Any], ...]) -> None:
    read_initializations(values)


@dataclass(frozen=True)
class ModelOptions:
    """Backbone network."""

    name: str = of_model(
        "ResNet50",
        f"network: {', '.join(NETWORKS)}, 'torchvision/NAME', 'timm/NAME', or 'package.module:Class' (a "
        "subclass of BaseModel)",
        "set_model_name(model_name)",
        check_network,
    )
    emb_size: int = of_model(512, "size of the embedding", "set_emb_size(size)", at_least(1))
    image_shape: tuple[int, int, int] = of_model(
        (3, 112, 112),
        "channels, height and width of the input; on the command line [3,112,112]",
        "set_image_shape(shape)",
        _image_shape,
    )
    dropout: float = of_model(
        0.4, "dropout probability before the embedding layer", "set_dropout(ratio)", between(0, 0.99)
    )
    neck: str = of_model(
        DEFAULT_NECK,
        "layers between features and embedding, joined by '-': norm (batch norm), dropout, linear",
        "set_neck(parts)",
        check_neck,
    )
    sync_batch_norm: bool = of_run(
        False, "use batch-norm statistics of the global batch", "set_sync_batch_norm(sync)"
    )
    pretrained: str | None = declare(
        None,
        "initial weights: a checkpoint, a .safetensors file, or a state dict of torch.save",
        "set_pretrained(path)",
        not_empty,
    )
    initialization: tuple[dict[str, Any], ...] = declare(
        (),
        "initialisation rules: a list of mappings with pattern, rule (of torch.nn.init, such as "
        "kaiming_normal) and its arguments; set_initialization adds one",
        "set_initializations(rules)",
        _initializations,
    )
