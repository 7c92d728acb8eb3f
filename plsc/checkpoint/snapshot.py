"""A run's state at one step, as this rank has it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint.layout import ShardedTensor
from plsc.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Snapshot:
    """What `save_checkpoint` takes: whole tensors, this rank's rows, and all that is no tensor."""

    tensors: dict[str, Tensor]
    sharded: dict[str, ShardedTensor]
    manifest: Manifest


def size_of(state: Snapshot) -> int:
    """Return the bytes of the tensors that this rank holds."""
    tensors = [*state.tensors.values(), *(part.local for part in state.sharded.values())]
    return sum(tensor.nbytes for tensor in tensors)


def copy_to_host(state: Snapshot) -> Snapshot:
    """Return a copy in this machine's memory, which training does not change.

    It takes as much memory as the state of this rank, until it is written.
    """
    whole = {key: _copy(tensor) for key, tensor in state.tensors.items()}
    parts = {
        key: dataclasses.replace(part, local=_copy(part.local))
        for key, part in state.sharded.items()
    }
    return Snapshot(whole, parts, state.manifest)


def _copy(tensor: Tensor) -> Tensor:
    # numpy asks the system for huge pages and torch does not: without, a third of the time in which training
    # waits goes into page faults.
    room = torch.from_numpy(np.empty(max(tensor.nbytes, tensor.itemsize), np.uint8))
    room = room.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
    return room.copy_(tensor.detach())
