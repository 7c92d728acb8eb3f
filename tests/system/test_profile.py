"""The callback profile: its traces, and torch's table."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from plsc.parallel.world import PREFIX
from tests.distributed.launch import run_ranks
from tests.images import write_dataset
from tests.resuming import Drawing, losses_of
from tests.system import small_entry

JOB = Path(__file__).resolve().parents[1] / "distributed" / "job.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("profile") / "set", classes=6, per_class=8)


def entry(dataset, save_dir):
    return small_entry.entry(dataset, save_dir, set_num_workers=0, set_with_test=True)


def test_each_rank_has_a_trace_of_ten_steps_with_the_phases_of_a_step(dataset, tmp_path):
    done = run_ranks(
        JOB, 2, str(dataset), str(tmp_path / "saved"), "set_callbacks='profile'", "set_train_steps=17",
        "set_train_epochs=99", "set_head_offload=True", cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.count("ProfilerStep*") == 1  # by one rank
    assert PREFIX + "backward" in done.stdout
    for rank in range(2):
        with gzip.open(tmp_path / "saved" / "profile" / f"trace-rank{rank}.json.gz", "rt") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert names.count(PREFIX + "backward") == 10
        phases = {PREFIX + one for one in ("data", "forward", "logits", "update class weights")}
        assert phases | {"gloo:all_reduce", "aten::convolution_backward"} <= set(names)


def test_a_profiled_run_learns_the_same_and_a_shorter_one_ends_well(dataset, tmp_path):
    losses = {}
    for name, callbacks in {"plain": (), "profiled": "profile"}.items():
        ins = entry(dataset, tmp_path / name)
        ins.set_callbacks(callbacks)
        torch.manual_seed(5)
        ins.set_model(Drawing())
        ins.train()
        losses[name] = losses_of(tmp_path / name)
    assert losses["plain"] == losses["profiled"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_table_has_the_time_of_kernels(dataset, tmp_path, capsys):
    ins = entry(dataset, tmp_path / "run")
    ins.set_device("cuda")
    ins.set_train_epochs(5)
    ins.set_callbacks("profile")
    ins.train()
    assert "CUDA total" in capsys.readouterr().out
