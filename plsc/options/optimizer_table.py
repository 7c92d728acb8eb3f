"""The optimizers by name: torch.optim's classes, and which options each takes.

This is data alone: torch is not loaded for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plsc.errors import suggest
from plsc.option import is_finite_number, shown_value


@dataclass(frozen=True)
class OptimizerKind:
    """One of torch.optim's classes.

    takes: options of the group ``optim`` that it gets. has_fused: whether torch has a fused step for it.
    state_bytes: of state for each number of the weights, in float32, with its default settings.
    """

    class_name: str
    takes: tuple[str, ...]
    has_fused: bool = False
    state_bytes: float = 4.0


_DECAY = ("weight_decay",)
_MOMENTS = ("betas", "weight_decay")

OPTIMIZERS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind("SGD", ("momentum", "nesterov", "weight_decay"), has_fused=True),
    "adam": OptimizerKind("Adam", _MOMENTS, has_fused=True, state_bytes=8),
    "adamw": OptimizerKind("AdamW", _MOMENTS, has_fused=True, state_bytes=8),
    "rmsprop": OptimizerKind("RMSprop", _DECAY),
    "adadelta": OptimizerKind("Adadelta", _DECAY, state_bytes=8),
    "adagrad": OptimizerKind("Adagrad", _DECAY, has_fused=True),
    "adamax": OptimizerKind("Adamax", _MOMENTS, state_bytes=8),
    "nadam": OptimizerKind("NAdam", _MOMENTS, state_bytes=8),
    "radam": OptimizerKind("RAdam", _MOMENTS, state_bytes=8),
    "asgd": OptimizerKind("ASGD", _DECAY),
    "rprop": OptimizerKind("Rprop", (), state_bytes=8),
    # A row and a column of numbers for each matrix: next to nothing.
    "adafactor": OptimizerKind("Adafactor", _DECAY, state_bytes=0),
}

_REFUSED = {
    "lbfgs": "asks for the loss again and again in a step, with a closure; a step here has one pass",
    "sparseadam": "is for sparse gradients, and those of the networks here are dense",
    "muon": (
        "updates matrices alone, and refuses biases, norms and convolutions; use it beside another one in a "
        "factory of your own"
    ),
    "nesterov": "is 'sgd' with set_nesterov(True)",
    "momentum": "is 'sgd' with set_momentum(0.9)",
}


def check_optimizer(name: str) -> str | None:
    """Return None for an optimizer's name, or the place of a factory; else what was expected."""
    if ":" in name:
        module, _, factory = name.partition(":")
        return None if module and factory else "a factory as 'package.module:factory'"
    if name.lower() in OPTIMIZERS:
        return None
    reason = _REFUSED.get(name.lower())
    if reason:
        return f"another one: {name} {reason}"
    return f"'package.module:factory' or a name; {suggest(name.lower(), OPTIMIZERS)}"


def check_named_arguments(arguments: dict[str, Any]) -> str | None:
    """Return None for arguments of a named optimizer that are not set otherwise; else what was expected."""
    for name in arguments:
        if name in RESERVED:
            return f"other arguments than {name!r}: {RESERVED[name]}"
    return check_arguments(arguments)


def check_arguments(arguments: dict[str, Any]) -> str | None:
    """Return None for plain values that survive a checkpoint, by argument; else what was expected."""
    for name, value in arguments.items():
        if not isinstance(name, str) or not name.isidentifier():
            return f"names of arguments, and not {name!r}"
        items = value if isinstance(value, (list, tuple)) else [value]
        if not all(map(_is_plain, items)):
            return f"plain values, and not {name}={shown_value(value)}"
    return None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, str)) or is_finite_number(value)


RESERVED = {
    "params": "these are the network's",
    "lr": "set_lr(lr) sets it; a group has lr_factor",
    "initial_lr": "set_lr(lr) sets it; a group has lr_factor",
    "weight_decay": "set_weight_decay(decay) sets it",
    "foreach": "set_optimizer_implementation('foreach') chooses it",
    "fused": "set_optimizer_implementation('fused') chooses it",
    "maximize": "a loss is minimised",
    "differentiable": "nothing is derived through a step",
    "capturable": "a step is not captured into a graph",
}
"""Arguments of torch's optimizers that are set otherwise here, and how."""
