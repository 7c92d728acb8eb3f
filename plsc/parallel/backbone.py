"""Data parallelism of the backbone: replicated with DDP, or sharded with FSDP2.

Gradients are SUMMED over the ranks, not averaged, because the head returns the gradient of the mean loss of
the GLOBAL batch.

Sharded (`fully_shard`): each rank holds some rows of every parameter, gradient and optimizer state, as
DTensors. The parameters of a unit are all-gathered before its forward and freed afterwards; its gradients are
reduce-scattered. With shards over groups of fewer ranks (HSDP), gradients are also summed over the groups.

An FSDP unit is a module that one forward pass calls exactly once, and that shares no parameter with other
modules, because its parameters exist only during its forward. Small modules are no units, because each unit
costs a collective.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.
import datetime
import inspect
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from plsc.errors import OptionError, TrainingError, did_you_mean
from plsc.parallel.collectives import class_range, gather_rows, gather_sizes
from plsc.parallel.world import World


def sum_gradients(
    network: nn.Module, world: World, bucket_mb: float = 25.0, never_used: Collection[nn.Parameter] = ()
) -> nn.Module:
    """Wrap a network in DDP so that backward() SUMS the gradients over the ranks.

    A step in which this rank uses all parameters does not wait for the device.

    bucket_mb: size of a gradient bucket in MiB. never_used: parameters without gradients; should one of
    them get a gradient, `check_never_used` raises an error.
    """
    if world.size == 1:
        return network
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    idle = {name: p for name, p in trained.items() if any(p is one for one in never_used)}
    trained = {name: p for name, p in trained.items() if name not in idle}
    _broadcast([*idle.values()] if trained else [*network.parameters(), *network.buffers()], world)
    if not trained:
        return network
    # In each step without one of its parameters, DDP waits to read which ones the other ranks used.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, list(idle))
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
    wrapped.idle = idle  # type: ignore[assignment]
    # DDP's backward finds the wrapper by a weak reference, of which Python has one per object. If only the
    # graph holds it, a garbage collection in another thread can clear it during backward, which then fails:
    # torch's traversal of the graph is not synchronised with the autograd engine.
    wrapped.weak_reference = weakref.ref(wrapped)  # type: ignore[assignment]
    return wrapped


@contextmanager
def no_gradient_sync(forward: nn.Module) -> Iterator[None]:
    """Context manager for micro-batches: backward() accumulates gradients without summing over all ranks.

    The gradients of a sharded network are still reduce-scattered within each group of shards, because
    unsharded gradients would need the memory that sharding saves.
    """
    if isinstance(forward, DistributedDataParallel):
        with forward.no_sync():
            yield
        return
    if isinstance(forward, FSDPModule):
        forward.set_requires_all_reduce(False)
    try:
        yield
    finally:
        if isinstance(forward, FSDPModule):
            forward.set_requires_all_reduce(True)


def check_never_used(forward: nn.Module) -> None:
    """Raise TrainingError if a parameter that the network used in no dry run has a gradient."""
    for name, parameter in getattr(forward, "idle", {}).items():
        if parameter.grad is not None:
            raise TrainingError(
                f"the network uses the parameter {name}, but it did not for blank images, so its gradient is "
                "not summed over the ranks; use it in every step, such as with a factor of 0"
            )


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


_DIMENSIONS = ("replicate", "shard")


def shard_network(
    network: nn.Module, units: Sequence[str], world: World, size: int, timeout: datetime.timedelta
) -> None:
    """Shard a network's parameters over groups of ``size`` ranks, in place; a collective of all ranks.

    All ranks get rank 0's values. Units are moved to the device and sharded one after another, so a network
    on the CPU never has to fit on the device as a whole. Afterwards all ranks must call forward and backward
    equally often.

    Args:
        network: the backbone.
        units: names of the modules to all-gather and free separately. Parameters outside of them are
            gathered from the start of the network's forward to the end of its backward.
        world: the ranks.
        size: number of ranks per group, a divisor of the number of ranks.
        timeout: of the groups' collectives.
    """
    mesh = _make_mesh(world, size, timeout)
    placed: set[Tensor] = set()
    for name in (*sorted(units, key=lambda unit: unit.count("."), reverse=True), ""):
        unit = network.get_submodule(name)
        unsharded = _place(unit, world, placed)
        fully_shard(unit, mesh=mesh)
        for parameter in unsharded:  # free the memory, also if other code still references the parameter
            parameter.data = parameter.data.new_empty(0)
    for module in _sharded_modules(network):
        module.set_gradient_divide_factor(1.0)
        # By default a factor of 1 uses an operation that only NCCL has.
        module.set_force_sum_reduction_for_comms(True)


def is_sharded(network: nn.Module) -> bool:
    """Return whether `shard_network` sharded this network."""
    return isinstance(network, FSDPModule)


def reshard(network: nn.Module) -> None:
    """Free parameters that a forward pass without backward pass left unsharded, if the network is sharded."""
    for module in _sharded_modules(network):
        module.reshard()


def original_class_name(network: nn.Module) -> str:
    """Return the name of a network's class without the prefix that FSDP2 adds."""
    kind = type(network)
    return kind.__name__.removeprefix("FSDP" if issubclass(kind, FSDPModule) else "")


@contextmanager
def unsharded_parameters(network: nn.Module) -> Iterator[None]:
    """Context manager: all-gather all parameters, so that forward needs no communication; a collective.

    For evaluation, where the ranks have different numbers of batches and one may fail alone. Needs the memory
    of all parameters. Does nothing if the network is not sharded. Do not call the network's state_dict()
    inside: it reshards the parameters.
    """
    modules = _sharded_modules(network)
    for module in modules:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not network, recurse=False)
            module.reshard()


def local_part(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, sharing its memory; any other tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def gradient_values(gradient: Tensor) -> Tensor:
    """Return the numbers of this rank's part of a gradient, sharing its memory; sparse ones are coalesced."""
    local = local_part(gradient)
    return local._values() if local.is_sparse else local


def split_rows(tensor: Tensor) -> tuple[int, DeviceMesh | None] | None:
    """Return the first row of this rank's shard, and the mesh if there are several groups (else None).

    Returns None for a tensor that is not sharded. Raises OptionError for one that is not sharded by rows.
    """
    if not isinstance(tensor, DTensor):
        return None
    *groups, last = tensor.placements
    if last == Replicate():
        return None
    if last != Shard(0) or any(placement != Replicate() for placement in groups):
        raise OptionError(
            f"a tensor of the optimizer state has the placements {tensor.placements}, which checkpoints do "
            "not support; use an optimizer whose state is sharded by rows, like the parameters"
        )
    mesh = tensor.device_mesh
    shard, shards = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    start, _ = class_range(tensor.shape[0], shard, shards)
    return start, mesh if groups else None


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy a full tensor into ``target``, which may be sharded."""
    local, split = local_part(target), split_rows(target)
    local.copy_(value if split is None else value[split[0] : split[0] + len(local)])


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of replicated and sharded gradients, a scalar; a collective if some are sharded.

    All sharded gradients must have the same mesh. The result is identical on all ranks.
    """
    replicated: list[Tensor] = []
    sharded: list[Tensor] = []
    group = None
    for gradient in gradients:
        if isinstance(gradient, DTensor) and split_rows(gradient) is not None:
            sharded.append(local_part(gradient))
            mesh = gradient.device_mesh
            group = mesh.get_group(mesh.ndim - 1)
        else:
            replicated.append(gradient_values(gradient))
    norm = torch.nn.utils.get_total_norm(replicated)
    if group is None:
        return norm
    squared = torch.nn.utils.get_total_norm(sharded).square()
    dist.all_reduce(squared, group=group)
    return squared.sqrt() if not replicated else torch.hypot(norm.to(squared), squared.sqrt())


def _sharded_modules(network: nn.Module) -> list[FSDPModule]:
    """Return the network followed by its units; empty if it is not sharded."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def _make_mesh(world: World, size: int, timeout: datetime.timedelta) -> DeviceMesh:
    """Return the mesh [shards] or [groups, shards]; consecutive ranks form a group."""
    assert world.backbone_group is not None
    if size == world.size:
        return DeviceMesh.from_group(world.backbone_group, world.device.type)
    ranks = torch.arange(world.size).view(-1, size)
    shards = _group_of_rank(ranks.tolist(), world.rank, timeout)
    copies = _group_of_rank(ranks.T.tolist(), world.rank, timeout)
    return DeviceMesh.from_group([copies, shards], world.device.type, mesh=ranks, mesh_dim_names=_DIMENSIONS)


def _group_of_rank(every: list[list[int]], rank: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Create all groups (every rank must), and return the one that this rank is in."""
    made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in every]
    mine = next(group for ranks, group in made if rank in ranks)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


@torch.no_grad()
def _place(unit: nn.Module, world: World, placed: set[Tensor]) -> list[nn.Parameter]:
    """Move the unsharded tensors of a unit to the device and broadcast rank 0's values.

    Returns the parameters.

    placed: buffers that are already on the device; those of this unit are added.
    """
    parameters: list[nn.Parameter] = []
    for tensor in (*unit.parameters(), *unit.buffers()):
        if isinstance(tensor, DTensor) or tensor in placed:
            continue
        tensor.data = tensor.data.to(world.device)
        if isinstance(tensor, nn.Parameter):
            tensor.data = tensor.data.contiguous()
            parameters.append(tensor)
        else:
            placed.add(tensor)
        dist.broadcast(tensor.data, group_src=0, group=world.backbone_group)
    return parameters


LEAST_BLOCK = 100_000
"""Minimum number of parameters of an item of a Sequential or ModuleList (a residual block) to be a unit."""

LEAST_OTHER = 1_000_000
"""Minimum number of parameters of any other module (such as the embedding layer) to be a unit."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def choose_units(network: nn.Module, calls: Mapping[str, int]) -> list[str]:
    """Return the names of the modules to shard as units.

    These are items of containers with child modules and `LEAST_BLOCK` parameters, and elsewhere the smallest
    modules with `LEAST_OTHER` parameters. calls: number of calls of each module in one forward pass.
    """
    return _without_shared(network, _collect(network, "", False, calls))


def match_units(network: nn.Module, patterns: Sequence[str], calls: Mapping[str, int]) -> list[str]:
    """Return the names of the modules that match patterns such as ``stages.*.*``.

    ``*`` matches any characters within one component of a name.

    Raises:
        OptionError: a pattern matches no module with parameters, or a module that cannot be a unit.
    """
    names = [name for name, module in network.named_modules() if name and _size(module)]
    chosen: list[str] = []
    for pattern in patterns:
        matched = [name for name in names if _matches(name, pattern)]
        if not matched:
            raise OptionError(
                f"parallel.shard_units: {pattern!r} matches no module with parameters"
                f"{did_you_mean(pattern, names)}; '*' matches one component, as in 'stages.*'"
            )
        chosen += [name for name in matched if name not in chosen]
    for name in chosen:
        if calls.get(name, 0) != 1:
            raise OptionError(
                f"parallel.shard_units: a forward pass calls {name} {calls.get(name, 0)} times, expected "
                "once; use its parent module instead"
            )
    shared = set(chosen) - set(_without_shared(network, chosen))
    if shared:
        raise OptionError(
            f"parallel.shard_units: {', '.join(sorted(shared))} share a parameter with other modules; leave "
            "them out, or use a common parent module"
        )
    return chosen


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _collect(module: nn.Module, name: str, is_item: bool, calls: Mapping[str, int]) -> list[str]:
    """Return the units in a module; is_item: whether it is a direct child of a container."""
    is_container = type(module) in _CONTAINERS  # exact types: subclasses are ordinary modules
    may_be = bool(name) and not is_container and calls.get(name, 0) == 1
    has_layers = next(module.children(), None) is not None
    if may_be and is_item and has_layers and _size(module) >= LEAST_BLOCK:
        return [name]
    inside = [
        unit
        for child_name, child in module.named_children()
        for unit in _collect(child, f"{name}.{child_name}" if name else child_name, is_container, calls)
    ]
    if inside or not may_be or _size(module) < LEAST_OTHER:
        return inside
    return [name]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _without_shared(network: nn.Module, units: Sequence[str]) -> list[str]:
    """Return the units that share no parameter with modules outside of them."""
    kept = list(units)
    while True:
        owners: dict[int, set[str]] = {}
        for name, parameter in network.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), set()).add(_owner(name, kept))
        shared = set().union(*(one for one in owners.values() if len(one) > 1))
        if not shared & set(kept):
            return kept
        kept = [name for name in kept if name not in shared]


def _owner(name: str, units: Sequence[str]) -> str:
    """Return the innermost unit that contains a parameter; empty if none does."""
    return max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default="")
