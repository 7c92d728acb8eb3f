"""A thread beside the training loop that does one thing after another."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


_LEAVE_SECONDS = 2.0


class Background:
    """One thread, which keeps no process alive for long: it may hang when a peer has gone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._work = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Have an action done after those before it; its outcome is the future's."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
            self._thread.start()
            atexit.register(self._leave)
        future: Future[T] = Future()
        self._work.put((action, future))
        return future

    def close(self) -> None:
        """Let the thread end when all is done."""
        self._work.put(None)

    def _leave(self) -> None:
        """End the thread before the interpreter goes: one that is inside a collective then would abort it.

        The process groups are closed by now, after a failure, so that what waits in them has ended.
        """
        self.close()
        if self._thread is not None:
            self._thread.join(_LEAVE_SECONDS)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            action, future = item
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)
            del item, action, future  # a snapshot is as large as the model
