import json

import numpy as np
import pytest
import torch

from plsc.errors import DataError
from plsc.evaluate import all_pairs as module
from plsc.evaluate.all_pairs import BINS, all_pairs
from plsc.evaluate.groups import ACROSS, Groups
from plsc.evaluate.report import write_report
from plsc.evaluate.verification import FARS, GRID
from plsc.parallel.world import World
from tests.devices import GPU


def exact_embeddings(count, size=16, seed=0):
    """Four entries of +-1 each, times any norm: products do not depend on the order of summation."""
    rng = np.random.default_rng(seed)
    embeddings = np.zeros((count, size), np.float32)
    for row in embeddings:
        row[rng.choice(size, 4, replace=False)] = rng.choice([-1, 1], 4)
    embeddings[:: max(7, count // 5)] = 0
    return embeddings * 2.0 ** rng.integers(-60, 60, (count, 1)).astype(np.float32)


def random_embeddings(count, size=64, classes=150, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    embeddings = rng.normal(size=(classes, size))[labels] + 2 * rng.normal(size=(count, size))
    return (3 * embeddings).astype(np.float32), labels


def matrix_of_scores(embeddings, labels, tile):
    """All scores in steps of the grid, int64 [N, N]: float32 products of normalised embeddings, rounded.

    The products are those of the same tiles, because the last bit may depend on the shapes.
    """
    norms = np.linalg.norm(embeddings.astype(float), axis=1, keepdims=True)
    unit = torch.from_numpy((embeddings / np.where(norms == 0, 1, norms)).astype(np.float32))
    steps = np.zeros((len(unit), len(unit)), np.int64)
    blocks = torch.from_numpy(np.argsort(labels, kind="stable")).split(tile)
    for index, rows in enumerate(blocks):
        for columns in blocks[index:]:
            scores = (unit[rows] @ unit[columns].T).double() * GRID
            found = scores.clamp(-GRID, GRID).round().long().numpy()
            steps[np.ix_(rows, columns)], steps[np.ix_(columns, rows)] = found, found.T
    return steps


def brute_force(steps, labels):
    """Positive and negative scores of all pairs i < j, in steps of the grid, ascending."""
    pairs = np.triu(np.ones(steps.shape, bool), 1)
    is_same = labels[:, None] == labels[None]
    return np.sort(steps[pairs & is_same]), np.sort(steps[pairs & ~is_same])


def check(result, steps, labels):
    """Compare every number of the result with those of the scores of all pairs."""
    positives, negatives = brute_force(steps, labels)
    assert np.array_equal(np.flatnonzero(result.same), np.unique(positives) + GRID)
    assert np.array_equal(result.same[result.same > 0], np.unique(positives, return_counts=True)[1])
    assert np.array_equal(np.flatnonzero(result.different), np.unique(negatives) + GRID)
    assert np.array_equal(result.different[result.different > 0], np.unique(negatives, return_counts=True)[1])
    assert (result.pairs, result.positives, result.negatives) == (
        len(labels) * (len(labels) - 1) // 2, len(positives), len(negatives),
    )  # fmt: skip
    assert (result.images, result.classes) == (len(labels), len(set(labels.tolist())))
    false_accepts = len(negatives) - np.searchsorted(negatives, negatives, "left")  # at each threshold
    for far in FARS:
        # The lowest threshold with few enough false accepts: a step above the highest with too many.
        threshold = max(negatives[false_accepts / len(negatives) > far]) + 1
        assert result.threshold_at_far[far] == threshold / GRID
        assert result.tar_at_far[far] == np.sum(positives >= threshold) / len(positives)
    assert result.unresolved_fars == tuple(far for far in FARS if 1 / len(negatives) > far)
    below = np.searchsorted(negatives, positives, "left").sum()
    ties = np.searchsorted(negatives, positives, "right").sum() - below
    assert result.auc == pytest.approx((below + ties / 2) / (len(positives) * len(negatives)), abs=1e-12)


@pytest.fixture(params=["C", "torch"])
def counter(request, monkeypatch):
    """Count in C if it is built, and as without the C library."""
    if request.param == "torch":
        monkeypatch.setattr(module, "function", lambda *_: None)


@pytest.mark.usefixtures("counter")
@pytest.mark.parametrize(("count", "tile"), [(1000, 300), (101, 7), (101, 100)])
def test_equals_brute_force_with_ties_and_zero_embeddings_of_any_norm(count, tile, monkeypatch):
    monkeypatch.setattr(module, "TILE", tile)
    embeddings, labels = random_embeddings(count)
    if count == 1000:
        monkeypatch.setattr(module, "_MOST", 10**5)  # 32-bit counts are moved before they overflow
    else:
        embeddings, labels = exact_embeddings(101), np.random.default_rng(1).integers(-3, 20, 101)
    steps = matrix_of_scores(embeddings, labels, tile)
    assert count == 1000 or len(np.unique(steps)) < 12  # ties
    check(all_pairs(embeddings, labels), steps, labels)


@pytest.mark.usefixtures("counter")
def test_scores_are_rounded_half_to_even():
    halves = np.array([0.5, 1.5, 2.5, -0.5, -1.5]) / GRID  # of a step: cosines with the first embedding
    embeddings = np.stack([[1, *halves], [0, *np.ones(5)]], 1).astype(np.float32)
    result = all_pairs(embeddings, np.array([0, 0, 1, 2, 3, 4]))
    assert (result.same.nonzero()[0] - GRID).tolist() == [0]
    assert (result.different.nonzero()[0] - GRID).tolist() == [-2, 0, 2, GRID]


def test_pairs_per_group_equal_brute_force(monkeypatch):
    monkeypatch.setattr(module, "TILE", tile := 7)
    embeddings, rng = exact_embeddings(101), np.random.default_rng(1)
    labels, of = rng.integers(0, 20, 101), rng.integers(-1, 2, 101)
    result = all_pairs(embeddings, labels)
    rates = module.all_pair_rates(embeddings, labels, Groups(("a", "b"), of), result, World.single())
    assert list(rates.tables) == ["FAR 0.1", "FAR 0.01", "FAR 0.001"]
    steps = matrix_of_scores(embeddings, labels, tile)
    known = (of[:, None] >= 0) & (of >= 0) & np.triu(np.ones(steps.shape, bool), 1)
    is_same, is_within = labels[:, None] == labels, known & (of[:, None] == of)
    for far, table in zip((0.1, 0.01, 0.001), rates.tables.values(), strict=True):
        accepted = steps >= result.threshold_at_far[far] * GRID
        rows = {"a": is_within & (of == 0), "b": is_within & (of == 1), ACROSS: known & ~is_within}
        assert list(table) == list(rows)
        for name, where in rows.items():
            for rate, kind in (("TAR", is_same), ("FAR", ~is_same)):
                total = int((where & kind).sum())
                assert table[name][rate]["count"] == total
                assert table[name][rate]["value"] == (where & kind & accepted).sum() / total


def test_a_different_pair_with_score_1_leaves_no_threshold():
    embeddings = np.array([[2, 0], [1, 0], [3, 0]], np.float32)
    result = all_pairs(embeddings, np.array([5, 5, 7]))
    assert (result.positives, result.negatives) == (1, 2)
    assert result.tar_at_far[1e-1] == 0
    assert result.threshold_at_far[1e-1] == 1 + 1 / GRID
    assert (result.auc, result.eer) == (0.5, 0.5)


def test_smaller_fars_are_reported_if_there_are_enough_different_pairs():
    same, different = np.zeros((2, BINS), np.int64)
    same[GRID:] = 1
    different[GRID // 2] = 10**8 - 3
    different[GRID + 9 : GRID + 12] = 1
    result = module.result_of(same, different, images=2, classes=2)
    assert list(result.tar_at_far) == [*FARS, 1e-7, 1e-8]
    assert result.unresolved_fars == ()
    assert [result.threshold_at_far[far] * GRID for far in (1e-7, 1e-8)] == [-GRID / 2 + 1, 11]


def test_the_report_shows_rates_and_pictures(tmp_path):
    result = all_pairs(*random_embeddings(300))
    report = write_report(tmp_path, "Report", [result.section("All pairs of a/b")]).read_text()
    assert f"| 0.01 | {result.tar_at_far[1e-2]:.6f} | {result.threshold_at_far[1e-2]:.6f} |  |" in report
    assert len(list(tmp_path.glob("All_pairs_of_a_b_*.png"))) == 2
    values = json.loads((tmp_path / "report.json").read_text())["All pairs of a/b"]
    assert values["tar_at_far"] == {f"{far:g}": tar for far, tar in result.tar_at_far.items()}
    assert values["unresolved_fars"] == ["1e-05", "1e-06"]


@pytest.mark.parametrize(
    ("embeddings", "labels", "message"),
    [
        (np.ones((3, 4)), np.zeros(3, int), "same and different pairs"),
        (np.ones((3, 4)), np.arange(3), "same and different pairs"),
        (np.ones((3, 4)), np.arange(2), "shape"),
        (np.array([[1.0], [2], [np.nan]]), np.array([0, 0, 1]), "image 2"),
    ],
)
def test_wrong_input_is_reported(embeddings, labels, message):
    with pytest.raises(DataError, match=message):
        all_pairs(embeddings.astype(np.float32), labels)


def test_products_are_exact_under_bfloat16_settings_which_are_kept():
    embeddings, labels = random_embeddings(200)
    expected = all_pairs(embeddings, labels).same
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert np.array_equal(all_pairs(embeddings, labels).same, expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("device", [GPU])
def test_counts_on_a_gpu_are_those_of_the_cpu(device):
    embeddings = exact_embeddings(5000)
    labels = np.random.default_rng(0).integers(0, 300, 5000)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        result, expected = all_pairs(embeddings, labels, device=device), all_pairs(embeddings, labels)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert np.array_equal(result.same, expected.same)
    assert np.array_equal(result.different, expected.different)
