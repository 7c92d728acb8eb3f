"""Bad input gives one clear error line and a non-zero exit code, for every number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks, run_torchrun
from tests.images import write_dataset
from tests.system.bad_input_worker import Files, cases

HERE = Path(__file__).parent
JOB = HERE.parent / "distributed" / "job.py"
pytestmark = pytest.mark.slow


def test_every_rank_raises_the_same_clear_error(tmp_path):
    run, bad_things = tmp_path / "run", tmp_path / "bad"
    Files(bad_things, run).make()
    done = run_ranks(HERE / "bad_input_worker.py", 2, str(bad_things), str(run), timeout=400)
    files = Files(bad_things, run)
    lines = [line.split("CASE ", 1)[1] for line in done.stdout.splitlines() if "CASE " in line]
    reports = [json.loads(line) for line in lines]
    for name, expected, _ in cases(files):
        mine = [report for report in reports if report["case"] == name]
        assert len(mine) == 2, (name, done.stderr[-2000:])
        for report in mine:
            assert report["raised"] in (
                "OptionError", "DataError", "CheckpointError", "TrainingError", "DistributedError"
            ), (name, report)  # fmt: skip
            assert expected in report["text"], (name, report)
            assert "\n" not in report["text"], (name, report)
    assert not Path("/tmp/owned").exists()


def test_a_wrong_setting_ends_a_script_with_an_exception_that_is_the_root_cause(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=3, per_class=4)
    words = (str(dataset), str(tmp_path / "run"), "set_loss_type='softmax'", "set_margin=0.3")
    done = run_torchrun(JOB, 2, *words, check=False, timeout=90)
    script, _, summary = done.stderr.partition("Root Cause")
    assert "plsc.errors.OptionError: " in script
    assert all("softmax has no option margin" in text for text in (script, summary)), done.stderr
