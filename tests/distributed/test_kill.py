"""A small version of the kill benchmark: kill two ranks during a save, an upload and a deletion."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.hdfs_server import Hdfs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kill

PHASES = ("save", "upload", "retention")

pytestmark = pytest.mark.slow


def test_after_a_kill_in_any_phase_the_newest_checkpoint_is_complete_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, hdfs: Hdfs, monkeypatch
):
    monkeypatch.setenv("PLSC_CACHE_DIR", "")  # it sets the variable
    words = [str(tmp_path), "--quick", "--store", f"{hdfs.url}/kill", "--phases", *PHASES]
    monkeypatch.setattr(sys, "argv", ["kill.py", *words])
    kill.main()
    lines = [json.loads(line) for line in (tmp_path / "kill.jsonl").read_text().splitlines()]
    kills = [line for line in lines if "phase" in line]
    for one, phase in zip(kills, PHASES, strict=True):
        assert phase in one["in_phases"], one
    assert not any(line["problems"] for line in lines), lines
    assert kills[-1]["here"]
    assert kills[-1]["there"]
    assert lines[-1]["same_bits"]  # the last killed run has finished
