"""Resume on the same and on other numbers of ranks."""

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.images import write_dataset, write_pair_file

pytestmark = pytest.mark.slow


def test_resuming_is_exact_on_equal_ranks_and_up_to_rounding_on_others(tmp_path):
    # 26 images in steps of 10: uneven shares on 4 and 3 ranks, and an uneven last batch.
    dataset = write_dataset(tmp_path / "set", classes=13, per_class=2)
    write_pair_file(dataset / "lfw.bin", dataset, pairs=20)
    done = run_ranks(Path(__file__).with_name("resume_worker.py"), 4, str(dataset), str(tmp_path / "runs"))
    assert done.stdout.count("after the route") == 7, done.stdout
