"""Runs in float64, whose results hardly depend on the order of sums: on the ranks, on micro-batches."""

import pytest
import torch

from plsc.train import build as build_heads
from plsc.train import build as build_network


def compute_in_float64(patch: pytest.MonkeyPatch) -> None:
    """From now on runs have networks and class weights in float64."""
    network, head = build_network.build_network, build_heads.build_head
    patch.setattr(build_network, "build_network", lambda *args: network(*args).double())
    in_float64 = {"row_dtype": torch.float64}
    patch.setattr(build_heads, "build_head", lambda *args, **named: head(*args, **{**named, **in_float64}))
