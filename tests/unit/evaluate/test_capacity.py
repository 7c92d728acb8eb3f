import json
from itertools import combinations, pairwise

import numpy as np
import pytest

from plsc.errors import DataError, OptionError
from plsc.evaluate.capacity import (
    Capacity,
    Holding,
    Prediction,
    Row,
    evaluate_capacity,
    measure_capacity,
)


def images_of(classes, images, seed=0, families=0, size=16):
    """Embeddings of classes on a sphere; families: of look-alikes, whose sizes differ."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, size))
    if families:
        shares = rng.pareto(1.5, families) + 0.2
        centres = (
            0.7 * centres
            + rng.normal(size=(families, size))[rng.choice(families, classes, p=shares / shares.sum())]
        )
    labels = np.repeat(np.arange(classes), images)
    return (centres[labels] + 0.4 * rng.normal(size=(len(labels), size))).astype(np.float32), labels


@pytest.fixture(scope="module")
def table():
    return measure_capacity(*images_of(100, 4, families=40))


def brute_force(embeddings, labels, probes, threshold, identities, seed):
    """Enrol an image of each of the first identities; count the probes that any of them accepts."""
    rng = np.random.default_rng(seed)
    enrolled = [rng.choice(np.flatnonzero(labels == label)) for label in np.unique(labels)[:identities]]
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    return ((unit[probes] @ unit[enrolled].T).max(1) >= threshold).mean()


@pytest.mark.parametrize(("families", "images", "times"), [(0, 3, 4), (300, 3, 1), (300, 1, 2)])
def test_the_interval_covers_the_fpir_of_a_drawn_gallery_and_the_estimate_is_near(families, images, times):
    embeddings, labels = images_of(1200, images, 1, families)
    covered, near = [], []
    for seed in range(8):
        classes = np.random.default_rng(seed).permutation(1200)
        place = classes[labels]  # classes 0 to 99 calibrate, 100 to 899 are enrolled, the others are unknown
        found = measure_capacity(embeddings[place < 100], labels[place < 100])
        pool = (place >= 100) & (place < 900)
        probes = np.concatenate([embeddings[place >= 900], embeddings[pool]])
        enrolled = np.concatenate([np.full((place >= 900).sum(), 10**6), place[pool]])
        is_probe = np.flatnonzero(enrolled == 10**6)
        identities = 100 * times
        threshold = found.threshold(0.4, identities, sure=True)
        truth = brute_force(probes, enrolled, is_probe, threshold, identities, seed)
        estimate, low, high = found.fpir(threshold, identities)
        covered.append(low <= truth <= high)
        if estimate is not None:
            near.append(truth / 1.5 <= estimate <= truth * 1.5)
    assert np.mean(covered) >= 0.75  # 8 draws of about 0.9
    assert not near or np.mean(near) >= 0.75


def test_fpir_is_that_of_gamma_distributed_probes():
    rng = np.random.default_rng(0)

    def estimate(far, spread, identities):
        rows = Row(0.5, far, spread, 1.0, None), Row(0.9, 0.0, 0.0, 1.0, None)
        return Capacity(10**6, 10**6, rows).fpir(0.5, identities).estimate

    for far, spread, identities in [(1e-3, 2.0, 100), (1e-4, 8.0, 5000), (1e-3, 0.1, 1000)]:
        q = rng.gamma(1 / spread, far * spread, 200_000)
        assert estimate(far, spread, identities) == pytest.approx(
            1 - np.mean((1 - q) ** identities), rel=0.02
        )
    for spread in (0, 1e-12):
        assert estimate(1e-3, spread, 1000) == pytest.approx(1 - np.exp(-1))


def test_far_and_spread_are_those_of_all_pairs_with_equal_weight_per_class():
    rng = np.random.default_rng(0)
    embeddings, labels = images_of(25, 4, families=8)
    kept = rng.permutation(len(labels))[:70]  # unequal numbers of images
    embeddings, labels = embeddings[kept], labels[kept]
    found = measure_capacity(embeddings, labels)
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    classes = np.unique(labels)
    for row in found.rows:
        hit = unit @ unit.T >= row.threshold - 5e-7  # rounding of float32 products
        far = np.mean([
            hit[labels == a][:, labels == b].mean() for a in classes for b in classes if a != b
        ])  # fmt: skip
        assert row.far == pytest.approx(far, abs=1e-3 * far + 1e-9)
        same = [np.mean([hit[x, y] for x, y in combinations(np.flatnonzero(labels == c), 2)])
                for c in classes if (labels == c).sum() > 1]  # fmt: skip
        assert row.accepted == pytest.approx(np.mean(same))


def test_limits_rise_with_identities_and_fall_with_the_threshold(table):
    thresholds = np.linspace(table.rows[0].threshold, table.rows[-1].threshold + 0.01, 60)
    for identities in (1, 50, 5000):
        highs = [table.fpir(threshold, identities).high for threshold in thresholds]
        assert all(after <= before * 1.1 for before, after in pairwise(highs))
    for threshold in thresholds:
        highs = [table.fpir(threshold, 2**power).high for power in range(20)]
        assert all(before <= after + 1e-12 for before, after in pairwise(highs))


def test_outside_the_table_and_of_a_few_pairs_there_is_no_estimate(table):
    above, below = table.fpir(0.9999, 10), table.fpir(-1.0, 10)
    assert (above.estimate, above.low, below.estimate, below.high) == (None, 0, None, 1)
    assert above.high == pytest.approx(10 * 3 * table.rows[-1].weight / (100 * 99 / 2), rel=0.05)
    assert 0 < below.low < 1
    row = next(row for row in table.rows if 0 < row.far * 4950 < 4)
    estimate, low, high = table.fpir(row.threshold, 100)
    assert estimate is None
    assert high > 3 * max(low, 1e-9)


def test_threshold_is_the_lowest_with_at_most_this_fpir(table):
    for identities in (50, 200):
        threshold = table.threshold(0.4, identities)
        assert table.fpir(threshold, identities).estimate == pytest.approx(0.4, abs=1e-6)
        sure = table.threshold(0.4, identities, sure=True)
        assert sure > threshold
        assert table.fpir(sure, identities).high == pytest.approx(0.4, abs=0.02)
    assert table.threshold(0.99, 1) == table.rows[0].threshold
    assert table.threshold(1e-6, 10_000) is None


def test_holds_rises_with_the_allowed_fpir_at_the_threshold_that_accepts_90_percent_or_the_given_one(table):
    held = [table.holds(fpir, threshold=table.rows[-5].threshold) for fpir in (0.05, 0.2)]
    assert 1 < held[0].identities < held[1].identities
    for one in held:
        assert table.fpir(one.threshold, one.identities).high <= one.fpir
    chosen = table.holds()
    assert chosen.fpir == 0.1  # 6 / 100 classes, rounded up
    accepted = {row.threshold: row.accepted for row in table.rows}
    assert accepted[chosen.threshold] >= 0.9
    assert all(share < 0.9 for threshold, share in accepted.items() if threshold > chosen.threshold)


def test_without_same_class_pairs_holds_needs_a_threshold_and_is_the_rule_of_three_above_all_scores():
    single = measure_capacity(*images_of(100, 1))
    assert single.rows[0].accepted is None
    assert single.holds() is None
    assert single.holds(threshold=-0.5) is None
    held = single.holds(0.05, threshold=0.9999)
    assert held.identities == pytest.approx(0.05 * (100 * 99 / 2) / 3, rel=0.1)


def test_json_keeps_the_table_and_a_damaged_one_is_an_error(table):
    for found in (table, measure_capacity(*images_of(30, 3))):
        text = json.dumps(found.as_dict(), allow_nan=False)
        assert Capacity.from_dict(json.loads(text)) == found
    for change in ({"rows": []}, {"classes": 5}, {"rows": [[0.5, 0.1, 0.0, 1.0, None]]}):
        with pytest.raises(DataError, match="capacity"):
            Capacity.from_dict({**table.as_dict(), **change})


def test_bad_input_is_named(table):
    embeddings, labels = images_of(30, 3)
    copied = embeddings.copy()
    copied[80] = 2 * copied[4]
    for given, of, message in [
        (embeddings[:57], labels[:57], "19 classes"),
        (embeddings, labels[:-1], "shape"),
        (copied, labels, "images 4 and 80"),  # the same image in two classes
    ]:
        with pytest.raises(DataError, match=message):
            measure_capacity(given, of)
    for threshold, identities in ((0.5, 0), (float("nan"), 5)):
        with pytest.raises(DataError, match=r"identities|threshold"):
            table.fpir(threshold, identities)
    with pytest.raises(OptionError, match="FPIR"):
        table.holds(1.5)


@pytest.mark.parametrize(("prediction", "share"), [
    ((0.4, 0.2, 0.6), "40 in 100"), ((0.000_123_4, 0, 0.1), "1 in 8,100"), ((None, 0.002, 1), "unknown"),
    ((None, 0, 0.02), "at most 1 in 50"), ((None, 0.6, 1), "at least 60 in 100"),
])  # fmt: skip
def test_a_prediction_is_said_in_words(prediction, share):
    assert share in Prediction(*prediction).sentence(5120)


def test_where_data_cannot_say_the_threshold_is_above_all_scores_of_different_classes(table):
    assert table.strictest(0.4, 50) == table.threshold(0.4, 50)
    assert table.strictest(1e-6, 10_000) == table.rows[-1].threshold
    expected, text = table.expected(1e-6, 10_000)
    assert expected == table.fpir(table.rows[-1].threshold, 10_000)
    assert expected.high > 1e-6
    assert text == expected.sentence(10_000, "reach the threshold")


def test_a_warning_starts_above_the_identities_that_are_held(table, monkeypatch):
    held = table.holds(0.2).identities
    assert table.warning(held, 0.2) is None
    assert f"{held + 1} images" in table.warning(held + 1, 0.2)
    for found, words in ((None, "too few"), (Holding(0, 0.2, 0.5), "too many strangers")):
        monkeypatch.setattr(Capacity, "holds", lambda *_, found=found: found)
        assert words in table.warning(1, 0.2)


@pytest.mark.parametrize("per_class", [1, 3])
def test_a_report_says_what_is_held(per_class):
    result = evaluate_capacity(*images_of(120, per_class, families=60))
    section = result.section("Capacity")
    if per_class == 3:
        intervals = {row[0]: row[2] for row in section.tables[0].rows}
        assert "not claimed" in intervals["300"]
        assert " to " in intervals["10"]
        held = result.capacity.holds()
        assert f"{held.identities:,} identities" in section.tables[0].title
        assert json.loads(json.dumps(section.values))["holds"] == held._asdict()
    else:
        assert result.holding is None
