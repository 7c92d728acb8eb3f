from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.data.order import BatchPlan
from plsc.errors import DataError, OptionError

counts = st.integers(1, 60)
batches = st.integers(1, 25)


def whole_epoch(plan: BatchPlan, epoch: int) -> list[int]:
    parts = [
        plan.indices(epoch, step, rank) for step in range(plan.steps_per_epoch) for rank in range(plan.ranks)
    ]
    return np.concatenate(parts).tolist()


@given(counts, batches, st.integers(1, 5), st.integers(-5, 2**70), st.integers(0, 3))
def test_pad_reads_each_sample_once_and_then_repeats_the_start_of_the_epoch(count, batch, ranks, seed, epoch):
    plan = BatchPlan(count, batch, ranks, seed, "pad")
    read = whole_epoch(plan, epoch)
    order = read[:count]
    assert sorted(order) == list(range(count))
    assert len(read) == plan.steps_per_epoch * batch
    assert len(read) - count < batch
    assert read == [order[position % count] for position in range(len(read))]


@given(counts, batches, st.integers(1, 5))
def test_drop_reads_only_full_batches(count, batch, ranks):
    if count < batch:
        with pytest.raises(DataError, match="no step"):
            BatchPlan(count, batch, ranks, 3, "drop")
        return
    read = whole_epoch(BatchPlan(count, batch, ranks, 3, "drop"), 0)
    assert len(read) == count // batch * batch
    assert len(set(read)) == len(read)


@given(counts, batches, st.integers(1, 5), st.sampled_from(["pad", "keep"]))
def test_the_parts_of_the_ranks_differ_by_at_most_one(count, batch, ranks, last_batch):
    plan = BatchPlan(count, batch, ranks, 7, last_batch)
    for step in range(plan.steps_per_epoch):
        sizes = [len(plan.indices(0, step, rank)) for rank in range(ranks)]
        assert max(sizes) - min(sizes) <= 1


def test_the_order_of_a_seed_never_changes():
    # A run that resumes with a newer numpy must continue in the same order.
    plan = BatchPlan(8, 8, 1, 1)
    assert plan.global_indices(0, 0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]
    for other, epoch in ((plan, 1), (BatchPlan(8, 8, 1, 2), 0)):
        assert (other.global_indices(epoch, 0) != plan.global_indices(0, 0)).any()
    blocks = BatchPlan(12, 12, 1, 1, "pad", "block", 3, 6)
    assert blocks.global_indices(0, 0).tolist() == [5, 10, 9, 11, 3, 4, 8, 1, 2, 7, 0, 6]
    assert whole_epoch(BatchPlan(5, 2, 2, 1, "keep", "sequential"), 4) == [0, 1, 2, 3, 4]


def test_only_the_current_epoch_s_order_is_held():
    plan = BatchPlan(100_000, 1000, 1, 1)
    tracemalloc.start()
    for epoch in range(5):
        plan.global_indices(epoch, 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2 * 8 * 100_000


ORDERS = ["global", "block", "sequential"]


@given(counts, batches, st.sampled_from(ORDERS), st.integers(1, 9), st.integers(0, 30), st.integers(0, 2))
def test_every_order_reads_each_sample_once_on_any_number_of_ranks(count, batch, order, block, more, epoch):
    whole = [
        whole_epoch(BatchPlan(count, batch, ranks, 3, "keep", order, block, block + more), epoch)
        for ranks in (1, 2, 3, 5)
    ]
    assert sorted(whole[0]) == list(range(count))
    assert all(other == whole[0] for other in whole)


@given(counts, batches, st.sampled_from(ORDERS), st.integers(1, 9), st.data())
def test_an_epoch_resumed_on_other_ranks_reads_the_remaining_samples(count, batch, order, block, data):
    def plan(ranks):
        return BatchPlan(count, batch, ranks, 3, "pad", order, block, 2 * block)

    first, second = plan(data.draw(st.integers(1, 5))), plan(data.draw(st.integers(1, 5)))
    step = data.draw(st.integers(0, first.steps_per_epoch))
    steps = [(first, s) for s in range(step)] + [(second, s) for s in range(step, first.steps_per_epoch)]
    read = [p.indices(1, s, rank) for p, s in steps for rank in range(p.ranks)]
    assert np.concatenate(read).tolist() == whole_epoch(plan(1), 1)


def test_the_block_order_shuffles_blocks_and_is_local_within_a_pool():
    count, block, pool = 10_000, 50, 500
    plan = BatchPlan(count, count, 1, 9, "pad", "block", block, pool)
    order = plan.global_indices(2, 0)
    for first in range(0, count, pool):
        assert len(np.unique(order[first : first + pool] // block)) == pool // block
    steps = np.abs(np.diff(order))
    assert np.median(steps) > 1000  # consecutive samples of the order are far apart
    assert (plan.global_indices(3, 0) != order).mean() > 0.9


def test_the_block_order_does_not_depend_on_how_it_is_queried():
    plan = BatchPlan(500, 7, 1, 4, "keep", "block", 8, 40)
    forward = [plan.global_indices(0, step).tolist() for step in range(plan.steps_per_epoch)]
    plan.global_indices(1, 0)
    backward = [plan.global_indices(0, step).tolist() for step in reversed(range(plan.steps_per_epoch))]
    assert forward == backward[::-1]


def test_the_block_order_holds_one_pool_and_not_the_epoch():
    plan = BatchPlan(10**9, 1000, 1, 1, "pad", "block", 10**5, 10**5)
    tracemalloc.start()
    plan.global_indices(0, 0)
    plan.global_indices(0, plan.steps_per_epoch // 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * 2**20


@pytest.mark.parametrize(("block", "pool"), [(0, 5), (8, 7)])
def test_a_pool_smaller_than_a_block_is_refused(block, pool):
    with pytest.raises(OptionError, match="pool_samples"):
        BatchPlan(9, 3, 1, 0, "pad", "block", block, pool)
