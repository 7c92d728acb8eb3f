"""The arguments of a plan, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plsc.config.option import is_finite_number, shown_value
from plsc.errors import OptionError
from plsc.plan.arguments import ARGUMENTS

MOST = 10**15
"""Of anything that is counted: beyond any run, and still a size that torch can write down."""
MOST_RANKS = 10**6


def whole(name: str, value: float, low: int) -> int:
    """Return a number that may be a whole float, such as 1e8, as an int; OptionError if it is not."""
    high = MOST_RANKS if name == "ranks" else MOST
    if not is_finite_number(value) or value != int(value) or not low <= value <= high:
        raise OptionError(
            f"{name} is {shown_value(value)}; expected a whole number, {low} or more, up to {high:.0e}"
        )
    return int(value)


def check_kinds(given: Mapping[str, Any]) -> None:
    """Raise OptionError for an argument of `plan` that is of another kind than `ARGUMENTS` says.

    Numbers of classes, samples and the like, and rates, are looked at where they are used.
    """
    for argument in ARGUMENTS:
        value = given.get(argument.name, argument.default)
        if value is None and argument.default is None:
            continue
        if argument.kind is str:
            expected = None if isinstance(value, str) else "a text"
        elif argument.kind is bool:
            expected = None if isinstance(value, bool) else "True or False"
        elif argument.kind is float:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            expected = None if is_number or argument.default is None else "a number"
        elif argument.name == "image":
            is_shape = isinstance(value, (int, Sequence)) and not isinstance(
                value, (bool, str, bytes)
            )
            expected = None if is_shape else "three sizes, or one side of an RGB image"
        else:
            continue
        if expected:
            raise OptionError(f"{argument.name} is {shown_value(value)}; expected {expected}")


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    """Return the value if it is a known one; OptionError if not."""
    if not isinstance(value, str) or value not in known:
        raise OptionError(f"{name} is {shown_value(value)}; expected one of {', '.join(known)}")
    return value


def batch_sizes(batch: int | Sequence[int], ranks: int) -> list[int]:
    """Return each rank's samples, from one number for all or from one for each."""
    if not isinstance(batch, Sequence):
        return [whole("batch", batch, 1)] * ranks
    sizes = [whole("batch", size, 0) for size in batch]
    if len(sizes) != ranks or sum(sizes) == 0:
        plural = "rank" if ranks == 1 else "ranks"
        raise OptionError(
            f"batch is {list(batch)}; expected one size for each of {ranks:,} {plural}, not all 0"
        )
    return sizes
