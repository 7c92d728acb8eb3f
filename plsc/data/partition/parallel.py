"""Threads for work that is reading, writing and large arrays, all of which let other threads run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def pool_of(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that, when the block fails, begins nothing more and waits for what has begun."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="partition")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def map_in_order(
    workers: int, function: Callable[[Item], Result], items: Iterable[Item]
) -> list[Result]:
    """Return the results in the order of the items; the first error stops the rest."""
    with pool_of(workers) as pool:
        futures = [pool.submit(function, item) for item in items]
        return [future.result() for future in futures]


class Turns:
    """Lets threads pass a place in the order of their numbers, from 0."""

    def __init__(self) -> None:
        self._next = 0
        self._is_broken = False
        self._condition = threading.Condition()

    @contextmanager
    def take(self, number: int) -> Iterator[None]:
        """Wait for the turn, do the block, let the next one in."""
        with self._condition:
            self._condition.wait_for(lambda: self._next == number or self._is_broken)
            if self._is_broken:
                raise BrokenTurn
            yield
            self._next += 1
            self._condition.notify_all()

    def give_up(self) -> None:
        """Let nobody wait any more: a turn will not be taken."""
        with self._condition:
            self._is_broken = True
            self._condition.notify_all()


class BrokenTurn(Exception):
    """Another thread failed; its error tells why."""
