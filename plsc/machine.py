"""This machine as a process sees it: terminal, signals, CPU cores, memory, a background thread."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from plsc.errors import in_terminal

logger = logging.getLogger("plsc")
_SECONDS_BETWEEN = 5.0  # lines of a Counter


def stop_signals(*more: signal.Signals) -> list[signal.Signals]:
    """Return those of SIGHUP, SIGINT, SIGTERM and more that are not ignored, as some are under nohup."""
    signals = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, *more)
    return [one for one in signals if signal.getsignal(one) is not signal.SIG_IGN]


class Terminal(logging.Handler):
    """Prints INFO messages on stdout, others on stderr with their level; keeps a progress bar intact."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message; without a terminal any more, as after SIGHUP, the process continues."""
        text = in_terminal(self.format(record))
        stream = sys.stdout
        if record.levelno >= logging.WARNING:
            stream, text = sys.stderr, f"plsc: {record.levelname.lower()}: {text}"
        with contextlib.suppress(OSError):
            if sys.stderr.isatty():  # a progress bar may be active
                from tqdm import tqdm

                tqdm.write(text, stream)
            else:
                print(text, file=stream, flush=True)


class Counter:
    """Logs every five seconds how much of a long task is done: ``embedded 1,234 of 5,000 images, 410/s``.

    done: such as ``embedded``. unit: what is counted; counts of ``MB`` are in bytes. total: None if unknown.
    """

    def __init__(self, done: str, total: int | None, unit: str = "images") -> None:
        self._done, self._unit, self._scale = done, unit, 10**6 if unit == "MB" else 1
        self._of = "" if total is None else f" of {total / self._scale:,.0f}"
        self._count, self._began = 0, time.monotonic()
        self._logged = self._began

    def add(self, count: int = 1) -> None:
        """Count more; may be called by several threads, which may cost an estimate of the rate."""
        self._count += count
        if (now := time.monotonic()) - self._logged >= _SECONDS_BETWEEN:
            self.log(now)

    def log(self, now: float | None = None) -> None:
        """Log now, as at the end of a task that is worth a line."""
        self._logged = time.monotonic() if now is None else now
        done = self._count / self._scale
        rate = done / max(1e-3, self._logged - self._began)
        logger.info(f"{self._done} {done:,.0f}{self._of} {self._unit}, {rate:,.0f}/s")


@contextlib.contextmanager
def on_terminal() -> Iterator[None]:
    """Print the messages logged in the block, unless the script has configured logging.

    A root logger with a handler but the default level WARNING does not count as configured: notebooks start
    with one.
    """
    terminal, level = Terminal(), logger.level
    if not logger.hasHandlers() or not (level or logger.isEnabledFor(logging.INFO)):
        logger.addHandler(terminal)
        logger.setLevel(level or logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(terminal)
        logger.setLevel(level)


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
