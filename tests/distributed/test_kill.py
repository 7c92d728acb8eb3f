"""A small version of the kill benchmark: kill two ranks during a save, an upload and a deletion."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, clean_environment
from tests.hdfs_server import Hdfs

PHASES = ("save", "upload", "retention")

pytestmark = pytest.mark.slow


def test_after_a_kill_in_any_phase_the_newest_checkpoint_is_complete_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, hdfs: Hdfs
):
    script = [sys.executable, "benchmarks/kill.py", str(tmp_path), "--quick"]
    done = subprocess.run(
        [*script, "--store", f"{hdfs.url}/kill", "--phases", *PHASES],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "kill.jsonl").read_text().splitlines()]
    kills = [line for line in lines if "phase" in line]
    for kill, phase in zip(kills, PHASES, strict=True):
        assert phase in kill["in_phases"], kill
    assert not any(line["problems"] for line in lines), lines
    assert kills[-1]["here"]
    assert kills[-1]["there"]
    assert lines[-1]["same_bits"]  # the last killed run has finished
