"""Callbacks on several ranks."""

import json
from pathlib import Path

import pytest

from plsc.checkpoint.remote import verify
from tests.distributed.launch import run_ranks
from tests.images import write_dataset

WORKER = Path(__file__).with_name("callbacks_worker.py")


@pytest.mark.slow
def test_all_ranks_see_the_same_events_and_one_rank_stops_the_run(tmp_path):
    dataset = write_dataset(tmp_path / "faces", classes=5, per_class=6)
    run_ranks(WORKER, 3, str(dataset), str(tmp_path))
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert seen[1] == seen[2] == seen[0]
    steps, checkpoint, events = seen[0]
    assert steps == 3
    assert (Path(checkpoint) / "manifest.json").exists()
    assert [event for event, _ in events][-3:] == ["epoch_end", "saved", "run_end"]


@pytest.mark.slow
def test_an_epoch_is_saved_on_all_ranks_before_the_error_of_one(tmp_path):
    dataset = write_dataset(tmp_path / "faces", classes=5, per_class=6)
    done = run_ranks(WORKER, 2, str(dataset), str(tmp_path), "failing", check=False)
    assert done.returncode == 1
    assert "on the last rank only" in done.stderr
    assert verify(tmp_path / "run/0").epoch == 1
    assert not (tmp_path / "run/1").exists()
