"""Data parallelism of the backbone with DDP.

Gradients are SUMMED over the ranks, not averaged, because the head returns the gradient of the mean loss of
the GLOBAL batch.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plsc.parallel.collectives import gather_rows, gather_sizes
from plsc.parallel.world import World


def sum_gradients(network: nn.Module, world: World, bucket_mb: float = 25.0) -> nn.Module:
    """Wrap a network in DDP so that backward() SUMS the gradients over the ranks.

    A step in which this rank uses all parameters does not wait for the device; in any other, DDP waits to
    read which ones the other ranks used.

    bucket_mb: size of a gradient bucket in MiB.
    """
    if world.size == 1:
        return network
    if not any(p.requires_grad for p in network.parameters()):
        _broadcast([*network.parameters(), *network.buffers()], world)
        return network
    _silence(world)
    # Buffers are synchronised before evaluation and saving instead of in each step. torch 2.15 renamed the
    # option.
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {name: False}
    wrapped = DistributedDataParallel(
        network,
        process_group=world.backbone_group,
        bucket_cap_mb=bucket_mb,
        # Saves a second copy of all gradients.
        gradient_as_bucket_view=True,
        # Otherwise DDP reorders its buckets after the first step of every start, which changes the order of
        # the additions: a resumed run would differ from an uninterrupted one in the last bits.
        find_unused_parameters=True,
        **options,
    )
    wrapped.register_comm_hook(world.backbone_group, _sum_bucket)
    # DDP's backward finds the wrapper by a weak reference, of which Python has one per object. If only the
    # graph holds it, a garbage collection in another thread can clear it during backward, which then fails:
    # torch's traversal of the graph is not synchronised with the autograd engine.
    wrapped.weak_reference = weakref.ref(wrapped)  # type: ignore[assignment]
    return wrapped


def no_gradient_sync(forward: nn.Module) -> AbstractContextManager[None]:
    """Context manager for micro-batches: backward() accumulates gradients without summing over all ranks."""
    return forward.no_sync() if isinstance(forward, DistributedDataParallel) else nullcontext()


class _WithPythonWarnings(torch.autograd.Function):
    """Calls a function; its warnings in C++ become Python's, which can be ignored."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, call: Callable[[], None]) -> Tensor:
        """Return an empty tensor."""
        call()
        return like.new_empty(0)


def _silence(world: World) -> None:
    """Cause and ignore DDP's warning that all parameters are used, which it prints once per process."""
    network = nn.Linear(1, 1, bias=False, device=world.device)
    group = world.backbone_group
    small = DistributedDataParallel(network, process_group=group, find_unused_parameters=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        used = network.weight.view(1)
        _WithPythonWarnings.apply(used, lambda: small.reducer.prepare_for_backward([used]))


@torch.no_grad()
def _broadcast(tensors: Iterable[Tensor], world: World) -> None:
    """Broadcast rank 0's values, as DDP does for networks with trainable parameters."""
    for tensor in tensors:
        value = tensor.detach().contiguous()
        dist.broadcast(value, group_src=0, group=world.backbone_group)
        tensor.copy_(value)


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if bucket.buffer().is_sparse:
        return _sum_sparse(group, bucket.buffer().coalesce())
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _sum_sparse(group: dist.ProcessGroup, gradient: Tensor) -> torch.futures.Future[torch.Tensor]:
    """Sum a coalesced gradient of rows [n, D] of an embedding; n differs between the ranks."""
    # NCCL has no all-reduce of sparse tensors.
    sizes = gather_sizes(gradient._nnz(), gradient.device, group)
    indices = gather_rows(gradient._indices()[0], sizes, group)
    values = gather_rows(gradient._values(), sizes, group)
    total = torch.sparse_coo_tensor(indices[None], values, gradient.shape, check_invariants=False)
    devices: Any = [gradient.device] if gradient.is_cuda else None
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(total.coalesce())
    return future


def gradient_values(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient, sharing its memory; sparse ones are coalesced."""
    return gradient._values() if gradient.is_sparse else gradient
