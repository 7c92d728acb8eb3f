"""Faults that are planted into synthetic embeddings: noisy copies of a centre per class."""

from __future__ import annotations

import numpy as np
import pytest

from plsc.clean import faults
from plsc.clean.faults import (
    View,
    classes_without_centre,
    compare_labels,
    how_sure,
    mixed_classes,
    nearest,
    neighbours,
    same_classes,
    sure_of_class,
    wrong_labels,
)


def embed(truth, noise=1.0, seed=0, size=32):
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((truth.max() + 1, size))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    found = centres[truth] + noise / np.sqrt(size) * rng.standard_normal((len(truth), size))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def one_view(unit):
    return [View(unit, np.ones(len(unit), bool))]


def flipped(truth, share, seed):
    """Return labels of which a share is a random other class."""
    rng = np.random.default_rng(seed)
    labels, classes = truth.copy(), truth.max() + 1
    rows = rng.choice(len(truth), round(share * len(truth)), replace=False)
    labels[rows] = (truth[rows] + rng.integers(1, classes, len(rows))) % classes
    return labels


def find(views, labels):
    """Return what `plsc data clean` finds: wrong, same, mixed, smaller parts, lost."""
    classes, kept = labels.max() + 1, np.ones(len(labels), bool)
    wrong = wrong_labels(compare_labels(views, labels, kept, classes))
    kept[wrong.subjects[:, 0]] = False
    given = views, labels, kept, classes
    lost = classes_without_centre(views, labels, classes)
    return wrong, same_classes(*given), *mixed_classes(*given), lost


TRUTH = np.repeat(np.arange(100), 12)


@pytest.mark.parametrize("true", [6, 30, 300])
@pytest.mark.parametrize("weaker", [1.0, 0.8])
def test_the_probabilities_sum_to_the_number_of_faults(true, weaker):
    sums, estimates = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        planted = rng.normal(6, 1, 1000)
        scores = np.concatenate([rng.normal(0, 1, 2000), weaker * rng.normal(6, 1, true)])
        sure, expected = how_sure(scores, planted)
        assert (np.diff(sure[np.argsort(scores)]) >= 0).all()
        sums.append(sure.sum())
        estimates.append(expected)
    assert np.mean(sums) == pytest.approx(true, rel=0.25)
    assert np.mean(estimates) == pytest.approx(true, rel=0.25)


def test_a_probability_is_the_share_of_faults_among_equally_sure_subjects():
    found, is_fault = [], np.concatenate([np.zeros(2000, bool), np.ones(400, bool)])
    for seed in range(10):
        rng = np.random.default_rng(seed)
        scores = rng.normal(0, 1, 2400) + 3 * is_fault
        found.append(how_sure(scores, rng.normal(3, 1, 2400))[0])
    for low, high in ((0.1, 0.4), (0.4, 0.7), (0.7, 0.95)):
        some = [(low <= one) & (one < high) for one in found]
        predicted = np.mean(np.concatenate([one[now] for one, now in zip(found, some, strict=True)]))
        assert np.mean(np.concatenate([is_fault[now] for now in some])) == pytest.approx(predicted, abs=0.1)


def test_without_faults_nothing_is_sure():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sure, expected = how_sure(rng.normal(0, 1, 2000), rng.normal(4, 1, 1000))
        assert (expected, sure.max()) == (0, 0)
    for scores, planted in ((np.empty(0), np.ones(5)), (np.ones(5), np.empty(0))):
        sure, expected = how_sure(scores, planted)
        assert (sure.tolist(), expected) == ([0.0] * len(scores), 0)


@pytest.mark.parametrize("noise", [0.7, 1.2])
def test_nothing_is_proposed_for_a_dataset_without_faults(noise):
    wrong, same, mixed, _, lost = find(one_view(embed(TRUTH, noise)), TRUTH)
    assert [len(one.sure) for one in (wrong, same, mixed, lost)] == [0, 0, 0, 0]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2])
def test_wrong_labels_and_their_right_classes_are_found(share):
    views, labels = one_view(embed(TRUTH)), flipped(TRUTH, share, seed=1)
    kept = np.ones(len(labels), bool)
    wrong = wrong_labels(compare_labels(views, labels, kept, 100))
    rows, is_wrong = wrong.subjects[:, 0], labels != TRUTH
    assert is_wrong[rows].mean() > 0.9
    assert np.isin(np.flatnonzero(is_wrong), rows).mean() > 0.9
    assert wrong.expected == pytest.approx(is_wrong.sum(), rel=0.2)
    kept[rows] = False
    again = compare_labels(views, labels, kept, 100)
    assert (again.likely == TRUTH)[rows[is_wrong[rows]]].mean() > 0.9


def test_the_probability_of_the_likely_class_is_its_accuracy():
    predicted, right = [], []
    for seed in range(5):
        views, labels = one_view(embed(TRUTH, 1.4, seed)), flipped(TRUTH, 0.1, seed)
        kept, images = labels == TRUTH, np.flatnonzero(labels != TRUTH)
        found = compare_labels(views, labels, kept, 100)
        predicted.append(sure_of_class(found, kept, images))
        right.append(found.likely[images] == TRUTH[images])
    predicted, right = np.concatenate(predicted), np.concatenate(right)
    for some in (predicted < 0.6, (predicted >= 0.6) & (predicted < 0.9), predicted >= 0.9):
        assert some.sum() > 50
        assert right[some].mean() == pytest.approx(predicted[some].mean(), abs=0.1)


def test_images_alone_in_their_class_are_not_judged_and_hide_no_wrong_labels():
    views, labels = one_view(embed(TRUTH)), flipped(TRUTH, 0.05, seed=2)
    alone = np.flatnonzero(labels == TRUTH)[::7]
    labels[alone] = 100 + np.arange(len(alone))
    found = compare_labels(views, labels, np.ones(len(labels), bool), labels.max() + 1)
    assert np.isnan(found.own[alone]).all()
    wrong = wrong_labels(found).subjects[:, 0]
    is_wrong = (labels != TRUTH) & (labels < 100)
    assert not np.isin(alone, wrong).any()
    assert np.isin(np.flatnonzero(is_wrong), wrong).mean() > 0.9


@pytest.mark.parametrize("pairs", [6, 40])
def test_two_classes_that_are_one_are_found(pairs):
    labels = np.where((pairs > TRUTH) & (np.arange(len(TRUTH)) % 2 == 1), 100 + TRUTH, TRUTH)
    same = find(one_view(embed(TRUTH)), labels)[1].subjects
    first, second = same.T
    assert np.mean(second == first + 100) > 0.85
    assert len(same) > 0.85 * pairs


@pytest.mark.parametrize(("per_class", "count"), [(12, 8), (400, 5)])
def test_classes_that_are_two_are_found_with_all_images_of_the_smaller_part(per_class, count):
    """400 + 200 images: more than are compared with each other."""
    sizes = np.full(40, per_class)
    sizes[:count] //= 2
    truth = np.repeat(np.arange(40), sizes)
    labels = np.where(truth < count, truth + count, truth) - count
    kept = np.ones(len(labels), bool)
    mixed, smaller = mixed_classes(one_view(embed(truth, 0.8)), labels, kept, 40 - count)
    found = mixed.subjects[:, 0].tolist()
    assert set(range(count)) <= set(found)
    assert len(found) <= count + 1
    for label in range(count):
        assert set(smaller[label].tolist()) == set(np.flatnonzero(truth == label).tolist())


def test_classes_of_random_images_have_no_centre():
    labels = TRUTH.copy()
    rows = np.random.default_rng(3).choice(len(labels), 6 * 12, replace=False)
    labels[rows] = 100 + np.arange(len(rows)) % 6
    lost = find(one_view(embed(TRUTH)), labels)[-1]
    assert len(lost.sure) >= 5
    assert (lost.subjects >= 100).all()


def test_the_image_left_by_a_wrong_one_in_a_class_of_two_is_no_class_without_centre():
    truth = np.repeat(np.arange(300), 2)
    *_, lost = find(one_view(embed(truth, 0.8)), flipped(truth, 0.1, seed=5))
    assert len(lost.sure) == 0


def test_a_network_does_not_judge_the_images_that_it_has_learned():
    labels, is_second = flipped(TRUTH, 0.1, seed=4), np.arange(len(TRUTH)) % 2 == 1
    learned = embed(labels, 0.1)  # all labels look right
    views = [
        View(np.where(~judged[:, None], learned, embed(TRUTH)), judged) for judged in (is_second, ~is_second)
    ]
    is_wrong = labels != TRUTH
    wrong = find(views, labels)[0].subjects[:, 0]
    assert is_wrong[wrong].mean() > 0.9
    assert np.isin(np.flatnonzero(is_wrong), wrong).mean() > 0.9
    everything = np.ones(len(labels), bool)  # the test would notice
    assert len(wrong_labels(compare_labels(one_view(learned), labels, everything, 100)).sure) == 0


def test_the_measured_recall_of_inverted_lists_is_that_of_an_exact_search(monkeypatch):
    unit = embed(np.repeat(np.arange(300), 10), 1.5)
    cosines = unit @ unit.T
    exact = np.argsort(-cosines, 1)[:, :6]
    monkeypatch.setattr(faults, "_EXACT", 100)
    for least in (0.1, 0.98):
        monkeypatch.setattr(faults, "_RECALL", least)
        found, numbers, recall = nearest(unit, unit, 6)
        true = np.mean([np.isin(one, two).mean() for one, two in zip(exact, numbers, strict=True)])
        assert recall == pytest.approx(true, abs=0.02)
        assert recall >= least
        np.testing.assert_allclose(found, np.take_along_axis(cosines, numbers, 1), atol=2e-3)
        assert (least < 0.5) == (recall < 0.95)


@pytest.mark.parametrize("is_right", [True, False])
def test_neighbours_are_those_of_an_exact_search_whatever_the_lists(is_right):
    labels = np.repeat(np.arange(100), [1, 4, 7, 28] * 25)
    unit = embed(labels)
    lists = np.stack([labels, (labels + 1) % 100], 1)
    if not is_right:
        lists = np.random.default_rng(0).permutation(lists)
    cosines = unit @ unit.T
    found, numbers, recall = neighbours(unit, lists, 3)
    true = np.mean(
        [np.isin(a, b).mean() for a, b in zip(np.argsort(-cosines, 1)[:, :3], numbers, strict=True)]
    )
    assert recall == pytest.approx(true, abs=0.02)
    assert recall >= 0.98
    np.testing.assert_allclose(found, np.take_along_axis(cosines, numbers, 1), atol=2e-3)
    assert (numbers[:, 0] == np.arange(len(labels))).all()


def test_a_row_is_repeated_if_the_inverted_lists_have_too_few(monkeypatch):
    monkeypatch.setattr(faults, "_EXACT", 10)
    monkeypatch.setattr(faults, "_RECALL", 0.0)
    monkeypatch.setattr(faults, "_SAMPLE", 1)
    unit = embed(np.arange(400))
    cosines, numbers, _ = nearest(unit, unit, 100)
    assert numbers.min() >= 0
    is_repeated = numbers == numbers[:, :1]
    assert is_repeated[:, 1:].any()
    assert (cosines[:, 1:][is_repeated[:, 1:]] == -1).all()


@pytest.mark.parametrize(
    "labels",
    [
        np.zeros(1, int),
        np.zeros(9, int),
        np.zeros(1000, int),
        np.arange(9),
        np.repeat(np.arange(3), [1, 2, 700]),
        np.repeat(np.arange(2), 4),
    ],
    ids=["one image", "one class", "one large class", "only single images", "three sizes", "two classes"],
)
def test_unusual_datasets_have_no_faults(labels):
    wrong, same, mixed, smaller, lost = find(one_view(embed(labels, 0.5)), labels)
    assert [len(one.sure) for one in (wrong, same, mixed, lost)] == [0, 0, 0, 0]
    assert smaller.keys() <= set(labels.tolist())
