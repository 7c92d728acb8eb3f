"""What a run says when its steps wait for data."""

import re

import pytest

from plsc import machine
from plsc.train.watch import DataWait


def said(wait, step, workers=1, is_generator=False, steps=60):
    waits = DataWait(workers, is_generator, cores=8)
    return [line for n in range(1, steps + 1) if (line := waits.add(n, wait, step))]


def test_as_many_workers_as_read_a_batch_while_one_is_computed():
    (line,) = said(0.020, 0.030)
    assert "waits 20 ms (67%) for its batch, with 1 worker" in line
    assert line.endswith("; try data.num_workers 4")  # 30 / 10 and a tenth more
    (line,) = said(0.005, 0.030, workers=0)
    assert line.endswith("try data.num_workers 1")
    (line,) = said(0.029, 0.030)
    assert line.endswith("try data.num_workers 8")  # 33 would be asked for


def test_nothing_is_said_of_a_wait_below_a_twentieth_or_of_a_few_steps():
    assert said(0.0014, 0.030) == []
    assert said(0.020, 0.030, steps=44) == []


@pytest.mark.parametrize(
    ("workers", "is_generator", "noun"),
    [(8, False, "every core"), (1, True, "one process")],
)
def test_what_helps_depends_on_workers_and_reader(workers, is_generator, noun):
    (line,) = said(0.020, 0.030, workers, is_generator)
    assert re.search(noun, line)


def test_the_first_steps_of_an_epoch_do_not_count():
    waits = DataWait(1, False, cores=8)
    assert not any(waits.add(step, 1.0, 1.0) for _ in range(100) for step in range(1, 6))


@pytest.mark.parametrize(
    ("text", "expected"), [("150000 100000", 2), ("10000 100000", 1), ("max 100000", 7), ("?", 7)]
)
def test_a_container_s_quota_counts(monkeypatch, tmp_path, text, expected):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(machine, "_CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(7)))
    assert machine.usable_cores() == expected
