from __future__ import annotations

import json
from pathlib import Path

import pytest

from plsc.checkpoint import read_manifest
from tests.distributed.launch import run_ranks

WORKER = Path(__file__).with_name("checkpoint_worker.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Run all cases in one launch; return its folder and its output with errors."""
    folder = tmp_path_factory.mktemp("cases")
    done = run_ranks(WORKER, 4, str(folder), check=False)
    return folder, done.stdout + done.stderr


def test_checkpoints_restore_every_bit_on_uneven_and_empty_shards(cases):
    folder, output = cases
    assert "passed: as many ranks" in output, output
    for ranks in range(1, 5):
        assert [path.name for path in (folder / str(ranks)).iterdir()] == ["1"]
        kinds = {path.suffix for path in (folder / str(ranks) / "1").iterdir()}
        assert kinds == {".json", ".safetensors"}, "no tensor in it may be a pickle"


def test_a_tensor_missing_on_one_rank_raises_on_all_ranks(cases):
    assert "passed: disagree" in cases[1], cases[1]


def test_the_manifest_has_global_shapes_and_ranges(cases):
    folder = cases[0] / "3"
    manifest = read_manifest(folder / "1")
    assert manifest.heads[""].class_ranges == [(0, 2), (2, 4), (4, 5)]
    assert manifest.tensors["1001/torch.bfloat16"].shape == (1001, 3, 2)
    assert manifest.tensors["1001/torch.bfloat16"].sharded
    assert manifest.tensors["own/2"].shape == (2,)
    assert json.loads((folder / "1" / "manifest.json").read_text())["world_size"] == 3
