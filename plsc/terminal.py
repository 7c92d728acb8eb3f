"""Messages on the terminal, and the signals that end a process."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator

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
