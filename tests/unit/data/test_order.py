import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data.order import BalancedPlan, BatchPlan, ClassesPlan, shuffled, splitmix64_of
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
    sizes = [len(plan.indices(epoch, 0, rank)) for rank in range(ranks)]
    assert max(sizes) - min(sizes) <= 1
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


def test_the_order_of_a_seed_never_changes():
    # A run that resumes with a newer numpy must continue in the same order.
    plan = BatchPlan(8, 8, 1, 1)
    assert plan.global_indices(0, 0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]
    for other, epoch in ((plan, 1), (BatchPlan(8, 8, 1, 2), 0)):
        assert (other.global_indices(epoch, 0) != plan.global_indices(0, 0)).any()
    blocks = BatchPlan(12, 12, 1, 1, "pad", "block", 3, 6)
    assert blocks.global_indices(0, 0).tolist() == [5, 10, 9, 11, 3, 4, 8, 1, 2, 7, 0, 6]
    assert whole_epoch(BatchPlan(5, 2, 2, 1, "keep", "sequential"), 4) == [0, 1, 2, 3, 4]
    labels = np.array([3, 1, 1, 0, 1, 3, 1, 1])
    plan = BalancedPlan(8, 4, 1, 1, order="balanced", labels=labels, balance=0.5)
    assert plan.samples_at(1, np.arange(8)).tolist() == [3, 0, 1, 7, 6, 5, 6, 3]
    plan = ClassesPlan(8, 4, 1, 1, order="classes", labels=labels, images_per_class=2)
    assert [plan.global_indices(3, step).tolist() for step in range(2)] == [[2, 4, 0, 5], [6, 2, 3, 3]]


ORDERS = ["global", "block", "sequential"]


@given(counts, batches, st.sampled_from(ORDERS), st.integers(1, 9), st.data())
def test_an_epoch_resumed_on_other_ranks_reads_the_remaining_samples(count, batch, order, block, data):
    def plan(ranks):
        return BatchPlan(count, batch, ranks, 3, "pad", order, block, 2 * block)

    first, second = plan(data.draw(st.integers(1, 5))), plan(data.draw(st.integers(1, 5)))
    step = data.draw(st.integers(0, first.steps_per_epoch))
    steps = [(first, s) for s in range(step)] + [(second, s) for s in range(step, first.steps_per_epoch)]
    read = np.concatenate([p.indices(1, s, rank) for p, s in steps for rank in range(p.ranks)]).tolist()
    assert read == whole_epoch(plan(1), 1)
    assert sorted(read[:count]) == list(range(count))


def test_the_block_order_shuffles_blocks_and_is_local_within_a_pool():
    count, block, pool = 10_000, 50, 500
    plan = BatchPlan(count, count, 1, 9, "pad", "block", block, pool)
    order = plan.global_indices(2, 0)
    for first in range(0, count, pool):
        assert len(np.unique(order[first : first + pool] // block)) == pool // block
    steps = np.abs(np.diff(order))
    assert np.median(steps) > 1000  # consecutive samples of the order are far apart
    assert (plan.global_indices(3, 0) != order).mean() > 0.9


def test_the_block_order_holds_one_pool_and_not_the_epoch():
    plan = BatchPlan(10**9, 1000, 1, 1, "pad", "block", 10**5, 10**5)
    tracemalloc.start()
    plan.global_indices(0, 0)
    plan.global_indices(0, plan.steps_per_epoch // 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * 2**20


# Orders of samples for long-tailed classes: balanced, and P classes with K images per batch.


sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)
seeds = st.integers(0, 2**31 - 1)


def labels_of(counts):
    """Return labels with these counts, in an order that mixes the classes; class 0 has label 3."""
    labels = np.repeat(np.arange(len(counts)) + 3, counts)
    return np.random.default_rng(0).permutation(labels)


def balanced(counts, balance=0.5, batch=4, ranks=1, seed=1, **more):
    more |= {"labels": labels_of(counts), "balance": balance}
    return BalancedPlan(sum(counts), batch, ranks, seed, order="balanced", **more)


def classes(counts, per_class, batch, ranks=1, seed=1, **more):
    more |= {"labels": labels_of(counts), "images_per_class": per_class}
    return ClassesPlan(sum(counts), batch, ranks, seed, order="classes", **more)


@st.composite
def class_plans(draw):
    counts = draw(sizes)
    per_class = draw(st.integers(1, 6))
    per_batch = draw(st.integers(1, np.count_nonzero(counts)))
    return lambda ranks=1: classes(counts, per_class, per_class * per_batch, ranks)


def global_batch(plan, number):
    """Return the global batch of a step of the run, from the parts of its ranks."""
    where = divmod(number, plan.steps_per_epoch)
    return np.concatenate([plan.indices(*where, rank) for rank in range(plan.ranks)])


@given(sizes, st.floats(0, 1), seeds)
def test_a_class_has_a_share_of_the_epoch_in_proportion_to_a_power_of_its_images(counts, balance, seed):
    plan = balanced(counts, balance, seed=seed)
    present = np.array([count for count in counts if count])
    order = plan.samples_at(0, np.arange(len(plan.labels)))
    assert (np.unique(plan.labels[order], return_counts=True)[1] == plan.quotas).all()
    assert plan.quotas.sum() == sum(counts)
    assert plan.quotas.min() >= 1
    exact = present**balance / (present**balance).sum() * sum(counts)
    assert np.abs(plan.quotas - exact).max() < 1 + 1e-6


@given(sizes, st.floats(0, 1), seeds)
def test_balanced_epochs_use_the_images_of_a_class_equally_often_and_all_of_them(counts, balance, seed):
    plan = balanced(counts, balance, seed=seed)
    present = np.unique(plan.labels, return_counts=True)[1]
    epochs = int(np.ceil(present / plan.quotas).max())
    used = np.zeros(len(plan.labels), np.int64)
    for epoch in range(epochs):
        used += np.bincount(plan.samples_at(epoch, np.arange(len(used))), minlength=len(used))
        for label in np.unique(plan.labels):
            mine = used[plan.labels == label]
            assert mine.max() - mine.min() <= 1
    assert used.min() >= 1


@settings(max_examples=40)
@given(class_plans(), st.integers(0, 3))
def test_every_batch_has_different_classes_of_k_images_each(make, epoch):
    plan = make()
    for step in range(plan.steps_per_epoch):
        batch = plan.global_indices(epoch, step).reshape(-1, plan.images_per_class)
        labels = plan.labels[batch]
        assert (labels == labels[:, :1]).all()
        assert len(set(labels[:, 0])) == len(batch) == plan.global_batch // plan.images_per_class
        for images, label in zip(batch, labels[:, 0], strict=True):
            count = np.sum(plan.labels == label)
            repeats = np.unique(images, return_counts=True)[1]
            assert len(repeats) == min(count, plan.images_per_class)
            assert repeats.max() - repeats.min() <= 1


@settings(max_examples=40)
@given(class_plans(), st.integers(0, 3))
def test_every_cycle_of_batches_uses_every_image(make, cycle):
    plan = make()
    steps = np.arange(cycle * plan.cycle_steps, (cycle + 1) * plan.cycle_steps)
    batches = [plan.global_indices(*divmod(int(step), plan.steps_per_epoch)) for step in steps]
    assert set(np.concatenate(batches)) == set(range(len(plan.labels)))


def test_free_places_of_a_cycle_go_to_the_classes_with_the_fewest_groups():
    # The first class needs 10 steps of 3 classes; the groups of the others fill the 20 places that remain.
    plan = classes([40, 4, 4, 4, 12], per_class=4, batch=12)
    assert plan.cycle_steps == 10
    labels = plan.labels[np.concatenate([global_batch(plan, step) for step in range(10)])]
    assert (np.bincount(labels - 3) / 4).tolist() == [10, 5, 5, 5, 5]


@st.composite
def balanced_plans(draw):
    counts, balance, batch = draw(sizes), draw(st.floats(0, 1)), draw(st.integers(1, 9))
    return lambda ranks=1: balanced(counts, balance, batch, ranks)


@settings(max_examples=30)
@given(class_plans() | balanced_plans(), st.data())
def test_batches_depend_on_nothing_but_the_step_on_any_ranks(make, data):
    whole = [global_batch(make(), step) for step in range(12)]
    for ranks in (1, 2, 3, 4):
        plan = make(ranks)
        for step in data.draw(st.permutations(range(12)))[:4]:
            assert (global_batch(plan, step) == whole[step]).all()


@pytest.mark.parametrize(("last_batch", "steps"), [("pad", 4), ("keep", 4), ("drop", 3)])
def test_the_last_batch_and_a_limit_decide_the_number_of_steps_alone(last_batch, steps):
    for make in (lambda **more: balanced([9, 5], **more), lambda **more: classes([9, 5], 2, 4, **more)):
        assert make(last_batch=last_batch).steps_per_epoch == steps
        assert make(last_batch=last_batch, limit=2).steps_per_epoch == 2
    full = classes([9, 5], 2, 4, last_batch=last_batch)
    assert all(len(full.global_indices(0, step)) == 4 for step in range(steps))
    # Cycles continue across shorter epochs.
    limited = classes([9, 5], 2, 4, limit=2)
    batches = [global_batch(limited, step) for step in range(limited.cycle_steps)]
    assert set(np.concatenate(batches)) == set(range(14))


def test_an_image_that_occurs_twice_in_an_epoch_is_augmented_anew():
    for plan in (balanced([9, 5]), classes([9, 5], 2, 4)):
        draws = [plan.draw_epoch(epoch, step) for epoch in range(2) for step in range(plan.steps_per_epoch)]
        assert len(set(draws)) == len(draws)


def test_batches_that_are_not_whole_classes_are_refused():
    with pytest.raises(OptionError, match="images_per_class"):
        classes([9, 9, 9], 4, 10)
    with pytest.raises(DataError, match=r"4 classes .* 3"):
        classes([9, 0, 9, 9], 2, 8)
    with pytest.raises(OptionError, match="pool_samples"):
        BatchPlan(9, 3, 1, 0, "pad", "block", 8, 7)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_shuffled_places_are_uniform_permutations(count):
    runs = 40_000
    keys = splitmix64_of(np.arange(runs, dtype=np.uint64))
    found = [shuffled(np.full(runs, place), np.full(runs, count), keys) for place in range(count)]
    assert (np.sort(found, axis=0) == np.arange(count)[:, None]).all()
    for first in range(min(2, count)):
        expected, got = runs / count, np.bincount(found[first], minlength=count)
        assert ((got - expected) ** 2 / expected).sum() < 30  # chi-square of at most 7 degrees of freedom
