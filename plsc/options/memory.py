"""The options of training in less memory."""

from __future__ import annotations

from dataclasses import dataclass

from plsc.option import at_least, declare


def _names(text: str) -> str | None:
    good = any(part.strip() for part in text.split(","))
    return None if good else "none, all, or patterns of module names, divided by commas"


@dataclass(frozen=True)
class MemoryOptions:
    """Less memory for more computation."""

    checkpoint_stages: str = declare(
        "none",
        "parts of the network whose inner results are computed again in the backward pass, not kept "
        "(activation checkpointing): none, all (its blocks), or patterns of module names such as "
        "'stages.0,stages.1.*'",
        "set_checkpoint_stages(names)",
        _names,
    )
    checkpoint_every: int = declare(
        1, "of those parts, in the network's order, each nth alone", "set_checkpoint_every(num)",
        at_least(1),
    )  # fmt: skip
