import contextlib
import fcntl
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
import time

import pytest

from plsc import machine
from plsc.machine import Counter, on_terminal
from tests.images import write_dataset
from tests.system.small_entry import entry

LOGGER = logging.getLogger("plsc.some.module")


def test_messages_go_to_the_terminal_by_their_level_and_without_secrets(capsys):
    with on_terminal(), on_terminal():
        LOGGER.info("epoch 0 of s3://me:SECRET@bucket/run")
        LOGGER.warning("the loss increases")
        LOGGER.debug("nothing")
    printed = capsys.readouterr()
    assert printed.out == "epoch 0 of s3://bucket/run\n"
    assert printed.err == "plsc: warning: the loss increases\n"
    LOGGER.info("the handler and the level are gone")
    assert not any(capsys.readouterr())


def test_a_root_handler_that_shows_warnings_alone_is_no_configuration(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    with on_terminal():
        LOGGER.info("hello")
    assert capsys.readouterr().out == "hello\n"


def test_where_the_user_has_configured_logging_the_terminal_is_left_to_him(messages, capsys):
    with on_terminal():
        LOGGER.info("hello")
    assert (messages, *capsys.readouterr()) == (["hello"], "", "")


def test_a_long_task_logs_how_far_it_is_every_five_seconds(monkeypatch, messages):
    ticks = iter([0, 2, 5, 7, 12])
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    counter = Counter("read", 50_000_000, "MB")
    for _ in range(4):
        counter.add(10_000_000)
    assert messages == ["read 20 of 50 MB, 4/s", "read 40 of 50 MB, 3/s"]


def test_a_terminal_shows_a_progress_bar(tmp_path, monkeypatch):
    dataset = write_dataset(tmp_path / "faces", classes=3, per_class=8)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 150, 0, 0))
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux: no other process has the terminal open
            while piece := os.read(ours, 4096):
                shown.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        entry(dataset, tmp_path / "run", set_train_batch_size=4).train()
    reader.join()
    os.close(ours)
    assert re.search(rb"epoch 1/1 100%\|.*\| step 6/6 .*loss \d+\.\d+", shown)


@pytest.mark.parametrize(("text", "expected"), [("150000 100000", 2), ("10000 100000", 1), ("max 100000", 7)])
def test_a_container_s_quota_counts(monkeypatch, text, expected):
    monkeypatch.setattr(machine.Path, "read_text", lambda path: text)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(7)))
    assert machine.usable_cores() == expected
