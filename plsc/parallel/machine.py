"""What a rank has of its machine: cores, memory, and a thread in the background."""

from __future__ import annotations

import atexit
import os
import queue
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the cores that this process may run on, the limit of a container included; at least 1."""
    # Not everywhere: macOS and Windows bind no process to cores.
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _quota()
    return max(1, min(bound or 1, round(quota) if quota else 2**20))


def _quota() -> float | None:
    """Return the cores' worth of time that a container may take, None: no limit is known."""
    try:
        limit, period = (_CONTROL_GROUP / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


_MEMINFO = Path("/proc/meminfo")


def available_memory() -> int | None:
    """Return the bytes that can be taken without harm, the limit of a container included; None if unknown."""
    known = [value for value in (_of_machine(), _of_container()) if value is not None]
    return min(known) if known else None


def _of_machine() -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _of_container() -> int | None:
    try:
        limit = (_CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        cache = re.search(r"^inactive_file (\d+)", (_CONTROL_GROUP / "memory.stat").read_text(), re.MULTILINE)
        return None if limit == "max" else int(limit) - used + (int(cache[1]) if cache else 0)
    except (OSError, ValueError):
        return None


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
