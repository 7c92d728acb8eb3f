"""The terminal as a handler of Python's logging: what it prints of the messages of the logger ``plsc``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plsc.errors import shown

logger = logging.getLogger("plsc")


class Terminal(logging.Handler):
    """Prints INFO on stdout as it is, WARNING and above on stderr by its level; above a progress bar.

    wording: changes each text first, as the command does, which speaks of flags and not of setters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wording: Callable[[str], str] = str

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        text = self.wording(shown(self.format(record)))
        stream = sys.stdout
        if record.levelno >= logging.WARNING:
            stream, text = sys.stderr, f"plsc: {record.levelname.lower()}: {text}"
        if sys.stderr.isatty():  # there may be a progress bar
            from tqdm import tqdm

            tqdm.write(text, stream)
        else:
            print(text, file=stream, flush=True)


@contextmanager
def on_terminal() -> Iterator[Terminal]:
    """Print the messages of the block, unless logging is configured for them.

    A root logger with a handler, but at its first level, WARNING, is not: notebooks begin with one.
    """
    terminal, level = Terminal(), logger.level
    if logger.hasHandlers() and (level or logger.isEnabledFor(logging.INFO)):
        yield terminal
        return
    logger.addHandler(terminal)
    logger.setLevel(level or logging.INFO)
    try:
        yield terminal
    finally:
        logger.removeHandler(terminal)
        logger.setLevel(level)
