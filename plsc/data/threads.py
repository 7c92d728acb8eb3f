"""Work that threads do ahead, in order and within bounds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")

AHEAD_PER_THREAD = 2
THREAD_NAME = "plsc-data"


class Stopped(Exception):
    """The consumer has gone; nobody wants the result."""


def in_order(
    work: Callable[[Request, Callable[[], bool]], Result],
    requests: Iterable[Request],
    threads: int,
) -> Generator[Result, None, None]:
    """Yield ``work(request, stopped)`` of each request, in order, computed ahead by ``threads`` threads.

    Twice as many results as threads are made ahead, at most; requests are taken in the caller's thread.
    What work raises comes out where its result would. When the iterator is closed or fails, what waits
    is dropped, and the threads have ended before it returns: work asks ``stopped()`` now and then and
    raises Stopped. With 0 threads the caller's does the work.
    """
    stop = threading.Event()
    if threads == 0:
        for request in requests:
            yield work(request, stop.is_set)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix=THREAD_NAME)
    waiting: deque[Future[Result]] = deque()
    coming = iter(requests)

    def ask(count: int) -> None:
        for request in islice(coming, count):
            waiting.append(pool.submit(work, request, stop.is_set))

    def take() -> Result:  # a function, so that no variable of the generator holds a batch
        future = waiting.popleft()
        ask(1)
        return future.result()

    try:
        ask(AHEAD_PER_THREAD * threads)
        while waiting:
            yield take()
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
