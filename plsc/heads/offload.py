"""Rows that live in CPU memory: those of a step travel to the device, and back when they have changed."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from plsc.heads.passes import Rows
from plsc.heads.rules import States
from plsc.spans import span


@span("copy to device")
def fetch(home: Rows, device: torch.device) -> Rows:
    """Return a copy on the device of the rows in play; `selected` goes on naming their places at home."""
    selected = home.selected
    if selected is None:
        selected = torch.arange(len(home.weight), device=home.weight.device)
    return dataclasses.replace(
        home,
        weight=_copy_of(home.weight, selected, device),
        bias=None if home.bias is None else _copy_of(home.bias, selected, device),
        selected=selected.to(device),
        is_compact=True,
    )


@span("copy to device")
def fetch_states(states: States, home: Rows, device: torch.device) -> States:
    """Return copies on the device of the states of the rows in play."""
    selected = home.selected
    if selected is None:
        selected = torch.arange(len(home.weight), device=home.weight.device)
    return {name: _copy_of(state, selected, device) for name, state in states.items()}


@span("copy to device")
def bring_back(rows: Rows, home: Rows, copies: States, states: States) -> None:
    """Write the rows in play and their states back to where `fetch` found them."""
    assert rows.selected is not None
    selected = rows.selected.to(home.weight.device)
    home.weight.index_copy_(0, selected, rows.weight.to(home.weight.device))
    for name, copy in copies.items():
        states[name].index_copy_(0, selected, copy.to(states[name].device))


def _copy_of(tensor: Tensor, selected: Tensor, device: torch.device) -> Tensor:
    taken = tensor.index_select(0, selected)
    if device.type == "cuda":
        return taken.pin_memory().to(device, non_blocking=True)
    return taken.to(device)
