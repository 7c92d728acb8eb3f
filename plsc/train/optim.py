"""Options in, the optimizer of the network and the schedule of the learning rate out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from plsc.config import Config, find_option
from plsc.config.optim import (
    CLIP_NORM,
    CLIPPED_STEP,
    DEFAULT_RATE,
    OPTIMIZERS,
    REFERENCE_BATCH,
    WARMUP_SHARE,
    WARMUP_STEPS,
    WARMUP_STEPS_OF_UNKNOWN_LENGTH,
    ParameterGroup,
    read_parameter_groups,
)
from plsc.config.option import load_function
from plsc.errors import OptionError
from plsc.heads import Head, RowOptimizer
from plsc.heads.joint import JointHead, JointRows, each_head
from plsc.optim import schedule as shapes
from plsc.optim.optimizers import (
    FULL_RATE,
    LR_FACTOR,
    Assignment,
    Factory,
    build_custom,
    build_optimizer,
)
from plsc.optim.schedule import Schedule, Shape

ScheduleFunction = Callable[..., float]


def check_optim(options: Config) -> None:
    """Raise OptionError for options of the optimizer and schedule that contradict each other."""
    optim = options.optim
    both = {"optim.warmup_epochs", "optim.warmup_steps"} <= options.explicit
    if both and optim.warmup_epochs and optim.warmup_steps is not None:
        raise OptionError(
            f"optim.warmup_epochs is {optim.warmup_epochs} and optim.warmup_steps is {optim.warmup_steps}; "
            "set one of the two"
        )
    if optim.schedule == "exponential" and not optim.end_lr_factor:
        raise OptionError(
            "an exponential schedule never comes to 0, where optim.end_lr_factor has it end; call "
            "set_end_lr_factor(0.01), say"
        )
    if optim.cosine_cycles > 1 and optim.schedule != "cosine":
        raise OptionError(
            f"optim.cosine_cycles is {optim.cosine_cycles}, but optim.schedule is {optim.schedule!r}; call "
            "set_lr_schedule('cosine'), or leave it out"
        )
    if optim.nesterov and not optim.momentum:
        raise OptionError("optim.nesterov needs a momentum; set_momentum(0.9), or leave it out")
    is_custom = ":" in optim.optimizer
    takes = () if is_custom else OPTIMIZERS[optim.optimizer.lower()].takes
    if "optim.betas" in options.explicit and "betas" not in takes:
        raise OptionError(
            f"optim.betas is set, but the optimizer {optim.optimizer} does not take it; leave it out"
        )
    for group in read_parameter_groups(optim.groups):
        _check_group(group, takes)
    if is_custom and "optim.implementation" in options.explicit:
        raise OptionError(
            f"optim.implementation is set, but the factory {optim.optimizer} makes the optimizer; have it "
            "set foreach or fused, and leave this out"
        )


def _check_group(group: ParameterGroup, takes: Collection[str]) -> None:
    """Check the settings that are options of the run, too: torch checks an optimizer's defaults alone."""
    for name in group.arguments.keys() & set(takes):
        try:
            find_option(f"optim.{name}").checked(group.arguments[name])
        except OptionError as error:
            raise OptionError(f"parameter group {group.pattern!r}: {error}") from error


def default_rate(global_batch: int) -> float:
    """Return the learning rate where none is set."""
    return DEFAULT_RATE * global_batch / REFERENCE_BATCH


def default_warmup(total_steps: int | None) -> int:
    """Return the warm-up steps where none are set; total_steps: None if the length of the run is unknown."""
    if total_steps is None:
        return WARMUP_STEPS_OF_UNKNOWN_LENGTH
    return min(WARMUP_STEPS, int(WARMUP_SHARE * total_steps))


def with_rate(options: Config, global_batch: int, total_steps: int | None) -> Config:
    """Return the configuration with the schedule, rate, warm-up and clipping that a checkpoint keeps.

    A warm-up in epochs remains one; the other way to set it is cleared. total_steps: None if unknown.
    """
    options = options.changed({"optim.schedule": _schedule(options, total_steps)})
    optim, warmup = options.optim, options.optim.warmup_steps
    if optim.warmup_epochs and (warmup is None or "optim.warmup_steps" not in options.explicit):
        values: dict[str, Any] = {"optim.warmup_steps": None}
    else:
        if warmup is None:
            ends = [end for end in (total_steps, optim.decay_steps) if end is not None]
            # A custom function gives the whole rate; warmup_epochs, here 0, may have been set.
            has_none = ":" in optim.schedule or (
                "optim.warmup_epochs" in options.explicit and "optim.warmup_steps" not in options.explicit
            )
            warmup = 0 if has_none else default_warmup(min(ends, default=None))
        values = {"optim.warmup_epochs": 0, "optim.warmup_steps": warmup}
    values["optim.lr"] = rate = optim.lr or default_rate(global_batch)
    if optim.clip_norm is None:
        values["optim.clip_norm"] = min(CLIP_NORM, CLIPPED_STEP / rate)
    return options.changed(values)


def _schedule(options: Config, total_steps: int | None) -> str:
    """Return the name of the schedule: the default gives way to steps that are set, and needs a length."""
    optim, explicit = options.optim, options.explicit
    if "optim.schedule" in explicit | options.adopted:
        return optim.schedule
    if explicit & {"optim.step_boundaries", "optim.lr_decay_factor"}:
        return "step"
    return "constant" if total_steps is optim.decay_steps is None else optim.schedule


def build_updates(
    options: Config,
    named: Mapping[str, nn.Parameter],
    assignment: Assignment,
    head: Head | JointHead,
    rows: RowOptimizer | JointRows | None,
    device: torch.device,
    factory: Factory | None,
) -> tuple[torch.optim.Optimizer, float]:
    """Return the optimizer of the network and of dense heads, and the rate at its schedule's full height.

    The groups of the sharded rows get their rate at full height, too. named: the network's parameters, as
    they are to be updated, under the names of the assignment. factory: instead of `optim.optimizer`.
    """
    optim, base = options.optim, options.optim.lr
    assert base is not None  # see with_rate
    groups: list[dict[str, Any]] = [
        {"params": [named[name] for name in names], **own} for names, own in assignment.groups if names
    ]
    dense = [p for _, one, own in each_head(head, rows) if own is None for p in one.parameters()]
    if dense:
        groups.append({"params": dense, **_settings_of_dense_heads(options)})
    if not groups:  # the network is frozen, and the rows have an optimizer of their own
        groups.append({"params": []})
    for group in [] if rows is None else rows.param_groups:
        group[FULL_RATE] = base * options.head.lr_factor
    if ":" not in optim.optimizer:
        return build_optimizer(optim, groups, base, device), base
    if factory is None:
        factory = load_function(optim.optimizer, "optim.optimizer", "set_optimizer")
    optimizer = build_custom(factory, optim.optimizer, groups, optim.optimizer_arguments or {})
    return optimizer, float(optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"]))


def _settings_of_dense_heads(options: Config) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if options.head.lr_factor != 1:
        own[LR_FACTOR] = options.head.lr_factor
    if options.head.weight_decay is not None:
        own["weight_decay"] = options.head.weight_decay
    return own


def build_schedule(
    options: Config,
    base: float,
    total_steps: int | None,
    steps_per_epoch: int | None,
    function: ScheduleFunction | None,
) -> Schedule:
    """Return the schedule of a rate at its full height, `base`.

    total_steps, steps_per_epoch: None where a generator reader does not tell. function: instead of
    `optim.schedule`. Raises OptionError where a number of steps is needed.
    """
    optim = options.optim
    if optim.warmup_epochs and steps_per_epoch is None:
        raise OptionError(
            "optim.warmup_epochs needs the length of an epoch, which a generator reader does not "
            "tell; call set_train_image_num, or set_warmup_steps"
        )
    warmup = optim.warmup_steps or optim.warmup_epochs * (steps_per_epoch or 0)
    if ":" in optim.schedule:
        return Schedule(base, _custom_shape(optim.schedule, total_steps, function), warmup)
    if optim.schedule == "constant":
        return Schedule(base, shapes.constant, warmup)
    if optim.schedule in ("step", "multi_step"):
        shape = shapes.steps_down(optim.step_boundaries, optim.lr_decay_factor)
        return Schedule(base, shape, warmup)
    last = optim.decay_steps or total_steps
    if last is None:
        raise OptionError(
            f"optim.schedule {optim.schedule!r} needs the number of steps, which a generator reader does "
            "not tell; call set_decay_steps, set_train_steps or set_train_image_num"
        )
    if optim.decay_steps and optim.decay_steps <= warmup:
        raise OptionError(
            f"optim.decay_steps is {optim.decay_steps}, but the warm-up takes {warmup} steps, after "
            "which the rate would be at its end at once; expected more"
        )
    end = optim.end_lr_factor
    falling = {
        "cosine": lambda: shapes.cosine(warmup, last, end, optim.cosine_cycles),
        "exponential": lambda: shapes.exponential(warmup, last, end),
        "polynomial": lambda: shapes.polynomial(warmup, last, optim.decay_power, end),
    }
    return Schedule(base, falling[optim.schedule](), warmup)


def _custom_shape(name: str, total_steps: int | None, function: ScheduleFunction | None) -> Shape:
    if function is None:
        function = load_function(name, "optim.schedule", "set_lr_schedule")
    check_schedule_function(function)
    try:
        arguments = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions in C do not tell
        arguments = []
    given = {"total_steps": total_steps} if "total_steps" in arguments else {}
    shape = shapes.custom(lambda step: function(step, **given), name)
    shape(0)  # a mistake in it is reported now, if possible
    return shape


def check_schedule_function(function: Any) -> None:
    """Raise OptionError for a schedule of torch's, which is none here, and for what is no function."""
    made = getattr(function, "func", function)  # of functools.partial
    kind = made if inspect.isclass(made) else type(made)
    if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        raise OptionError(
            f"the schedule is torch's {kind.__name__}, which counts its own calls and changes the rates it "
            "finds, so that a resumed run could have other ones; give a function of the step, such as "
            "lambda step: 0.97 ** (step // 1000), or one of the named schedules"
        )
    if not callable(function):
        raise OptionError(
            f"the schedule is {function!r}; expected a name, or a function that takes the count of updates "
            "made and returns what multiplies the learning rate"
        )
