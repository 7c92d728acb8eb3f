"""Training on 1, 3 and 4 ranks with the same global batch gives the same losses, weights and states."""

from pathlib import Path

import pytest
import torch

from plsc.checkpoint import read_manifest
from plsc.parallel.world import class_ranges
from tests.distributed.launch import run_ranks
from tests.distributed.train_worker import CASES, OF_THREE, STEPS
from tests.images import write_dataset
from tests.overflowing import logged
from tests.resuming import joined, saved_at

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of all runs, trained in one launch."""
    folder = tmp_path_factory.mktemp("runs")
    # 13 classes x 11 = 143 images: six steps, the last one of 23 images, no multiple of 3 or 4 ranks.
    dataset = write_dataset(folder / "set", classes=13, per_class=11)
    run_ranks(Path(__file__).with_name("train_worker.py"), 4, str(dataset), str(folder), timeout=900)
    return folder


def far(ours, theirs):
    """Return the largest difference relative to the largest value, or 1."""
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)) if theirs.numel() else 0.0


@pytest.mark.parametrize("case", CASES)
def test_training_does_not_depend_on_the_number_of_ranks(runs, case):
    tolerance = 1e-4 if case == "float32" else 1e-9
    expected = logged(runs / "1" / case, "loss", "accuracy")
    weights = joined(saved_at(runs / "1" / case, STEPS))
    for ranks in (3, 4) if case in OF_THREE else (4,):
        found = logged(runs / str(ranks) / case, "loss", "accuracy")
        assert len(found["loss"]) == STEPS
        assert far(found["loss"], expected["loss"]) < tolerance
        assert far(found["accuracy"], expected["accuracy"]) < 0.05
        saved = joined(saved_at(runs / str(ranks) / case, STEPS))
        assert saved.keys() == weights.keys()
        distances = {key: far(value, weights[key]) for key, value in saved.items()}
        assert {key: distance for key, distance in distances.items() if distance > tolerance} == {}


@pytest.mark.parametrize("case", CASES)
def test_training_moves_every_trained_matrix_and_a_frozen_batch_norm_keeps_its_statistics(runs, case):
    torch.manual_seed(0)
    network = CASES[case][0]()
    weights, is_frozen = joined(saved_at(runs / "1" / case, STEPS)), "frozen" in case or "half" in case
    for name, before in network.named_parameters():
        if before.ndim > 1 and not is_frozen and "never" not in name:
            assert (weights[f"backbone.{name}"] - before).norm() > 0.01 * before.norm(), name
    if "stem.1.running_mean" in network.state_dict():
        assert weights["backbone.stem.1.running_mean"].eq(0).all() == is_frozen


@pytest.mark.parametrize("ranks", [3, 4])
def test_each_rank_holds_only_the_weights_of_its_classes(runs, ranks):
    for case in OF_THREE if ranks == 3 else CASES:
        settings = CASES[case][1]
        manifest = read_manifest(saved_at(runs / str(ranks) / case, STEPS))
        classes, is_sharded = settings.get("head__class_num", 13), "replicated" not in case
        ranges = class_ranges(classes, ranks) if is_sharded else [(0, classes)]
        assert manifest.heads[""].class_ranges == ranges, case
