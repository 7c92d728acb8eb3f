from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from plsc.models.sync_batch_norm import equalise_buffers, synchronise_batch_norm
from tests.distributed.launch import run_ranks

WORKER = Path(__file__).with_name("sync_batch_norm_worker.py")


@pytest.fixture(scope="module")
def output() -> str:
    """Return the output of one launch of four ranks, with its errors."""
    done = run_ranks(WORKER, 4, check=False)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_output_gradients_and_statistics_equal_batch_norm_on_the_global_batch(output, ranks):
    assert f"passed on {ranks}" in output, output


@pytest.mark.slow
def test_a_group_of_one_rank_is_not_converted(output):
    assert "passed on 1" in output, output


def test_without_a_group_nothing_is_converted():
    module = nn.Sequential(nn.BatchNorm2d(3))
    before = copy.deepcopy(module)
    assert synchronise_batch_norm(module, None) is module
    equalise_buffers(module, None)
    assert type(module[0]) is nn.BatchNorm2d
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), before.buffers(), strict=True))
