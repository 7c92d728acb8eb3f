"""The ``plsc`` command."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from plsc.cli import checkpoint, data, doctor, gallery, launch, run
from plsc.cli.parser import CommandParser, Group, find_command
from plsc.errors import PlscError, record_failure
from plsc.machine import on_terminal, stop_signals

COMMANDS = Group(
    "train classifiers over very many classes",
    {
        **run.COMMANDS,
        **gallery.COMMANDS,
        "launch": launch.COMMAND,
        "doctor": doctor.COMMAND,
        "data": data.GROUP,
        "checkpoint": checkpoint.GROUP,
    },
    {
        "train": ("train", "launch", "plan", "doctor", "options", "config"),
        "look": ("test", "predict"),
        "use": ("export", "serve", "index", "search", "gallery"),
        "data": ("data",),
        "checkpoints": ("checkpoint",),
    },
)
logger = logging.getLogger(__name__)
_HEAD_START_SECONDS = 1.0  # torchrun ends all ranks of a machine as soon as one has left


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # like `python script.py`: find custom modules in the working directory
    is_main = threading.current_thread() is threading.main_thread()
    ending = [one for one in stop_signals() if one != signal.SIGINT] if is_main else []
    before = {number: signal.signal(number, _exit) for number in ending}
    try:
        with on_terminal():
            return _run(sys.argv[1:] if arguments is None else arguments)
    finally:
        for number, handler in before.items():  # what `_exit` raises as Python ends would be printed
            signal.signal(number, handler or signal.SIG_DFL)


def _run(words: Sequence[str]) -> int:
    try:
        name, command, words = find_command(COMMANDS, words)
        command.run(**CommandParser(name, command).read(words))
        sys.stdout.flush()
    except PlscError as error:
        return _report(error)
    except KeyboardInterrupt:  # during training, the second one: the first one saves and stops
        logger.error("stopped immediately; checkpoints saved before are intact")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader closed the pipe, as in: plsc plan ... | head
        # Python flushes stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _report(PlscError(f"{error.filename!s:.60}... cannot be used: {error.strerror}"))
    return 0


def _report(error: PlscError) -> int:
    """Log an error that ends the command, unless another process logs it; return the exit code."""
    is_printed_by_launcher = record_failure(error)
    if isinstance(error, SystemExit):  # a run stopped by a signal has logged it already
        return error.exit_code
    if getattr(error, "is_reported", False):
        time.sleep(_HEAD_START_SECONDS)
    elif not is_printed_by_launcher:
        logger.error("%s", error)
    return error.exit_code


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """Exit on SIGTERM or SIGHUP in a way that removes temporary files."""
    sys.exit(128 + number)
