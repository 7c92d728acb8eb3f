from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_head_equals_the_reference_on_uneven_shards_and_batches(ranks):
    run_ranks(Path(__file__).with_name("heads_worker.py"), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_margins_per_class_and_hard_negatives_equal_the_reference_on_uneven_shards(ranks):
    run_ranks(Path(__file__).with_name("heads_worker.py"), ranks, "in short")
