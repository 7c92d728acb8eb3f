from __future__ import annotations

import json
from pathlib import Path

import pytest

from plsc.checkpoint import clean_leftovers, read_manifest
from tests.distributed.launch import run_ranks

WORKER = Path(__file__).with_name("checkpoint_worker.py")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_bit_comes_back_in_place_on_uneven_and_empty_shards(ranks, tmp_path):
    run_ranks(WORKER, ranks, "save", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    run_ranks(WORKER, ranks, "load", str(tmp_path))
    kinds = {path.suffix for path in (tmp_path / "1").iterdir()}
    assert kinds == {".json", ".safetensors"}, "nothing in it may be a pickle"


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(4, 3), (3, 1), (4, 2)])
def test_rows_come_back_on_fewer_ranks(saved_on, loaded_on, tmp_path):
    run_ranks(WORKER, saved_on, "save", str(tmp_path))
    run_ranks(WORKER, loaded_on, "load", str(tmp_path))


@pytest.mark.parametrize("ranks", [0, 3])
def test_a_rank_that_cannot_write_is_named_on_all_ranks_and_harms_nothing(ranks, tmp_path):
    run_ranks(WORKER, ranks, "full_disk", str(tmp_path))


def test_a_tensor_that_one_rank_misses_is_an_error_on_all(tmp_path):
    run_ranks(WORKER, 2, "disagree", str(tmp_path))


def test_a_rank_killed_in_a_save_leaves_the_former_checkpoint_and_nobody_waiting(tmp_path):
    done = run_ranks(WORKER, 3, "rank_dies", str(tmp_path), check=False, timeout=120)
    assert "SIGKILL" in done.stderr
    clean_leftovers(tmp_path)
    assert (tmp_path / "1").is_dir()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    run_ranks(WORKER, 3, "load", str(tmp_path))


def test_the_manifest_tells_the_global_shapes_and_the_ranges(tmp_path):
    run_ranks(WORKER, 3, "save", str(tmp_path))
    manifest = read_manifest(tmp_path / "1")
    assert manifest.class_ranges == [[0, 2], [2, 4], [4, 5]]
    assert manifest.tensors["1001/torch.bfloat16"].shape == (1001, 3, 2)
    assert manifest.tensors["1001/torch.bfloat16"].sharded
    assert manifest.tensors["own/2"].shape == (2,)
    assert json.loads((tmp_path / "1" / "manifest.json").read_text())["world_size"] == 3
