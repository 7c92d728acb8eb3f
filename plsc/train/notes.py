"""What a run says of its options before it begins: settings without effect, and those that may be slips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from plsc.config import Config, find_option
from plsc.parallel.machine import usable_cores
from plsc.parallel.sharding import plain_name

_STEPS = ("step", "multi_step")
_FALLING = ("polynomial", "cosine", "exponential")
_SCALING = (
    "init_loss_scaling",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_ratio",
    "decr_ratio",
    "use_dynamic_loss_scaling",
)


def idle_note(options: Config, made_with: Mapping[str, Any] | None = None) -> str:
    """Return a line that names the options without effect and why, or nothing if there are none.

    made_with: the arguments of the constructor of a custom network.

    One that is set to its default, as `set_mixed_precision` sets many, does not count.
    """
    found = [
        f"{path} ({reason})"
        for paths, reason in _unused(options, made_with)
        for path in paths
        if path in options.explicit and options.get(path) != find_option(path).default
    ]
    return f"note: set, but without effect in this run: {', '.join(found)}" if found else ""


def batch_note(global_batch: int, num_samples: int | None) -> str:
    """Return a line for a batch that shows the images of the set more than once, or nothing."""
    if num_samples is None or global_batch <= num_samples:
        return ""
    return (
        f"note: a step takes {global_batch} images, and the set has {num_samples}: it shows them "
        f"{global_batch / num_samples:.1f} times each"
    )


def frozen_note(network: nn.Module) -> str:
    """Return a line for a network of which nothing is trained, or nothing."""
    if any(parameter.requires_grad for parameter in network.parameters()):
        return ""
    return f"warning: {plain_name(network)} has no trainable parameter; only the head is trained"


def threads_note(options: Config) -> str:
    """Return a line for more threads than there are cores, or nothing."""
    threads, cores = options.runtime.cpu_threads, usable_cores()
    if threads <= cores:
        return ""
    return (
        f"note: runtime.cpu_threads is {threads}, but this process may use {cores} core{'s' * (cores != 1)}: "
        "threads that wait for each other can make a step many times as slow"
    )


def _unused(
    options: Config, made_with: Mapping[str, Any] | None
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield options that this run does not look at, and the reason."""
    optim, precision, head = options.optim, options.precision, options.head
    if made_with is not None:
        paths = tuple(
            path
            for path in ("model.dropout", "model.neck")
            if made_with.get(path.removeprefix("model.")) != options.get(path)
        )
        yield paths, "the custom network was not made with it"
    has_own_rows = head.loss_type.startswith("dist_")
    schedule = f"optim.schedule is {optim.schedule}"
    if optim.schedule not in _STEPS:
        yield ("optim.step_boundaries", "optim.lr_decay_factor"), schedule
    if optim.schedule not in _FALLING:
        yield ("optim.decay_steps", "optim.end_lr_factor"), schedule
    if optim.schedule != "cosine":
        yield ("optim.cosine_cycles",), schedule
    if optim.schedule != "polynomial":
        yield ("optim.decay_power",), schedule
    if head.loss_type.removeprefix("dist_") in ("softmax", "normface"):
        yield ("head.margin_warmup_steps",), f"head.loss_type is {head.loss_type}"
    if ":" in optim.optimizer and not has_own_rows:
        yield ("optim.lr", "optim.weight_decay"), "the optimizer's factory decides"
    if optim.optimizer.lower() != "sgd" and not (has_own_rows and head.optimizer == "sgd"):
        yield ("optim.momentum", "optim.nesterov"), "no optimizer here is sgd"
    if optim.clip_norm == 0:
        yield ("optim.clip_scope",), "optim.clip_norm is 0"
    if options.memory.checkpoint_stages.strip() == "none":
        yield ("memory.checkpoint_every",), "memory.checkpoint_stages is none"
    if options.parallel.backbone == "replicated":
        units = ("parallel.shard_size", "parallel.shard_units")
        yield units, "parallel.backbone is replicated"
    else:
        yield ("speed.bucket_mb",), "parallel.backbone is sharded"
    mode = f"precision.mode is {precision.mode}"
    if precision.mode == "float32":
        yield ("precision.white_list", "precision.black_list"), mode
    if precision.mode != "float16" and precision.loss_scaling == "auto":
        yield tuple(f"precision.{name}" for name in _SCALING), mode
