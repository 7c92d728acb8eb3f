"""Training on 1, 3 and 4 ranks with the same global batch gives the same losses and weights."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from plsc.parallel.collectives import class_ranges
from tests.distributed.launch import run_ranks
from tests.distributed.train_worker import CASES, STEPS
from tests.images import write_dataset

WORKER = Path(__file__).with_name("train_worker.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    # 13 classes x 25 = 325 images: no multiple of the global batch of 24 or of 2, 3 or 4 ranks.
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=13, per_class=25)


@pytest.fixture(scope="module")
def outcome(dataset, tmp_path_factory):
    """Return outcome(ranks): the reports and weights of all cases, trained in one launch."""
    folder = tmp_path_factory.mktemp("outcome")
    run_ranks(WORKER, 4, str(dataset), str(folder), timeout=900)

    @functools.cache
    def get(ranks):
        arrays = dict(np.load(folder / f"{ranks}.npz"))
        return json.loads((folder / f"{ranks}.json").read_text()), arrays

    return get


def tolerance(case):
    return 1e-9 if case.endswith("fp64") else 1e-4


def difference(ours, theirs):
    scale = max(1.0, float(np.abs(theirs).max(initial=0)))
    return float(np.abs(ours - theirs).max(initial=0)) / scale


def after(arrays, case):
    prefix = f"{case}/after/"
    return {key.removeprefix(prefix): value for key, value in arrays.items() if prefix in key}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [3, 4])
def test_training_does_not_depend_on_the_number_of_ranks(outcome, case, ranks):
    one_report, one_arrays = outcome(1)
    report, arrays = outcome(ranks)
    assert len(report[case]["losses"]) == STEPS
    assert difference(np.array(report[case]["losses"]), np.array(one_report[case]["losses"])) < tolerance(
        case
    )
    np.testing.assert_allclose(report[case]["accuracies"], one_report[case]["accuracies"], atol=0.05)
    theirs = after(one_arrays, case)
    for key, value in after(arrays, case).items():
        assert difference(value, theirs[key]) < tolerance(case), key


@pytest.mark.parametrize("case", CASES)
def test_training_moves_every_weight_matrix_by_at_least_one_percent(outcome, case):
    report, arrays = outcome(1)
    for key, value in after(arrays, case).items():
        if value.ndim > 1:
            before = arrays[f"{case}/before/{key}"]
            assert np.linalg.norm(value - before) > 0.01 * np.linalg.norm(before), key
    losses = report[case]["losses"]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


@pytest.mark.parametrize("ranks", [3, 4])
def test_each_rank_holds_only_the_weights_of_its_classes(outcome, ranks):
    for case, (_, loss_type, _, classes, _) in CASES.items():
        kept = outcome(ranks)[0][case]["kept"]
        ranges = class_ranges(classes, ranks) if "dist" in loss_type else [(0, classes)] * ranks
        centers = (2,) if "sub-centres" in case else ()
        assert kept == [[[start, stop], [stop - start, *centers, 12]] for start, stop in ranges]


def test_averaging_gradients_instead_of_summing_is_detected(outcome):
    case = next(iter(CASES))
    _, arrays = outcome("broken")
    theirs = after(outcome(1)[1], case)
    assert difference(after(arrays, case)["fc.weight"], theirs["fc.weight"]) > 1e-3
