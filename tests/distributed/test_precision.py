"""Compare skipped steps and the loss scale with a table, on one and three ranks."""

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.images import write_dataset

pytestmark = pytest.mark.slow


def test_loss_scale_and_skipped_steps_follow_the_table_on_all_ranks_and_after_a_resume(tmp_path):
    # 120 images, 6 per step: one epoch of 20 steps. Only the last rank overflows.
    dataset = write_dataset(tmp_path / "set", classes=12, per_class=10)
    worker = Path(__file__).with_name("precision_worker.py")
    done = run_ranks(worker, 3, str(dataset), str(tmp_path / "runs"))
    assert done.stdout.count("all as the table says") == 3, done.stdout
