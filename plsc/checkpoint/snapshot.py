"""What a checkpoint is made of, as one rank has it: whole tensors, its rows of others, and the manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.checkpoint.manifest import Manifest, Role, TensorInfo
from plsc.checkpoint.shard_file import DTYPES
from plsc.errors import CheckpointError


@dataclass(frozen=True)
class ShardedTensor:
    """This rank's rows of a tensor whose rows are split over the ranks.

    local: [rows here, ...], possibly none. rows: of the whole tensor. start: number of the first local row.
    is_copy: a rank of another group has the same rows, and saves them.
    """

    local: Tensor
    rows: int
    start: int
    is_copy: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return (self.rows, *self.local.shape[1:])


Tensors = Mapping[Role, Tensor | ShardedTensor]


@dataclass(frozen=True)
class Snapshot:
    """A run's state at one step, as this rank has it; of the manifest all but tensors and files."""

    tensors: Tensors
    manifest: Manifest

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors that this rank holds."""
        return sum(local_of(value).nbytes for value in self.tensors.values())

    def copy_to_host(self) -> Snapshot:
        """Return a copy in this machine's memory, which training does not change.

        It takes as much memory as the state of this rank, until it is written.
        """
        copies: dict[Role, Tensor | ShardedTensor] = {}
        for role, value in self.tensors.items():
            if isinstance(value, ShardedTensor):
                copies[role] = dataclasses.replace(value, local=_copy(value.local))
            else:
                copies[role] = _copy(value)
        return Snapshot(copies, self.manifest)


def local_of(value: Tensor | ShardedTensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return value.local if isinstance(value, ShardedTensor) else value


def info_of(role: Role, value: Tensor | ShardedTensor) -> TensorInfo:
    """Return the manifest's entry for a tensor; CheckpointError for a type that checkpoints do not hold."""
    dtype = local_of(value).dtype
    if dtype not in DTYPES.values():
        raise CheckpointError(f"{role.key} is of {dtype}, which a checkpoint cannot hold")
    is_sharded = isinstance(value, ShardedTensor)
    return TensorInfo(tuple(value.shape), str(dtype).removeprefix("torch."), is_sharded, role)


def _copy(tensor: Tensor) -> Tensor:
    # Not on huge pages: where the system has to make them first, the copy takes twice as long.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
