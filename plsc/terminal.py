"""Messages on the terminal, and the signals that end a process."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator

from plsc.errors import in_terminal

logger = logging.getLogger("plsc")


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
