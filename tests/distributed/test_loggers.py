"""Loggers on several ranks."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.images import write_dataset

WORKER = Path(__file__).with_name("loggers_worker.py")


@pytest.mark.slow
def test_only_rank_0_writes_and_the_gradient_norm_is_that_of_all_ranks(tmp_path):
    dataset = write_dataset(tmp_path / "faces", classes=4, per_class=6)
    run_ranks(WORKER, 2, str(dataset), str(tmp_path))
    for rank in range(2):
        entries, expected, logged = json.loads((tmp_path / f"{rank}.json").read_text())
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        assert entries == ([json.loads(line) for line in lines] if rank == 0 else [])
        # Two epochs of three steps: every other step is logged, and the last one of an epoch.
        assert logged == pytest.approx([expected[step - 1] for step in (2, 3, 4, 6)], rel=1e-5)
