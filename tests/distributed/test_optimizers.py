"""Optimizers, groups and frozen parameters give the same results on one rank and on three."""

from pathlib import Path

import pytest
import torch

from plsc.parallel.world import World
from tests.distributed.launch import run_ranks
from tests.distributed.optim_worker import CASES, train_all
from tests.images import write_dataset

pytestmark = pytest.mark.slow


def test_three_ranks_and_one_give_the_same_weights_with_any_optimizer(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=7, per_class=4)
    worker = Path(__file__).with_name("optim_worker.py")
    run_ranks(worker, 3, str(dataset), str(tmp_path / "three"))
    three = torch.load(tmp_path / "three.pt", weights_only=True)
    one = train_all(str(dataset), World.single())
    assert three.keys() == one.keys()
    far = {key: float((value - three[key]).abs().max()) for key, value in one.items()}
    assert {key: distance for key, distance in far.items() if distance > 1e-9} == {}
    for case in CASES:  # a frozen batch norm keeps its statistics
        is_frozen = "frozen" in case or "half" in case
        assert one[f"{case}: stem.1.running_mean"].eq(0).all() == is_frozen, case
