"""Numbers and lines as a plan prints them."""

from __future__ import annotations

from collections.abc import Mapping


def line(name: str, size: int) -> str:
    """Return a line of a table: a name, bytes in short and in full."""
    return f"  {name:<44}{human(size):>18}{size:>26,}"


def table(title: str, sizes: Mapping[str, int], *more: str) -> list[str]:
    """Return a table of bytes with its sum, and the lines that follow it."""
    rows = [line(name, size) for name, size in sizes.items()]
    return [title, *rows, line("together", sum(sizes.values())), *more]


def human(size: float) -> str:
    """Return bytes in the unit in which they are a short number."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.2f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"


def count(number: int, noun: str, ending: str = "s") -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"
