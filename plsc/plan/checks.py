"""The arguments of a plan, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plsc.errors import OptionError
from plsc.option import is_finite_number, shown_value


def whole(name: str, value: float, low: int) -> int:
    """Return a number that may be a whole float, such as 1e8, as an int; OptionError if it is not."""
    if not is_finite_number(value) or value != int(value) or value < low:
        raise OptionError(f"{name} is {shown_value(value)}; expected a whole number, {low} or more")
    return int(value)


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    """Return the value if it is a known one; OptionError if not."""
    if not isinstance(value, str) or value not in known:
        raise OptionError(f"{name} is {shown_value(value)}; expected one of {', '.join(known)}")
    return value


def above_zero(name: str, value: float | None) -> float | None:
    """Return a rate, or None; OptionError if it is not a finite number above 0."""
    if value is not None and not (is_finite_number(value) and value > 0):
        raise OptionError(f"{name} is {shown_value(value)}; expected a number above 0")
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
