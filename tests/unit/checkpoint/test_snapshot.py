"""The copy of a run's state that is written beside training."""

from __future__ import annotations

import pytest
import torch

from plsc.checkpoint import Manifest, ShardedTensor, Snapshot
from plsc.checkpoint.manifest import role_of_key


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.ones(3, 5, dtype=torch.bfloat16),
        torch.arange(24.0).view(4, 6).t(),
        torch.tensor([True, False]),
        torch.arange(6, dtype=torch.int8).view(2, 3),
        torch.nn.Parameter(torch.ones(2, 2)),
    ],
    ids=str,
)
def test_a_copy_has_the_same_elements_and_training_does_not_reach_it(tensor):
    manifest = Manifest("0", 1, 0, 1, 1, 5, 6, [[0, 5]])
    a, b = role_of_key("a"), role_of_key("b")
    copy = Snapshot({a: tensor, b: ShardedTensor(tensor, 5, 0)}, manifest).copy_to_host()
    for made in (copy.tensors[a], copy.tensors[b].local):
        assert made.dtype == tensor.dtype
        assert torch.equal(made, tensor.detach())
        assert made.is_contiguous()
        assert not made.requires_grad
        assert made.numel() == 0 or made.data_ptr() != tensor.data_ptr()
