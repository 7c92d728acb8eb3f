"""The numbers and flags that a margin takes, checked; errors name the margin and its option."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

from plsc.config.option import Check
from plsc.errors import OptionError


def below_two(value: float) -> str | None:
    """The value is in [0, 2)."""
    return None if 0 <= value < 2 else "at least 0 and below 2"


def read_number(margin: str, option: str, value: Any, check: Check) -> float:
    """Return the option as a float, or raise OptionError."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    expected = check(value) if is_number and math.isfinite(value) else "a finite number"
    if expected is not None:
        raise OptionError(f"{option} of {margin} is {value!r}; expected {expected}")
    return float(value)


def read_numbers(
    margin: str, option: str, value: Any, checks: Sequence[Check]
) -> tuple[float, ...]:
    """Return the option, a list or tuple, as floats, one for each check; or raise OptionError."""
    if not isinstance(value, list | tuple) or len(value) != len(checks):
        raise OptionError(f"{option} of {margin} is {value!r}; expected {len(checks)} numbers")
    each = enumerate(zip(value, checks, strict=True))
    return tuple(read_number(margin, f"{option}[{i}]", one, check) for i, (one, check) in each)


def read_flag(margin: str, option: str, value: Any) -> bool:
    """Return the option if it is a bool, or raise OptionError."""
    if not isinstance(value, bool):
        raise OptionError(f"{option} of {margin} is {value!r}; expected True or False")
    return value
