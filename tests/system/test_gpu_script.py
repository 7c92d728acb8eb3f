"""benchmarks/gpu.sh without a GPU: every slice at toy size, and what becomes of one that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def run(out: Path, *arguments: str, python: str | Path = sys.executable):
    return subprocess.run(
        ["bash", "benchmarks/gpu.sh", *arguments],
        cwd=REPO,
        env={**os.environ, "PYTHON": str(python), "OUT": str(out), "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
    )


def samples_of(out: Path, number: int) -> list[dict]:
    return [json.loads(line) for line in (out / f"slice-{number}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "kinds"),
    [
        (1, {"test"}),
        (2, {"memory", "failed", "rates", "limit", "goal"}),
        (3, {"step", "goal"}),
        (4, {"memory", "rates", "limit"}),
        (5, {"loader", "files", "goal"}),
    ],
)
def test_a_slice_measures_what_it_is_for_at_toy_size(number, kinds, tmp_path):
    done = run(tmp_path, str(number), "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    samples = samples_of(tmp_path, number)
    assert {sample["kind"] for sample in samples} == {"machine", "end"} | kinds
    assert samples[0]["torch"] in (tmp_path / f"slice-{number}.md").read_text()
    # Only what is not installed here, or is for a GPU, is a row without figures.
    outcomes = {sample["outcome"] for sample in samples if sample["kind"] == "failed"}
    assert outcomes <= {"not installed", "needs a GPU"}


def test_what_there_is_no_time_left_for_is_a_row(tmp_path):
    assert run(tmp_path, "2", "--device", "cpu", "--seconds", "0").returncode == 0
    assert "| textbook, fp32 | arcface | no time left |" in (tmp_path / "slice-2.md").read_text()


def test_a_slice_that_fails_stops_no_other_and_is_named_at_the_end(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n[ "$2" != 2 ]\n')
    python.chmod(0o755)
    done = run(tmp_path / "out", python=python)
    begun = [line for line in done.stdout.splitlines() if line.startswith("benchmarks/gpu.py")]
    assert begun == [f"benchmarks/gpu.py {number} {tmp_path / 'out'}" for number in range(1, 6)]
    assert done.returncode == 1
    assert "failed slices: 2\n" in done.stderr
