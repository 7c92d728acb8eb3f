"""Resources of this machine: CPU cores, memory, and a background thread."""

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
    """Return the number of cores that this process may use, considering container limits; at least 1."""
    # macOS and Windows have no sched_getaffinity.
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _cpu_quota()
    return max(1, min(affinity or 1, round(quota) if quota else 2**20))


def _cpu_quota() -> float | None:
    """Return the CPU limit of the container in cores; None: no limit is known."""
    try:
        limit, period = (_CONTROL_GROUP / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


_MEMINFO = Path("/proc/meminfo")


def available_memory() -> int | None:
    """Return the bytes of memory that are available, considering container limits; None if unknown."""
    known = [value for value in (_machine_memory(), _container_memory()) if value is not None]
    return min(known) if known else None


def _machine_memory() -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _container_memory() -> int | None:
    try:
        limit = (_CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        cache = re.search(r"^inactive_file (\d+)", (_CONTROL_GROUP / "memory.stat").read_text(), re.MULTILINE)
        return None if limit == "max" else int(limit) - used + (int(cache[1]) if cache else 0)
    except (OSError, ValueError):
        return None


T = TypeVar("T")
_JOIN_SECONDS = 2.0


class BackgroundThread:
    """A single background thread that runs actions in order.

    It cannot keep the process alive for more than `_JOIN_SECONDS`, because it may hang in a collective.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._work = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Run an action after those submitted before; the future has its result or exception."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
            self._thread.start()
            atexit.register(self._join)
        future: Future[T] = Future()
        self._work.put((action, future))
        return future

    def close(self) -> None:
        """End the thread after all submitted actions."""
        self._work.put(None)

    def _join(self) -> None:
        """End the thread before the interpreter exits, which aborts if a thread is inside a collective."""
        self.close()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            action, future = item
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)
            del item, action, future  # they may reference a snapshot as large as the model
