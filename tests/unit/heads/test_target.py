"""The label's logits, for the samples of this rank and of others."""

import dataclasses

import pytest
import torch

from plsc.heads import build_margin, target
from plsc.heads.weights import Rows


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("name", ["curricularface", "adaface", "magface", "softmax"])
def test_targets_that_are_found_without_waiting_for_a_gpu_are_the_same(
    name, is_sampled, monkeypatch
):
    torch.manual_seed(0)
    start, stop, centers = 3, 8, 1 if name == "softmax" else 2
    weight = torch.randn((stop - start) * centers, 6, dtype=torch.float64)
    bias = torch.randn(stop - start, dtype=torch.float64) if name == "softmax" else None
    rows = Rows(weight, bias, None, centers, name != "softmax", start * centers)
    labels = torch.tensor([0, 3, 7, 5, 8, 11, 5, 2])  # half of them are of other ranks
    classes = torch.tensor([0, 2, 4]) if is_sampled else None  # all that the batch has, here
    x = torch.randn(len(labels), 6, dtype=torch.float64)
    length = x.norm(dim=1)
    unit = x if name == "softmax" else x / length[:, None]

    def find():
        margin = build_margin(name).double()
        found = target.find_target(
            margin, unit, length, labels, (start, stop), rows, classes, None, True
        )
        added = torch.zeros_like(x)
        added.index_add_(0, found.samples, found.slope[found.samples, None] * found.w)
        return margin.state_dict(), added, dataclasses.asdict(found)

    state, added, here = find()
    monkeypatch.setattr(target, "_must_not_wait", lambda labels, weight: True)
    state_of_all, added_of_all, every = find()
    assert len(here["samples"]) == 4
    assert len(every["samples"]) == len(labels)
    for field in ("place", "row", "logit", "slope", "radial", "threshold", "hard_factor"):
        mine, theirs = here[field], every[field]
        assert (mine is None) == (theirs is None), field
        assert mine is None or torch.equal(mine, theirs), field
    assert torch.equal(added, added_of_all)
    assert all(torch.equal(value, state_of_all[key]) for key, value in state.items())
