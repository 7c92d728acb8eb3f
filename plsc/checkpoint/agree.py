"""One failure on any rank is the same error on all ranks, so that none waits for another.

And: which ranks share a disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint import CheckpointException

from plsc.errors import CheckpointError, DistributedError, PlscError, kind_and_line
from plsc.parallel.world import World

T = TypeVar("T")


def on_every_rank(world: World, doing: str, action: Callable[[], T], advice: str = "") -> list[T]:
    """Run ``action`` on every rank and return all results, in rank order. Collective.

    doing: for the message, as in "rank 1: could not save /a/b: No space left on device". advice: ends it.

    Raises:
        CheckpointError: on all ranks alike, if any rank's action failed.
        DistributedError: another rank was lost.
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
        raise _lost(doing, error) from error
    failures = {rank: outcome[0] for rank, outcome in enumerate(outcomes) if outcome[0]}
    if failures:
        raise _failed(world, failures, advice) from cause
    return [outcome[1] for outcome in outcomes]


def together(world: World, doing: str, action: Callable[[], T], advice: str = "") -> T:
    """Run an ``action`` of torch.distributed.checkpoint, which is collective itself.

    Raises:
        CheckpointError, DistributedError: as `on_every_rank`.
    """
    try:
        return action()
    except CheckpointException as error:
        failures = {rank: _reason(doing, wrapped[0]) for rank, wrapped in error.failures.items()}
        raise _failed(world, failures, advice) from error
    except RuntimeError as error:
        if world.size == 1:
            raise _failed(world, {0: _reason(doing, error)}, advice) from error
        raise _lost(doing, error) from error


def neighbours(folder: Path, world: World) -> tuple[int, int]:
    """Return this rank's place among those that see the same `folder`, and how many they are. Collective.

    The folder is made. Raises CheckpointError, on all ranks, if some rank cannot write there.
    """
    doing = f"write to {folder}"
    mark = f".rank-{secrets.token_hex(8)}"

    def leave() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / mark).touch()
        return mark

    marks = on_every_rank(world, doing, leave)

    def look() -> list[int]:
        return [rank for rank, one in enumerate(marks) if (folder / one).exists()]

    mine = on_every_rank(world, doing, look)[world.rank]
    on_every_rank(world, doing, (folder / mark).unlink)
    return mine.index(world.rank), len(mine)


def _failed(world: World, failures: dict[int, str], advice: str) -> CheckpointError:
    """Return the error that all ranks raise: the first failing rank, and how many others failed."""
    rank, reason = min(failures.items())
    if len(failures) < world.size or len(set(failures.values())) > 1:
        more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        reason = f"rank {rank}{more}: {reason}"
    return CheckpointError(f"{reason}; {advice}" if advice else reason)


def _lost(doing: str, error: BaseException) -> DistributedError:
    return DistributedError(f"another rank was lost: {_reason(doing, error)}")


def _reason(doing: str, error: BaseException) -> str:
    """Return one line; errors of our own are complete already."""
    if isinstance(error, PlscError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"could not {doing}: {error.strerror}{where}"
    first_line = kind_and_line(error)
    return f"could not {doing}: {first_line}"
