"""The learning rate as a function of the step.

A schedule is ``rate(step)``, where step counts the updates already made (0 for the first), so a run that
resumes from a checkpoint has the rates of one that was not interrupted. It is a base rate times a factor.
Over the first `warmup_steps` it rises linearly: base / warmup_steps at the first step, base at the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from plsc.config.option import is_finite_number, shown_value
from plsc.errors import OptionError, refusing

Shape = Callable[[int], float]
"""What multiplies the base rate, by the count of updates made; 1 is its full height."""


@dataclass(frozen=True)
class Schedule:
    """A base rate, and a shape by which it falls; before that it rises over the steps of a warm-up."""

    base: float
    shape: Shape
    warmup_steps: int = 0

    def factor(self, step: int) -> float:
        """Return what the base rates are multiplied by once `step` updates were made."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.shape(step)

    def __call__(self, step: int) -> float:
        """Return the learning rate once `step` updates were made."""
        return self.base * self.factor(step)


def constant(step: int) -> float:
    """Keep the base rate."""
    return 1.0


def steps_down(boundaries: tuple[int, ...], decay_factor: float) -> Shape:
    """Multiply the base rate by `decay_factor` once for each boundary that the step has reached."""
    return lambda step: decay_factor ** sum(step >= boundary for boundary in boundaries)


def polynomial(first: int, last: int, power: float = 1.0, end: float = 0.0) -> Shape:
    """Fall from base to base * end as (1 - t)^power, t the share made of the steps from first to last.

    From `last` on the rate stays.
    """
    return lambda step: end + (1 - end) * (1 - _share(step, first, last)) ** power


def cosine(first: int, last: int, end: float = 0.0, cycles: int = 1) -> Shape:
    """Fall from base to base * end as half a cosine (Loshchilov and Hutter 2017), `cycles` times.

    The cycles are equally long; each begins at the base again (warm restarts). From `last` on the rate stays.
    """

    def shape(step: int) -> float:
        share = _share(step, first, last)
        in_cycle = 1.0 if share == 1 else share * cycles % 1
        return end + (1 - end) * (1 + math.cos(math.pi * in_cycle)) / 2

    return shape


def exponential(first: int, last: int, end: float) -> Shape:
    """Fall from base to base * end by the same factor at each step; from `last` on the rate stays."""
    return lambda step: end ** _share(step, first, last)


def custom(function: Callable[[int], float], name: str) -> Shape:
    """Multiply the base rate by what a function of the user's returns for the step.

    It is to depend on the step alone. Raises OptionError, at that step, for what is no number of 0 or more,
    and for whatever the function raises.
    """
    expected = "expected a function of the count of updates made, and of total_steps if it names that"

    def shape(step: int) -> float:
        with refusing(f"the schedule {name} failed for step {step}", expected):
            factor = function(step)
        if not (is_finite_number(factor) and factor >= 0):
            raise OptionError(
                f"the schedule {name} returned {shown_value(factor)} for step {step}; expected a finite "
                "number of 0 or more, by which the learning rate is multiplied"
            )
        return float(factor)

    return shape


def _share(step: int, first: int, last: int) -> float:
    return min(1.0, max(0, step - first) / max(1, last - first))
