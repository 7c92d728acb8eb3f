from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.images import write_dataset


@pytest.mark.slow
def test_recomputation_gives_the_same_bits_with_buckets_and_batch_norms_over_two_ranks(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=6, per_class=8)
    worker = Path(__file__).with_name("recomputation_worker.py")
    run_ranks(worker, 2, str(dataset), str(tmp_path / "runs"))
