"""Collect requests into batches, which one thread runs in turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Busy(Exception):
    """The queue is full, or a request has waited for too long."""


class Batcher(Generic[Item, Result]):
    """Call a function on batches of the items that are submitted to an event loop.

    A batch starts when the previous one has finished. If that one had several items, the next one first waits
    for as many, for at most `wait` seconds: a single client is not delayed.

    Args:
        run: is called in a thread with up to `largest` items; returns a result, or an exception, per item.
        largest: items per batch.
        queue: most items waiting; `submit` raises Busy for further ones.
        wait: seconds to wait for more items.
        timeout: seconds after which a waiting item gets Busy instead of a result.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Sequence[Result | Exception]],
        largest: int,
        queue: int,
        timeout: float,
        wait: float = 0.0,
    ) -> None:
        self._run = run
        self._largest = largest
        self._queue = queue
        self._timeout = timeout
        self._wait = wait
        self._waiting: deque[tuple[Item, asyncio.Future[Result], float]] = deque()
        self._thread = ThreadPoolExecutor(1)
        self._timer: asyncio.TimerHandle | None = None
        self._is_running = False
        self._last = 0  # size of the last batch

    def __len__(self) -> int:
        """Return the number of items waiting."""
        return len(self._waiting)

    async def submit(self, item: Item) -> Result:
        """Return the result for an item. Raises Busy, or the exception that `run` returned or raised."""
        if len(self._waiting) >= self._queue:
            raise Busy(f"{self._queue} requests are waiting")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((item, future, loop.time() + self._timeout))
        self._start_or_wait()
        return await future

    def close(self) -> None:
        """Stop the thread after its batch."""
        self._thread.shutdown()

    def _start_or_wait(self) -> None:
        if self._is_running or not self._waiting:
            return
        if not self._wait or len(self._waiting) >= min(self._last, self._largest):
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._wait, self._start)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        items: list[Item] = []
        futures: list[asyncio.Future[Result]] = []
        while self._waiting and len(items) < self._largest:
            item, future, deadline = self._waiting.popleft()
            if deadline < now:
                _resolve(future, Busy(f"the request has waited for {self._timeout:g} seconds"))
            elif not future.done():  # otherwise its task was cancelled
                items.append(item)
                futures.append(future)
        if not items:
            return
        self._is_running, self._last = True, len(items)

        def finish(results: Sequence[Result | Exception]) -> None:
            self._is_running = False
            for future, result in zip(futures, results, strict=True):
                _resolve(future, result)
            self._start_or_wait()

        def work() -> None:
            try:
                results = self._run(items)
            except Exception as error:
                results = [error] * len(items)
            loop.call_soon_threadsafe(finish, results)

        self._thread.submit(work)


def _resolve(future: asyncio.Future[Result], result: Result | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
