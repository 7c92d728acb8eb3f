"""Data parallelism of the backbone: DDP, batch norm over all ranks, equal buffers, dropout per sample.

Gradients are SUMMED over the ranks, not averaged, because the head returns the gradient of the mean loss of
the GLOBAL batch. The results of the layers do not depend on the number of ranks.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from plsc.parallel.world import World, all_gather, gather_rows, gather_sizes, span


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


# Batch norm and buffers.


def synchronise_batch_norm(
    module: nn.Module, group: dist.ProcessGroup | None, device: torch.device | None = None
) -> nn.Module:
    """Make every batch norm of ``module`` compute its statistics over all ranks of ``group``.

    Replaces the layers in place, with the same parameters, buffers and state-dict keys: by torch's
    SyncBatchNorm on CUDA, and by this module's on other devices, which torch's does not support. Returns
    ``module``, or its replacement if it is a batch norm itself. Does nothing without a group or for one rank.

    device: where the module will compute; None: where it is now.
    """
    if group is None or group.size() == 1:
        return module
    devices = {p.device.type for p in module.parameters()} if device is None else {device.type}
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
    for layer in [] if "cuda" in devices else converted.modules():
        if isinstance(layer, nn.SyncBatchNorm):
            layer.__class__ = SyncBatchNorm  # type: ignore[assignment]
    return converted


class SyncBatchNorm(_BatchNorm):
    """Batch norm [b, C, ...] with training statistics over the batches of all ranks.

    The batch sizes of the ranks may differ and may be 0. The gradients of weight and bias are local sums, to
    be summed over the ranks. All ranks must call forward and backward equally often. In evaluation mode it is
    an ordinary batch norm. It does not derive from torch's SyncBatchNorm, which DDP rejects on CPUs.
    """

    process_group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` [b, C, ...].

        Raises:
            ValueError: fewer than two values per channel in the global batch.
        """
        if not self.training:
            return super().forward(input)
        count, mean, variance = _global_statistics(input.detach(), self.process_group)
        self._update_running(count, mean, variance)
        return _Normalise.apply(
            input, self.weight, self.bias, mean, variance, count, self.eps, self.process_group
        )

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept inputs with any number of dimensions."""

    @torch.no_grad()
    def _update_running(self, count: int, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


@torch.no_grad()
def _global_statistics(input: Tensor, group: dist.ProcessGroup) -> tuple[int, Tensor, Tensor]:
    """Return the number of values per channel on all ranks, their mean [C] and biased variance [C].

    Combines each rank's mean and sum of squared deviations M2 as in Chan, Golub and LeVeque 1979, which
    avoids cancellation. It uses fp64 and the same order on every rank, so that all ranks get the same bits.
    """
    channels = input.size(1)
    values = input.to(_work_type(input.dtype)).transpose(0, 1).reshape(channels, -1)
    local_count = values.size(1)
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    mine[0] = local_count
    if local_count > 0:
        variance, mean = torch.var_mean(values, dim=1, correction=0)
        mine[1 : channels + 1] = mean
        mine[channels + 1 :] = variance.double() * local_count
    gathered = mine.new_empty(group.size() * mine.numel())
    with span("batch norm over ranks"):
        all_gather(gathered, mine, group)
    gathered = gathered.view(group.size(), -1)
    counts, means, m2 = gathered.split([1, channels, channels], dim=1)
    count = int(counts.sum())
    if count < 2:
        raise ValueError(
            f"the global batch has {count} value per channel; batch norm needs 2 or more in training"
        )
    mean = (counts * means).sum(0) / count
    m2 = m2.sum(0) + (counts * (means - mean) ** 2).sum(0)
    return count, mean, m2 / count


class _Normalise(torch.autograd.Function):
    """y = w (x - mean) / sqrt(variance + eps) + bias, where mean and variance depend on x.

    With z the normalised x, n the global count and sums over all ranks,
    dx = w / sqrt(variance + eps) (dy - sum(dy) / n - z sum(dy z) / n).
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: int,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        work = _work_type(input.dtype)
        mean, inverse = mean.to(work), (variance + eps).rsqrt().to(work)
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.count, ctx.group = count, group
        output = _standardise(input, mean, inverse)
        if weight is not None:
            output.mul_(_per_channel(weight, input))
        if bias is not None:
            output.add_(_per_channel(bias, input))
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        normalised = _standardise(input, mean, inverse)
        d_output = gradients[0].to(normalised.dtype)
        others = [axis for axis in range(input.dim()) if axis != 1]
        d_bias = d_output.sum(others)
        d_weight = (d_output * normalised).sum(others)
        d_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([d_bias, d_weight])
            with span("batch norm over ranks"):
                dist.all_reduce(sums, group=ctx.group)
            mean_d, mean_dz = sums / ctx.count
            scale = inverse if weight is None else inverse * weight
            d_input = normalised.mul_(_per_channel(mean_dz, input)).neg_().add_(d_output)
            d_input.sub_(_per_channel(mean_d, input)).mul_(_per_channel(scale, input))
            d_input = d_input.to(input.dtype)
        if weight is None:
            return (d_input, *[None] * 7)
        return (d_input, d_weight.to(weight.dtype), d_bias.to(weight.dtype), *[None] * 5)


def _work_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _standardise(input: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    return (input - _per_channel(mean, input)).mul_(_per_channel(inverse, input))


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (like.dim() - 2))


@contextmanager
def equal_buffers(module: nn.Module, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Context manager: `equalise_buffers` inside, and each rank's own buffers again afterwards."""
    own = [buffer.detach().clone() for buffer in module.buffers()]
    equalise_buffers(module, group)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, mine in zip(module.buffers(), own, strict=True):
                buffer.copy_(mine)


@torch.no_grad()
def equalise_buffers(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Synchronise the saved buffers of ``module`` over the ranks of ``group``, in place; a collective.

    Floating point buffers (running statistics) become the mean over the ranks, all others are copied from
    rank 0 of the group. Otherwise each rank would have the running statistics of its own samples.
    """
    if group is None or group.size() == 1:
        return
    saved = set(module.state_dict())
    buffers = [buffer for name, buffer in module.named_buffers() if name in saved]
    averaged = [buffer for buffer in buffers if buffer.is_floating_point()]
    if averaged:
        # In fp64, so that equal fp32 buffers keep their bits.
        flat = torch.cat([buffer.double().flatten() for buffer in averaged])
        dist.all_reduce(flat, group=group)
        flat /= group.size()
        for buffer, mean in zip(averaged, flat.split([b.numel() for b in averaged]), strict=True):
            buffer.copy_(mean.view_as(buffer))
    for buffer in buffers:
        if not buffer.is_floating_point():
            dist.broadcast(buffer, group_src=0, group=group)


# Dropout.

_GOLDEN = -1640531527  # 0x9E3779B9 as int32
_DROPOUTS: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}


class SampleNumbers:
    """The sample numbers of the current batch, shared by all `SampleDropout` layers of a network.

    layers: number of these layers. numbers: int64 [b], on the inputs' device; None: unknown.
    """

    def __init__(self) -> None:
        self.layers = 0
        self.numbers: Tensor | None = None


def use_sample_dropout(network: nn.Module) -> SampleNumbers:
    """Replace a network's dropout layers by `SampleDropout`, in place; return their `SampleNumbers`.

    Replaces layers of exactly the types nn.Dropout, Dropout1d, Dropout2d and Dropout3d, but no calls of
    F.dropout.
    """
    samples = SampleNumbers()
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, SampleDropout):  # of an earlier run
                child.samples = samples
            elif isinstance(child, _DropoutNd) and type(child) in _DROPOUTS:
                layer = SampleDropout(child.p, _DROPOUTS[type(child)], samples)
                setattr(module, name, layer.train(child.training))
            else:
                continue
            samples.layers += 1
    return samples


class SampleDropout(nn.Module):
    """Dropout of elements [b, ...], or of channels [b, C, ...], that is reproducible per sample.

    The mask depends on the sample number and one draw from torch's CPU generator, which is identical on all
    ranks; recomputation restores that generator. If the first dimension of the input is not the
    number of samples, this is ordinary dropout.

    p: probability of an element to be zeroed. whole_channels: drop channels, as nn.Dropout2d.
    """

    def __init__(self, p: float, whole_channels: bool, samples: SampleNumbers) -> None:
        super().__init__()
        self.p = p
        self.whole_channels = whole_channels
        self.samples = samples

    def forward(self, input: Tensor) -> Tensor:
        """Zero elements with probability p and scale the others by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return input
        numbers = self.samples.numbers
        fits = input.ndim > (2 if self.whole_channels else 0)
        if numbers is None or not fits or len(numbers) != len(input):
            drop = torch.feature_dropout if self.whole_channels else F.dropout
            return drop(input, self.p, True)
        drawn = torch.randint(2**31 - 1, ())
        # An int would be a constant of the compiled code and trigger a recompilation in each step.
        is_compiling = torch.compiler.is_compiling()
        key = drawn.to(numbers.device) if is_compiling else int(drawn)
        shape = input.shape[:2] if self.whole_channels else input.shape
        mask = keep_mask(numbers, shape[1:].numel(), self.p, key).view(shape)
        scaled = mask.to(input.dtype) * (1 / (1 - self.p) if self.p < 1 else 0.0)
        return input * scaled.view(*shape, *[1] * (input.ndim - len(shape)))


def keep_mask(numbers: Tensor, count: int, p: float, key: int | Tensor) -> Tensor:
    """Return a bool mask [b, count] that is True with probability 1 - p, from (key, number, position) only.

    numbers: sample numbers, int64 [b]. key: below 2^31.
    """
    low, high = numbers.to(torch.int32), (numbers >> 32).to(torch.int32)
    rows = _mix(low ^ _mix(high ^ key))
    columns = torch.arange(count, dtype=torch.int32, device=numbers.device) * _GOLDEN
    bits = _mix(rows[:, None] ^ columns)
    return bits >= min(int(p * 2**32) - 2**31, 2**31 - 1)


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers (Wellons' lowbias32) into a new tensor; products wrap."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -2073254261  # 0x846CA68B as int32
    x ^= (x >> 16) & 0xFFFF
    return x
