"""What a run says of num_workers: from what was measured, within what the cores can do."""

import dataclasses

import pytest

from plsc.options.data import DataOptions
from plsc.parallel import machine
from plsc.train.advice import Reading, advise

# 8 cores, one rank with one thread: 10 ms of computing wait for a batch that takes 30.
STARVING = Reading(
    host="a", cores=8, workers=1, kind="threads", wait=0.020, step=0.030, read=0.030, read_cpu=0.029,
    cpu=0.039,
)  # fmt: skip


def advice(*readings, **data):
    return advise(readings or [STARVING], dataclasses.replace(DataOptions(), **data))


def with_(**changes):
    return dataclasses.replace(STARVING, **changes)


def test_as_many_workers_as_read_a_batch_while_one_is_computed():
    said = advice()
    assert said.endswith("; try set_num_workers(4)")  # 30 / 10 and a tenth more
    assert "waits 20 of its 30 ms" in said
    assert "8 cores for 1 rank here, 1 worker a rank" in said


@pytest.mark.parametrize("wait", [0.0, 0.0014])
def test_nothing_is_said_of_a_wait_below_a_twentieth(wait):
    assert advice(with_(wait=wait)) is None


def test_the_rank_that_waits_most_counts_and_the_cores_of_its_machine_are_shared():
    calm = with_(wait=0.0)
    slow = with_(read=0.090, read_cpu=0.088)
    beside = [calm, slow, *[with_(host="b")] * 4]
    assert "8 cores for 2 ranks here" in advice(*beside)
    assert advice(*beside).endswith(
        "try set_num_workers(4)"
    )  # 10 would be asked for, 8 / 2 there are


def test_a_run_without_workers_is_told_to_read_ahead():
    assert advice(with_(workers=0, wait=0.005, step=0.030, read=0.005, read_cpu=0.005)).endswith(
        "try set_num_workers(1)"
    )


def test_busy_cores_are_not_given_more_workers_but_less_work():
    busy = with_(cores=2, workers=2, cpu=0.058)
    said = advice(busy)
    assert "the cores are busy, so more workers would not help" in said
    assert "try" not in said
    assert "set_cache('memory') with set_cache_decoded(True)" in said
    assert "set_cache('memory')" not in advice(busy, cache="memory")
    assert "a cheaper transform" in advice(dataclasses.replace(busy, kind="processes"))


def test_workers_that_wait_for_storage_may_be_more_than_the_cores_up_to_a_bound():
    waiting = with_(cores=2, workers=2, read=0.060, read_cpu=0.010, cpu=0.020)
    assert advice(waiting).endswith("try set_num_workers(7)")
    enough = dataclasses.replace(waiting, workers=8)
    assert "set_order('block')" in advice(enough)
    assert "set_order" not in advice(enough, order="block")


def test_a_worker_for_each_core_is_as_many_as_are_proposed():
    said = advice(with_(cores=2, workers=2, cpu=0.030))
    assert "there is a worker for each core already" in said


def test_a_generator_is_told_what_helps_a_generator():
    reader = with_(kind="reader", workers=0)
    assert "set_num_workers(1) lets the reader run ahead" in advice(reader)
    ahead = dataclasses.replace(reader, workers=1)
    assert "set_reader_shards_itself(True), or a map-style Dataset" in advice(ahead)
    sharded = dataclasses.replace(ahead, kind="sharded reader")
    assert "set_reader_shards_itself" not in advice(sharded)


@pytest.mark.parametrize(
    ("text", "expected"), [("150000 100000", 2), ("10000 100000", 1), ("max 100000", 7), ("?", 7)]
)
def test_a_container_s_quota_counts(monkeypatch, tmp_path, text, expected):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(machine, "_CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(7)))
    assert machine.usable_cores() == expected
