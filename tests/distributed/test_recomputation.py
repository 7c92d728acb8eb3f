from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.images import write_dataset


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_recomputation_gives_the_same_bits(tmp_path, ranks):
    # On two ranks this includes DDP buckets and batch norm's collectives in the recomputation.
    dataset = write_dataset(tmp_path / "set", classes=6, per_class=8)
    run_ranks(Path(__file__).with_name("recomputation_worker.py"), ranks, str(dataset))
