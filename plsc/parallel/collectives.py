"""Collectives that know gradients and uneven batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_sizes(rows: int, device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    """Return how many rows every rank brings."""
    if group is None:
        return [rows]
    sizes = torch.empty(group.size(), dtype=torch.int64, device=device)
    mine = torch.tensor([rows], dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, mine, group=group)
    return sizes.tolist()


def gather_rows(tensor: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows of all ranks [sum(sizes), ...], in rank order, on every rank.

    Differentiable: a rank receives the sum, over the ranks, of the gradients of its own rows.
    """
    if group is None:
        return tensor
    return _GatherRows.apply(tensor, sizes, group)


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add the tensors of all ranks, in place, and return it. Not differentiable."""
    if group is not None:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


def max_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Take the element-wise maximum over all ranks, in place, and return it. Not differentiable."""
    if group is not None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


class _GatherRows(torch.autograd.Function):
    """all_gather forward, reduce_scatter backward.

    Both move equal blocks, so uneven batches are padded to the largest.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        largest = max(sizes)
        padded = _pad_rows(tensor, largest)
        gathered = tensor.new_empty((len(sizes) * largest, *tensor.shape[1:]))
        dist.all_gather_into_tensor(gathered, padded, group=group)
        if min(sizes) == largest:
            return gathered
        blocks = gathered.split(largest)
        return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        largest = max(ctx.sizes)
        blocks = [_pad_rows(block, largest) for block in gradients[0].split(ctx.sizes)]
        mine = blocks[0].new_empty(blocks[0].shape)
        dist.reduce_scatter_tensor(mine, torch.cat(blocks), group=ctx.group)
        return mine[: ctx.sizes[ctx.group.rank()]], None, None


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - len(tensor)
    if missing == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])
