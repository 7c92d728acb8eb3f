"""Learning rate schedules: the learning rate as a function of the number of previous updates.

The learning rate is a base rate times a factor. During the first `warmup_steps` it increases linearly, from
base / warmup_steps in the first step to base in the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from plsc.config.option import is_finite_number, shown_value
from plsc.errors import OptionError, refusing

Shape = Callable[[int], float]
"""The factor of the base rate, as a function of the number of previous updates."""
ScheduleFunction = Callable[..., float]
"""A script's own: ``f(step)`` or ``f(step, total_steps)``."""


@dataclass(frozen=True)
class Schedule:
    """A base rate with a linear warm-up, followed by a shape."""

    base: float
    shape: Shape
    warmup_steps: int = 0

    def factor(self, step: int) -> float:
        """Return the factor of the base rates after `step` updates."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.shape(step)

    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` updates."""
        return self.base * self.factor(step)


def constant(step: int) -> float:
    """Keep the base rate."""
    return 1.0


def steps_down(boundaries: tuple[int, ...], decay_factor: float) -> Shape:
    """Multiply the base rate by `decay_factor` at each boundary."""
    return lambda step: decay_factor ** sum(step >= boundary for boundary in boundaries)


def polynomial(first: int, last: int, power: float = 1.0, end: float = 0.0) -> Shape:
    """Decay from base to base * end as (1 - t)^power, where t goes from 0 at `first` to 1 at `last`.

    From `last` on the rate is constant.
    """
    return lambda step: end + (1 - end) * (1 - _share(step, first, last)) ** power


def cosine(first: int, last: int, end: float = 0.0, cycles: int = 1) -> Shape:
    """Decay from base to base * end as half a cosine (Loshchilov and Hutter 2017), `cycles` times.

    The cycles have equal length; each starts at base (warm restarts). From `last` on the rate is constant.
    """

    def shape(step: int) -> float:
        share = _share(step, first, last)
        in_cycle = 1.0 if share == 1 else share * cycles % 1
        return end + (1 - end) * (1 + math.cos(math.pi * in_cycle)) / 2

    return shape


def exponential(first: int, last: int, end: float) -> Shape:
    """Decay from base to base * end by a constant factor per step; from `last` on the rate is constant."""
    return lambda step: end ** _share(step, first, last)


def custom(function: Callable[[int], float], name: str) -> Shape:
    """Multiply the base rate by the result of a user's function, which must depend only on the step.

    Raises OptionError, at that step, if the function raises or does not return a finite number >= 0.
    """
    expected = "expected a function of the number of updates and, if it has that parameter, total_steps"

    def shape(step: int) -> float:
        with refusing(f"the schedule {name} failed for step {step}", expected):
            factor = function(step)
        if not (is_finite_number(factor) and factor >= 0):
            raise OptionError(
                f"the schedule {name} returned {shown_value(factor)} for step {step}; expected a factor of "
                "the learning rate, a finite number of 0 or more"
            )
        return float(factor)

    return shape


def _share(step: int, first: int, last: int) -> float:
    return min(1.0, max(0, step - first) / max(1, last - first))
