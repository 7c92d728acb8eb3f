"""Run an action on every rank and raise the same error everywhere; find the ranks that share a disk."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from plsc.errors import CheckpointError, DistributedError, PlscError, kind_and_line
from plsc.parallel.world import World

T = TypeVar("T")


def on_every_rank(world: World, doing: str, action: Callable[[], T], advice: str = "") -> list[T]:
    """Run ``action`` on every rank and return all results, in rank order. Collective.

    Args:
        doing: for the message, as in "rank 1: could not save /a/b: No space left on device".
        advice: appended to the message.

    Raises:
        CheckpointError: on all ranks, if the action failed on any: the reason of the first failing rank, and
            how many others failed.
        DistributedError: the connection to another rank was lost.
    """
    result: T | None = None
    failure: str | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure, cause = _reason(doing, error), error
    try:
        outcomes = world.all_gather_object((failure, result))
    except RuntimeError as error:
        raise DistributedError(f"lost the connection to another rank: {_reason(doing, error)}") from error
    failures = {rank: outcome[0] for rank, outcome in enumerate(outcomes) if outcome[0]}
    if not failures:
        return [outcome[1] for outcome in outcomes]
    rank, reason = min(failures.items())
    if len(failures) < world.size or len(set(failures.values())) > 1:
        more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        reason = f"rank {rank}{more}: {reason}"
    raise CheckpointError(f"{reason}; {advice}" if advice else reason) from cause


def own_result(world: World, doing: str, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank and return this rank's own result; otherwise as `on_every_rank`."""
    results: list[T] = []
    on_every_rank(world, doing, lambda: results.append(action()))
    return results[0]


def on_main_rank(world: World, doing: str, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and return its result on every rank; otherwise as `on_every_rank`."""
    results: list[Any] = on_every_rank(world, doing, lambda: action() if world.is_main else None)
    return results[0]


def rank_on_shared_disk(folder: Path, world: World) -> tuple[int, int]:
    """Return this rank's index among the ranks that see the same `folder`, and their number. Collective.

    Creates the folder. Raises CheckpointError, on all ranks, if a rank cannot write there.
    """
    doing = f"write to {folder}"
    mark = f".rank-{secrets.token_hex(8)}"

    def leave() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / mark).touch()
        return mark

    marks = on_every_rank(world, doing, leave, "check the permissions, or choose another folder")

    def look() -> list[int]:
        return [rank for rank, one in enumerate(marks) if (folder / one).exists()]

    mine = own_result(world, doing, look)
    on_every_rank(world, doing, (folder / mark).unlink)
    return mine.index(world.rank), len(mine)


def _reason(doing: str, error: Exception) -> str:
    """Return an error message; those of PlscError are already complete."""
    if isinstance(error, PlscError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"could not {doing}: {error.strerror}{where}"
    return f"could not {doing}: {kind_and_line(error)}"
