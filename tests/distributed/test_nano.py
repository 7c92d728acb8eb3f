"""demo/nano_plsc.py computes what the library computes, and its checkpoints resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import ROOT, run_ranks

SCRIPT = ROOT / "demo" / "nano_plsc.py"


@pytest.mark.parametrize(("ranks", "ratio"), [(1, 1.0), (3, 0.5)])
def test_nano_equals_the_library_over_100_steps_and_resumes_bit_for_bit(tmp_path, ranks, ratio):
    run_ranks(Path(__file__).with_name("nano_worker.py"), ranks, str(ratio), str(tmp_path / "run"))


def class_weights(folder: Path) -> torch.Tensor:
    shards = [torch.load(path) for path in folder.glob("rank-*.pt")]
    return torch.cat([shard["weight"] for shard in sorted(shards, key=lambda shard: shard["start"])])


@pytest.mark.slow
def test_the_script_resumes_on_other_ranks_after_a_kill_within_a_save(tmp_path):
    first = tmp_path / "first"
    options = ("--classes", "20", "--folder")
    output = run_ranks(SCRIPT, 2, *options, str(first), "--steps", "20").stdout
    assert "step 20: loss" in output
    (first / "partial").mkdir()
    (first / "partial" / "rank-0.pt").write_bytes(b"cut short")
    weights = []
    for ranks in (0, 3):
        run = shutil.copytree(first, tmp_path / f"resumed-{ranks}")
        run_ranks(SCRIPT, ranks, *options, str(run), "--steps", "22", "--resume")
        assert sorted(path.name for path in run.iterdir()) == ["step-0000020", "step-0000022"]
        weights.append(class_weights(run / "step-0000022"))
    assert not torch.equal(weights[0], class_weights(first / "step-0000020"))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-6)
    refused = run_ranks(SCRIPT, 0, *options, str(first), check=False)
    assert refused.returncode == 1
    assert "--resume" in refused.stderr
