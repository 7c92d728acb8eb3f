"""Summing the backbone's gradients over the ranks."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plsc.parallel.sharding import is_sharded, without_all_reduce
from plsc.parallel.world import World


def sum_gradients(network: nn.Module, world: World, bucket_mb: float = 25.0) -> nn.Module:
    """Wrap a network so that backward() leaves on every rank the SUM of the ranks' gradients.

    The head gives the gradient of the mean loss of the GLOBAL batch, so the sum of what the ranks find
    is the gradient; DDP's average would be too small by the number of ranks.

    bucket_mb: MiB of gradients that are summed at once, while the rest of backward() runs.
    """
    if world.size == 1:
        return network
    if not any(p.requires_grad for p in network.parameters()):
        _make_equal(network, world)
        return network
    # Buffers are made equal where it matters, before evaluating and saving, not at each step. torch
    # 2.15 renamed the option.
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {name: False}
    wrapped = DistributedDataParallel(
        _Replica(network),
        process_group=world.backbone_group,
        bucket_cap_mb=bucket_mb,
        # A gradient is where it is summed: no second copy of all gradients, nor the time to make it.
        gradient_as_bucket_view=True,
        # Without it DDP re-orders its buckets after the first step of every start, and with them the
        # order of the additions: a resumed run would differ from an uninterrupted one in the last bit.
        find_unused_parameters=True,
        **options,
    )
    wrapped.register_comm_hook(world.backbone_group, _sum_bucket)
    return wrapped


def without_sum(forward: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which backward() adds to this rank's gradients, to be summed over ranks later.

    Of a sharded network, see `plsc.parallel.sharding.without_all_reduce`.
    """
    if isinstance(forward, DistributedDataParallel):
        return forward.no_sync()
    return without_all_reduce(forward) if is_sharded(forward) else nullcontext()


class _Replica(nn.Module):
    """The network, and an empty parameter that is never used.

    Where all parameters are used, DDP warns on every rank that it looked for unused ones in vain.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        trained = next(p for p in network.parameters() if p.requires_grad)
        self.never_used = nn.Parameter(trained.new_empty(0))

    def forward(self, *inputs: Any) -> Any:
        return self.network(*inputs)


@torch.no_grad()
def _make_equal(network: nn.Module, world: World) -> None:
    """Give all ranks rank 0's parameters and buffers, as DDP does with a network that is trained."""
    for tensor in (*network.parameters(), *network.buffers()):
        value = tensor.detach().contiguous()
        dist.broadcast(value, group_src=0, group=world.backbone_group)
        tensor.copy_(value)


def _sum_bucket(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
