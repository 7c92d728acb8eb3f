"""Orders of samples for long-tailed classes: balanced, and P classes with K images per batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data.order import BalancedPlan, ClassesPlan, shuffled, splitmix64_of
from plsc.errors import DataError, OptionError

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
def test_balanced_epochs_use_the_images_of_a_class_equally_often_and_all_in_the_epochs_of_the_log(
    counts, balance, seed
):
    plan = balanced(counts, balance, seed=seed)
    present = np.unique(plan.labels, return_counts=True)[1]
    epochs = int(np.ceil(present / plan.quotas).max())
    assert f"within the first {epochs} whole epochs" in plan.describe()
    used = np.zeros(len(plan.labels), np.int64)
    for epoch in range(epochs):
        used += np.bincount(plan.samples_at(epoch, np.arange(len(used))), minlength=len(used))
        for label in np.unique(plan.labels):
            mine = used[plan.labels == label]
            assert mine.max() - mine.min() <= 1
    assert used.min() >= 1


def test_a_balanced_epoch_is_shuffled_and_its_images_change():
    plan = balanced([400, 100, 16, 4])
    first, second = (plan.samples_at(epoch, np.arange(520)) for epoch in (0, 1))
    runs = np.diff(plan.labels[first]) == 0
    assert 0.2 < runs.mean() < 0.6  # class after class: 0.99
    assert set(first[plan.labels[first] == 3]) != set(second[plan.labels[second] == 3])


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


@given(class_plans(), st.integers(0, 3))
def test_every_cycle_of_batches_uses_every_image(make, cycle):
    plan = make()
    assert f"per cycle of {plan.cycle_steps} steps" in plan.describe()
    steps = np.arange(cycle * plan.cycle_steps, (cycle + 1) * plan.cycle_steps)
    batches = [plan.global_indices(*divmod(int(step), plan.steps_per_epoch)) for step in steps]
    assert set(np.concatenate(batches)) == set(range(len(plan.labels)))


def test_free_places_of_a_cycle_go_to_the_classes_with_the_fewest_groups():
    # The first class needs 10 steps of 3 classes; the groups of the others fill the 20 places that remain.
    plan = classes([40, 4, 4, 4, 12], per_class=4, batch=12)
    assert plan.cycle_steps == 10
    labels = plan.labels[np.concatenate([global_batch(plan, step) for step in range(10)])]
    assert (np.bincount(labels - 3) / 4).tolist() == [10, 5, 5, 5, 5]


def test_groups_of_a_class_are_new_in_each_cycle_and_round():
    plan = classes([8, 8], per_class=4, batch=8)
    groups = set()
    for step in range(40):
        batch = plan.global_indices(*divmod(step, plan.steps_per_epoch)).reshape(2, 4)
        groups |= {frozenset(images) for images in batch.tolist()}
    assert len(groups) > 40


@st.composite
def balanced_plans(draw):
    counts, balance, batch = draw(sizes), draw(st.floats(0, 1)), draw(st.integers(1, 9))
    return lambda ranks=1: balanced(counts, balance, batch, ranks)


@settings(max_examples=60)
@given(class_plans() | balanced_plans(), st.data())
def test_batches_depend_on_nothing_but_the_step_on_any_ranks(make, data):
    whole = [global_batch(make(), step) for step in range(12)]
    for ranks in (1, 2, 3, 4):
        plan = make(ranks)
        for step in data.draw(st.permutations(range(12)))[:4]:
            assert (global_batch(plan, step) == whole[step]).all()


def test_the_orders_of_a_seed_never_change():
    # A run that resumes with a newer numpy must continue in the same order.
    labels = np.array([3, 1, 1, 0, 1, 3, 1, 1])
    plan = BalancedPlan(8, 4, 1, 1, order="balanced", labels=labels, balance=0.5)
    assert plan.samples_at(1, np.arange(8)).tolist() == [3, 0, 1, 7, 6, 5, 6, 3]
    plan = ClassesPlan(8, 4, 1, 1, order="classes", labels=labels, images_per_class=2)
    assert [plan.global_indices(3, step).tolist() for step in range(2)] == [[2, 4, 0, 5], [6, 2, 3, 3]]


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
    with pytest.raises(OptionError, match=r"size 10 is not a multiple of images_per_class, 4"):
        classes([9, 9, 9], 4, 10)
    with pytest.raises(DataError, match=r"needs 4 classes with images .* there are 3"):
        classes([9, 0, 9, 9], 2, 8)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_shuffled_places_are_uniform_permutations(count):
    runs = 40_000
    keys = splitmix64_of(np.arange(runs, dtype=np.uint64))
    found = [shuffled(np.full(runs, place), np.full(runs, count), keys) for place in range(count)]
    assert (np.sort(found, axis=0) == np.arange(count)[:, None]).all()
    for first in range(min(2, count)):
        expected, got = runs / count, np.bincount(found[first], minlength=count)
        assert ((got - expected) ** 2 / expected).sum() < 30  # chi-square of at most 7 degrees of freedom
