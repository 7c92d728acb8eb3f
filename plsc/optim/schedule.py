"""The learning rate as a function of the step."""

from __future__ import annotations

from collections.abc import Callable

REFERENCE_BATCH = 1024
"""The global batch for which a learning rate is given; others scale it in proportion."""


def step_schedule(
    lr: float,
    global_batch: int,
    boundaries: tuple[int, ...],
    decay_factor: float,
    warmup_steps: int = 0,
) -> Callable[[int], float]:
    """Return ``rate(step)``, where step counts the updates already made (0 for the first).

    The base rate is ``lr * global_batch / 1024`` (Goyal et al. 2017). It is multiplied by
    `decay_factor` once for each boundary that step has reached. Over the first `warmup_steps` it rises
    linearly: base / warmup_steps at the first step, base at the last.
    """
    base = lr * global_batch / REFERENCE_BATCH

    def rate(step: int) -> float:
        if step < warmup_steps:
            return base * (step + 1) / warmup_steps
        return base * decay_factor ** sum(step >= boundary for boundary in boundaries)

    return rate
