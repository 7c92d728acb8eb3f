"""The options of the optimizer and the learning rate."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from plsc.option import at_least, between, declare, more_than, one_of


def _increasing_steps(steps: tuple[int, ...]) -> str | None:
    rising = all(a < b for a, b in itertools.pairwise(steps))
    return None if rising and all(s > 0 for s in steps) else "increasing positive step numbers"


def _two_decays(values: tuple[float, ...]) -> str | None:
    good = len(values) == 2 and all(0 <= value < 1 for value in values)
    return None if good else "two numbers from 0 to below 1"


@dataclass
class OptimOptions:
    """Optimizer and learning rate."""

    lr: float = declare(
        0.1, "learning rate for a global batch of 1024; scaled in proportion", "set_lr(lr)",
        more_than(0),
    )  # fmt: skip
    optimizer: str = declare(
        "sgd", "optimizer of the network: sgd, adam or adamw; class rows: head.optimizer",
        "set_optimizer(name)", one_of("sgd", "adam", "adamw"),
    )  # fmt: skip
    momentum: float = declare(0.9, "momentum of SGD", "set_momentum(momentum)", between(0, 0.9999))
    betas: tuple[float, ...] = declare(
        (0.9, 0.999), "decay of the two moments of Adam and AdamW", "set_betas(betas)", _two_decays
    )
    weight_decay: float = declare(
        5e-4, "L2 decay of all parameters", "set_weight_decay(decay)", at_least(0)
    )
    schedule: str = declare(
        "step", "how the learning rate falls: step (step_boundaries), polynomial or cosine",
        "set_lr_schedule(name)", one_of("step", "polynomial", "cosine"),
    )  # fmt: skip
    decay_steps: int | None = declare(
        None, "step at which a polynomial or cosine schedule ends; None: the last of the run",
        "set_decay_steps(num)", at_least(1),
    )  # fmt: skip
    decay_power: float = declare(
        1.0, "power of the polynomial schedule", "set_decay_power(power)", more_than(0)
    )
    end_lr_factor: float = declare(
        0.0, "where a polynomial or cosine schedule ends, as a part of the learning rate",
        "set_end_lr_factor(factor)", between(0, 1),
    )  # fmt: skip
    warmup_epochs: int = declare(
        0, "epochs over which the learning rate rises linearly from 0", "set_warmup_epochs(num)",
        at_least(0),
    )  # fmt: skip
    step_boundaries: tuple[int, ...] = declare(
        (100000, 160000, 220000),
        "steps at which the learning rate is multiplied by lr_decay_factor",
        "set_step_boundaries(boundaries)",
        _increasing_steps,
    )
    lr_decay_factor: float = declare(
        0.1, "factor of the learning rate at each boundary", "set_lr_decay_factor(factor)",
        between(0, 1),
    )  # fmt: skip
    clip_norm: float = declare(
        0.0,
        "clip gradients whose norm is larger; 0: no clipping",
        "set_clip_norm(norm)",
        at_least(0),
    )
    clip_scope: str = declare(
        "backbone",
        "gradients that are clipped: backbone, or all (with the class rows: one more pass over them)",
        "set_clip_scope(scope)",
        one_of("backbone", "all"),
    )
