"""The options of optimizer and learning rate: the table of optimizers, groups of parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plsc.config.option import (
    at_least,
    between,
    declare,
    is_finite_number,
    more_than,
    of_run,
    one_of,
    read_fields,
    shown_value,
)
from plsc.config.patterns import check_pattern, read_pattern
from plsc.errors import OptionError, suggest


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


def check_optimizer(name: str) -> str | None:
    """Return None for an optimizer's name, or the place of a factory; else what was expected."""
    if ":" in name:
        module, _, factory = name.partition(":")
        return None if module and factory else "a factory as 'package.module:factory'"
    if name.lower() in OPTIMIZERS:
        return None
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


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters that a pattern matches (see `plsc.config.patterns`), and how they are trained.

    lr_factor: of the learning rate. weight_decay, l1_decay: instead of the run's; None: the run's. frozen:
    not trained at all. arguments: settings of the optimizer, such as momentum, for this group.
    """

    pattern: str
    lr_factor: float = declare(1.0, "its learning rate is the run's times this", check=more_than(0))
    weight_decay: float | None = declare(None, "L2 decay", check=at_least(0))
    l1_decay: float | None = declare(None, "L1 decay", check=at_least(0))
    frozen: bool = declare(False, "not trained")
    arguments: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return what `optim.groups` holds of it: what differs from the defaults, as plain values."""
        values = {name: getattr(self, name) for name in _SETTINGS}
        changed = {name: one for name, one in values.items() if one != getattr(ParameterGroup, name)}
        return {"pattern": self.pattern, **changed, **self.arguments}


_SETTINGS = ("lr_factor", "weight_decay", "l1_decay", "frozen")


def known_settings(of_optimizer: Iterable[str]) -> list[str]:
    """Return what a group can set, given what the optimizer has settings for."""
    return sorted({*_SETTINGS, *of_optimizer} - RESERVED.keys())


def read_parameter_groups(values: Sequence[Mapping[str, Any]]) -> list[ParameterGroup]:
    """Return the groups that `optim.groups` lists. Raises OptionError for one that is wrong."""
    return [_read(value) for value in values]


def _read(value: Mapping[str, Any]) -> ParameterGroup:
    pattern = read_pattern(value, "a parameter group")
    what = f"parameter group {pattern!r}"
    settings, arguments = read_fields(ParameterGroup, value, what)
    del arguments["pattern"]
    expected = check_named_arguments(arguments)
    if expected is not None:
        raise OptionError(f"{what}: expected {expected}")
    group = ParameterGroup(pattern, arguments=arguments, **settings)
    if group.frozen and group != ParameterGroup(pattern, frozen=True):
        raise OptionError(f"{what} is frozen, so nothing else can be set for it; leave the rest out")
    return group


DEFAULT_RATE, REFERENCE_BATCH = 0.1, 1024
"""The default learning rate, for this global batch; others scale it in proportion (Goyal et al. 2017)."""

WARMUP_STEPS, WARMUP_SHARE = 1000, 0.1
"""The default warm-up: this share of the run's steps, at most so many steps."""

WARMUP_STEPS_OF_UNKNOWN_LENGTH = 100

CLIP_NORM, CLIPPED_STEP = 20.0, 0.4
"""The default limit of the gradient's norm, and of that norm times the learning rate."""

SCHEDULES = ("step", "multi_step", "polynomial", "cosine", "exponential", "constant")


def _increasing_steps(steps: tuple[int, ...]) -> str | None:
    rising = all(a < b for a, b in itertools.pairwise(steps))
    return None if rising and all(s > 0 for s in steps) else "increasing positive step numbers"


def _two_decays(values: tuple[float, ...]) -> str | None:
    good = len(values) == 2 and all(0 <= value < 1 for value in values)
    return None if good else "two numbers from 0 to below 1"


def _schedule(name: str) -> str | None:
    module, colon, function = name.partition(":")
    if name in SCHEDULES or (colon and module and function):
        return None
    return f"'package.module:function' or a name; {suggest(name, SCHEDULES)}"


def _groups(values: tuple[dict[str, Any], ...]) -> None:
    read_parameter_groups(values)


def _patterns(values: tuple[str, ...]) -> str | None:
    return next((wrong for wrong in map(check_pattern, values) if wrong), None)


@dataclass(frozen=True)
class OptimOptions:
    """Optimizer and learning rate."""

    lr: float | None = of_run(
        None,
        "learning rate, used as it is for any batch; when not set, "
        f"{DEFAULT_RATE:g} x global batch / {REFERENCE_BATCH}",
        "set_lr(lr)",
        more_than(0),
    )
    optimizer: str = of_run(
        "sgd",
        "optimizer of the network: sgd, adam, adamw, rmsprop, adadelta, adagrad, adamax, nadam, radam, asgd, "
        "rprop, adafactor, or 'package.module:factory'; class rows: head.optimizer",
        "set_optimizer(optimizer)",
        check_optimizer,
    )
    optimizer_arguments: dict[str, Any] | None = of_run(  # noqa: RUF009
        None, "more of the optimizer's own settings by name, such as {eps: 1.e-7}",
        "set_optimizer_arguments(arguments)", check_arguments,
    )  # fmt: skip
    implementation: str = of_run(
        "auto", "what computes the optimizer's step: auto, fused, foreach or for_loop",
        "set_optimizer_implementation(name)", one_of("auto", "fused", "foreach", "for_loop"),
    )  # fmt: skip
    momentum: float = of_run(0.9, "momentum of SGD", "set_momentum(momentum)", between(0, 0.9999))
    nesterov: bool = of_run(
        False, "Nesterov's momentum in SGD, of the network and of class rows",
        "set_nesterov(nesterov)",
    )  # fmt: skip
    betas: tuple[float, ...] = of_run(
        (0.9, 0.999), "decay of the two moments of Adam and its relatives", "set_betas(betas)",
        _two_decays,
    )  # fmt: skip
    weight_decay: float = of_run(5e-4, "L2 decay of all parameters", "set_weight_decay(decay)", at_least(0))
    l1_decay: float = of_run(0.0, "L1 decay of the network's parameters", "set_l1_decay(decay)", at_least(0))
    decay_norm_and_bias: bool = of_run(
        True, "decay parameters of one dimension, too: biases, norms, PReLU's slopes",
        "set_decay_norm_and_bias(decay)",
    )  # fmt: skip
    groups: tuple[dict[str, Any], ...] = of_run(
        (),
        "groups of parameters with settings of their own: each has a pattern, and may have lr_factor, "
        "weight_decay, l1_decay, frozen and settings of the optimizer; the first that matches counts; "
        "add_parameter_group adds one",
        "set_parameter_groups(groups)",
        _groups,
    )
    freeze: tuple[str, ...] = of_run(
        (), "patterns of parameters that are not trained, such as [stem, stages.0]",
        "set_freeze(patterns)", _patterns,
    )  # fmt: skip
    schedule: str = of_run(
        "cosine",
        "how the learning rate falls: cosine, polynomial, exponential, step or multi_step (step_boundaries), "
        "constant, or 'package.module:function'; when not set: step if step_boundaries or lr_decay_factor "
        "are set, constant if a generator reader does not tell its length",
        "set_lr_schedule(schedule)",
        _schedule,
    )
    decay_steps: int | None = of_run(
        None,
        "step at which a polynomial, cosine or exponential schedule ends; None: the last of the run",
        "set_decay_steps(num)",
        at_least(1),
    )
    decay_power: float = of_run(
        1.0, "power of the polynomial schedule", "set_decay_power(power)", more_than(0)
    )
    cosine_cycles: int = of_run(
        1, "cosine curves from the first step to the last, one after another (warm restarts)",
        "set_cosine_cycles(num)", at_least(1),
    )  # fmt: skip
    end_lr_factor: float = of_run(
        0.0,
        "where a polynomial, cosine or exponential schedule ends, as a part of the learning rate",
        "set_end_lr_factor(factor)",
        between(0, 1),
    )
    warmup_epochs: int = of_run(
        0, "epochs over which the learning rate rises linearly from 0", "set_warmup_epochs(num)",
        at_least(0),
    )  # fmt: skip
    warmup_steps: int | None = of_run(
        None,
        f"the same in steps, instead of warmup_epochs; when neither is set, {WARMUP_SHARE:.0%} of the run's "
        f"steps, at most {WARMUP_STEPS}; {WARMUP_STEPS_OF_UNKNOWN_LENGTH} where the length is unknown; "
        "0 with a schedule 'package.module:function'",
        "set_warmup_steps(num)",
        at_least(0),
    )
    step_boundaries: tuple[int, ...] = of_run(
        (100000, 160000, 220000),
        "steps at which the learning rate is multiplied by lr_decay_factor",
        "set_step_boundaries(boundaries)",
        _increasing_steps,
    )
    lr_decay_factor: float = of_run(
        0.1, "factor of the learning rate at each boundary", "set_lr_decay_factor(factor)",
        between(0, 1),
    )  # fmt: skip
    clip_norm: float | None = of_run(
        None,
        f"clip gradients whose norm is larger; not set: {CLIP_NORM:g}, at most {CLIPPED_STEP} / lr; "
        "0: no clipping",
        "set_clip_norm(norm)",
        at_least(0),
    )
    clip_scope: str = of_run(
        "backbone",
        "gradients that are clipped: backbone, or all (with the class rows: one more pass over them)",
        "set_clip_scope(scope)",
        one_of("backbone", "all"),
    )
