"""Build the optimizer of the network and the learning rate schedule from the options."""

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
    REFERENCE_BATCH,
    WARMUP_SHARE,
    WARMUP_STEPS,
    WARMUP_STEPS_OF_UNKNOWN_LENGTH,
    ParameterGroup,
    ScheduleArguments,
    read_parameter_groups,
)
from plsc.config.option import load_function, name_and_arguments
from plsc.errors import OptionError
from plsc.heads import Head, RowOptimizer
from plsc.optim import schedule as shapes
from plsc.optim.optimizers import (
    FULL_RATE,
    LR_FACTOR,
    OPTIMIZERS,
    Assignment,
    Factory,
    build_custom,
    build_optimizer,
)
from plsc.optim.schedule import Schedule, ScheduleFunction, Shape


def check_optim(options: Config) -> None:
    """Raise OptionError for contradicting options of optimizer and schedule."""
    optim = options.optim
    schedule, falling = schedule_of(options)
    if schedule == "exponential" and not falling.end_factor:
        raise OptionError(
            "end_factor of the exponential schedule is 0, which it never reaches; set a positive value"
        )
    is_custom = ":" in optim.optimizer
    takes = () if is_custom else OPTIMIZERS[optim.optimizer.lower()].takes
    for group in read_parameter_groups(optim.groups):
        _check_group(group, takes)


def schedule_of(options: Config) -> tuple[str, ScheduleArguments]:
    """Return the name of the schedule, and its arguments."""
    name, arguments = name_and_arguments(options.optim.schedule)
    return name, ScheduleArguments(**arguments)


def _check_group(group: ParameterGroup, takes: Collection[str]) -> None:
    """Validate settings that are also options of the run: torch validates only an optimizer's defaults."""
    for name in group.arguments.keys() & set(takes):
        try:
            find_option(f"optim.{name}").checked(group.arguments[name])
        except OptionError as error:
            raise OptionError(f"parameter group {group.pattern!r}: {error}") from error


def default_rate(global_batch: int) -> float:
    """Return the default learning rate."""
    return DEFAULT_RATE * global_batch / REFERENCE_BATCH


def default_warmup(total_steps: int | None) -> int:
    """Return the default number of warm-up steps; total_steps: None if the length of the run is unknown."""
    if total_steps is None:
        return WARMUP_STEPS_OF_UNKNOWN_LENGTH
    return min(WARMUP_STEPS, int(WARMUP_SHARE * total_steps))


def with_rate(options: Config, global_batch: int, total_steps: int | None) -> Config:
    """Return the configuration with resolved schedule, learning rate, warm-up and clipping, for checkpoints.

    total_steps: None if unknown.
    """
    options = options.changed({"optim.schedule": _schedule(options, total_steps)})
    optim, warmup = options.optim, options.optim.warmup_steps
    if warmup is None:
        ends = [end for end in (total_steps, schedule_of(options)[1].steps) if end is not None]
        # A custom schedule includes its warm-up.
        warmup = 0 if ":" in optim.schedule else default_warmup(min(ends, default=None))
    rate = optim.lr or default_rate(global_batch)
    values = {"optim.warmup_steps": warmup, "optim.lr": rate}
    if optim.clip_norm is None:
        values["optim.clip_norm"] = min(CLIP_NORM, CLIPPED_STEP / rate)
    return options.changed(values)


def _schedule(options: Config, total_steps: int | None) -> str | dict[str, Any]:
    """Return `optim.schedule`; the default depends on the length of the run."""
    optim, explicit = options.optim, options.explicit
    if "optim.schedule" in explicit | options.adopted:
        return optim.schedule
    return "constant" if total_steps is None else optim.schedule


def build_updates(
    options: Config,
    named: Mapping[str, nn.Parameter],
    assignment: Assignment,
    head: Head,
    rows: RowOptimizer | None,
    device: torch.device,
    factory: Factory | None,
) -> tuple[torch.optim.Optimizer, float]:
    """Return the optimizer of the network and of a replicated head, and its full learning rate.

    Also sets the full learning rate of the sharded class weights. named: the network's parameters by the
    names in `assignment`. factory: replaces `optim.optimizer`.
    """
    optim, base = options.optim, options.optim.lr
    assert base is not None  # see with_rate
    groups: list[dict[str, Any]] = [
        {"params": [named[name] for name in names], **own} for names, own in assignment.groups if names
    ]
    if rows is None:
        groups.append({"params": [*head.parameters()], **_settings_of_dense_head(options)})
    if not groups:  # the network is frozen, and class weights have their own optimizer
        groups.append({"params": []})
    for group in rows.param_groups if rows is not None else ():
        group[FULL_RATE] = base * options.head.lr_factor
    if ":" not in optim.optimizer:
        return build_optimizer(optim, groups, base, device), base
    if factory is None:
        factory = load_function(optim.optimizer, "optim.optimizer", "set_optimizer")
    optimizer = build_custom(factory, optim.optimizer, groups, optim.optimizer_arguments or {})
    return optimizer, float(optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"]))


def _settings_of_dense_head(options: Config) -> dict[str, Any]:
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
    until: Callable[[int], int | None],
    function: ScheduleFunction | None,
) -> Schedule:
    """Return the schedule of the learning rate; base: the full learning rate.

    total_steps: None if the length of a generator reader is unknown. until: `Length.until`, for a warm-up in
    epochs. function: replaces `optim.schedule`. Raises OptionError if the schedule needs an unknown number
    of steps.
    """
    optim = options.optim
    warmup = optim.warmup_steps or 0
    if isinstance(warmup, str):
        steps = until(int(warmup.removesuffix("ep")))
        if steps is None:
            raise OptionError(
                f"optim.warmup_steps is {warmup!r}, but the length of an epoch is unknown for a generator "
                "reader; set data.train_image_num, or optim.warmup_steps to a number of steps"
            )
        warmup = steps
    name, given = schedule_of(options)
    if ":" in name:
        return Schedule(base, _custom_shape(name, total_steps, function), warmup)
    if name == "constant":
        return Schedule(base, shapes.constant, warmup)
    if name in ("step", "multi_step"):
        shape = shapes.steps_down(given.boundaries, given.factor)
        return Schedule(base, shape, warmup)
    last = given.steps or total_steps
    if last is None:
        raise OptionError(
            f"optim.schedule {name!r} needs the number of steps, which is unknown for a generator "
            "reader; set its argument steps, train.steps or data.train_image_num"
        )
    if given.steps and given.steps <= warmup:
        raise OptionError(
            f"the schedule ends after {given.steps} steps, but the warm-up already takes {warmup} steps; "
            f"expected more than {warmup}"
        )
    end = given.end_factor
    falling = {
        "cosine": lambda: shapes.cosine(warmup, last, end, given.cycles),
        "exponential": lambda: shapes.exponential(warmup, last, end),
        "polynomial": lambda: shapes.polynomial(warmup, last, given.power, end),
    }
    return Schedule(base, falling[name](), warmup)


def _custom_shape(name: str, total_steps: int | None, function: ScheduleFunction | None) -> Shape:
    if function is None:
        function = load_function(name, "optim.schedule", "set_lr_schedule")
    try:
        arguments = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions written in C have no signature
        arguments = []
    given = {"total_steps": total_steps} if "total_steps" in arguments else {}
    shape = shapes.custom(lambda step: function(step, **given), name)
    if shape(0) != shape(0):  # also reports errors in the function before training
        raise OptionError(
            f"the schedule {name} returned two factors for step 0; it must depend only on the step"
        )
    return shape
