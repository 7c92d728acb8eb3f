"""The learning rate as a function of the step.

A schedule is ``rate(step)``, where step counts the updates already made (0 for the first). The base rate is
``lr * global_batch / 1024`` (Goyal et al. 2017). Over the first `warmup_steps` it rises linearly: base /
warmup_steps at the first step, base at the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable

REFERENCE_BATCH = 1024
"""The global batch for which a learning rate is given; others scale it in proportion."""

Schedule = Callable[[int], float]


def step_schedule(
    lr: float,
    global_batch: int,
    boundaries: tuple[int, ...],
    decay_factor: float,
    warmup_steps: int = 0,
) -> Schedule:
    """Multiply the base rate by `decay_factor` once for each boundary that the step has reached."""

    def decay(step: int) -> float:
        return decay_factor ** sum(step >= boundary for boundary in boundaries)

    return _with_warmup(lr, global_batch, decay, warmup_steps)


def polynomial_schedule(
    lr: float,
    global_batch: int,
    total_steps: int,
    power: float = 1.0,
    end_factor: float = 0.0,
    warmup_steps: int = 0,
) -> Schedule:
    """Let the rate fall from base to base * end_factor as (1 - t)^power, t the share of the steps made.

    The fall begins after the warm-up and ends at `total_steps`; from there on the rate stays.
    """

    def decay(step: int) -> float:
        return (
            end_factor + (1 - end_factor) * (1 - _share(step, warmup_steps, total_steps)) ** power
        )

    return _with_warmup(lr, global_batch, decay, warmup_steps)


def cosine_schedule(
    lr: float,
    global_batch: int,
    total_steps: int,
    end_factor: float = 0.0,
    warmup_steps: int = 0,
) -> Schedule:
    """Let the rate fall from base to base * end_factor as half a cosine (Loshchilov and Hutter 2017)."""

    def decay(step: int) -> float:
        share = _share(step, warmup_steps, total_steps)
        return end_factor + (1 - end_factor) * (1 + math.cos(math.pi * share)) / 2

    return _with_warmup(lr, global_batch, decay, warmup_steps)


def _share(step: int, warmup_steps: int, total_steps: int) -> float:
    return min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))


def _with_warmup(
    lr: float, global_batch: int, decay: Callable[[int], float], warmup_steps: int
) -> Schedule:
    base = lr * global_batch / REFERENCE_BATCH

    def rate(step: int) -> float:
        if step < warmup_steps:
            return base * (step + 1) / warmup_steps
        return base * decay(step)

    return rate
