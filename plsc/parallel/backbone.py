"""The backbone over the ranks: whole on each, with its gradients summed by DDP, or split by FSDP2.

The convention is the SUM of the ranks' gradients, no division: the head gives each rank the gradient of the
mean loss of the GLOBAL batch, so the sum of what the ranks find is the gradient.

Split (`fully_shard`), each rank keeps a share of the rows of every parameter, and of its gradient and
optimizer state, as a DTensor. A unit of the network is put together on all ranks just before its forward and
dropped behind it; its gradients are summed and split in one reduce-scatter. With shards over groups of fewer
ranks (HSDP) the groups have the same rows and add their gradients up.

Small units cost a collective each for little memory; a unit whose parameters are used while its forward does
not run would be found split. So a unit is a module that a trial run calls exactly once, and no parameter is
in two of them.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.
import datetime
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from plsc.errors import OptionError, did_you_mean
from plsc.parallel.collectives import class_range
from plsc.parallel.world import World


def sum_gradients(network: nn.Module, world: World, bucket_mb: float = 25.0) -> nn.Module:
    """Wrap a network so that backward() leaves on every rank the SUM of the ranks' gradients.

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


@contextmanager
def without_sum(forward: nn.Module) -> Iterator[None]:
    """Have backward() add to this rank's gradients, to be summed over the ranks later: for micro-batches.

    Of a sharded network the split gradients are added up within each group of shards, as whole ones would
    take the memory that sharding saves; over a single group every backward() sums over all ranks at once.
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


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


_DIMENSIONS = ("replicate", "shard")


def shard_network(
    network: nn.Module,
    units: Sequence[str],
    world: World,
    size: int,
    timeout: datetime.timedelta,
) -> None:
    """Split a network's parameters over groups of ``size`` ranks, in place; a collective of all ranks.

    The network comes to the ranks' device one unit after another, each of which is split before the next one
    follows: a network that is on the CPU needs no device that could hold it whole.

    The values are rank 0's, as DDP has it, so a network that was made differently on every rank becomes the
    same one. units: names of modules that are put together and dropped on their own; what is in none of them
    is whole from the network's forward to the end of its backward. size: a divisor of the number of
    ranks. timeout: of the groups' collectives.

    Afterwards all ranks must call the network, and backward through it, equally often.
    """
    mesh = _make_mesh(world, size, timeout)
    placed: set[Tensor] = set()
    for name in (*sorted(units, key=lambda unit: unit.count("."), reverse=True), ""):
        unit = network.get_submodule(name)
        whole = _place(unit, world, placed)
        fully_shard(unit, mesh=mesh)
        for parameter in whole:  # other code may still hold it, and with it the memory
            parameter.data = parameter.data.new_empty(0)
    for module in _sharded_modules(network):
        module.set_gradient_divide_factor(1.0)
        # By default a factor of 1 becomes an operation of NCCL's own, a sum of products, which gloo lacks.
        module.set_force_sum_reduction_for_comms(True)


def is_sharded(network: nn.Module) -> bool:
    """Whether `shard_network` has split this network."""
    return isinstance(network, FSDPModule)


def split_again(network: nn.Module) -> None:
    """Drop what a forward pass without a backward pass has left whole; nothing if it is not sharded."""
    for module in _sharded_modules(network):
        module.reshard()


def plain_name(network: nn.Module) -> str:
    """Return the name of a network's class, as it was before FSDP2 gave it one of its own."""
    kind = type(network)
    return kind.__name__.removeprefix("FSDP" if issubclass(kind, FSDPModule) else "")


@contextmanager
def whole_parameters(network: nn.Module) -> Iterator[None]:
    """Have all parameters whole on every rank: forward then needs no other rank. Entered by all ranks.

    For evaluation, where the ranks have different numbers of batches and one may fail alone. Takes the
    memory of all parameters. Nothing happens to a network that is not sharded. Do not ask for the
    network's state dict inside: that splits the parameters again.
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
    """Return this rank's rows of a split tensor, sharing its memory; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def split_rows(tensor: Tensor) -> tuple[int, DeviceMesh | None] | None:
    """Return where this rank's rows of a split tensor begin, and its mesh where there are several groups.

    None for a tensor that every rank has whole. Raises OptionError for one that is split otherwise than by
    its rows.
    """
    if not isinstance(tensor, DTensor):
        return None
    *groups, last = tensor.placements
    if last == Replicate():
        return None
    if last != Shard(0) or any(placement != Replicate() for placement in groups):
        raise OptionError(
            f"a tensor of the optimizer's state is placed as {tensor.placements}, which checkpoints do not "
            "hold; use an optimizer whose state is split like the parameters, by rows"
        )
    mesh = tensor.device_mesh
    place, places = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    start, _ = class_range(tensor.shape[0], place, places)
    return start, mesh if groups else None


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into ``target``, of which this rank perhaps has a share of the rows alone."""
    local, split = local_part(target), split_rows(target)
    local.copy_(value if split is None else value[split[0] : split[0] + len(local)])


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of whole and split gradients together, a scalar; a collective if some are split.

    All split ones are split in the same way. The result is identical on all ranks.
    """
    whole: list[Tensor] = []
    split: list[Tensor] = []
    group = None
    for gradient in gradients:
        if isinstance(gradient, DTensor) and split_rows(gradient) is not None:
            split.append(local_part(gradient))
            mesh = gradient.device_mesh
            group = mesh.get_group(mesh.ndim - 1)
        else:
            whole.append(local_part(gradient))
    norm = torch.nn.utils.get_total_norm(whole)
    if group is None:
        return norm
    squared = torch.nn.utils.get_total_norm(split).square()
    dist.all_reduce(squared, group=group)
    return squared.sqrt() if not whole else torch.hypot(norm.to(squared), squared.sqrt())


def _sharded_modules(network: nn.Module) -> list[FSDPModule]:
    """Return the network, first, and its units; nothing if it is not sharded."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def _make_mesh(world: World, size: int, timeout: datetime.timedelta) -> DeviceMesh:
    """Return the ranks as a mesh [shards], or [groups, shards of a group], neighbours in one group."""
    assert world.backbone_group is not None
    if size == world.size:
        return DeviceMesh.from_group(world.backbone_group, world.device.type)
    ranks = torch.arange(world.size).view(-1, size)
    shards = _own_group(ranks.tolist(), world.rank, timeout)
    copies = _own_group(ranks.T.tolist(), world.rank, timeout)
    return DeviceMesh.from_group([copies, shards], world.device.type, mesh=ranks, mesh_dim_names=_DIMENSIONS)


def _own_group(every: list[list[int]], rank: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Make the groups, all of them on every rank, and return the one that this rank is in."""
    made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in every]
    mine = next(group for ranks, group in made if rank in ranks)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


@torch.no_grad()
def _place(unit: nn.Module, world: World, placed: set[Tensor]) -> list[nn.Parameter]:
    """Put what is not split yet of a unit on the device, with rank 0's values, contiguous for `fully_shard`.

    placed: the buffers that are there already, which stay whole; those of this unit are added. Returns the
    parameters.
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
"""Parameters from which on an item of a Sequential or ModuleList, such as a residual block, is a unit."""

LEAST_OTHER = 1_000_000
"""The same for any other module, such as the layer that makes the embedding."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def choose_units(network: nn.Module, calls: Mapping[str, int]) -> list[str]:
    """Return the names of the modules to shard as units.

    These are the items of containers that have layers inside, if they have `LEAST_BLOCK` parameters, and
    elsewhere the smallest modules with `LEAST_OTHER`. calls: how often a trial run called each module.
    """
    return _without_shared(network, _collect(network, "", False, calls))


def match_units(network: nn.Module, patterns: Sequence[str], calls: Mapping[str, int]) -> list[str]:
    """Return the names of the modules that match patterns such as ``stages.*.*``.

    ``*`` stands for (a part of) one component of a name.

    Raises:
        OptionError: a pattern matches no module with parameters, or one that cannot be a unit.
    """
    names = [name for name, module in network.named_modules() if name and _size(module)]
    chosen: list[str] = []
    for pattern in patterns:
        matched = [name for name in names if _matches(name, pattern)]
        if not matched:
            raise OptionError(
                f"parallel.shard_units: no module with parameters is named {pattern!r}"
                f"{did_you_mean(pattern, names)}; '*' stands for one component, as in 'stages.*'"
            )
        chosen += [name for name in matched if name not in chosen]
    for name in chosen:
        if calls.get(name, 0) != 1:
            raise OptionError(
                f"parallel.shard_units: {name} is called {calls.get(name, 0)} times when the network runs; "
                "a unit must be called once: choose the module around it"
            )
    shared = set(chosen) - set(_without_shared(network, chosen))
    if shared:
        raise OptionError(
            f"parallel.shard_units: {', '.join(sorted(shared))} have a parameter that is used elsewhere, "
            "too; leave them out, or choose a module around all its uses"
        )
    return chosen


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _collect(module: nn.Module, name: str, is_item: bool, calls: Mapping[str, int]) -> list[str]:
    """Return the units in a module; is_item: whether it lies directly in a container."""
    is_container = type(module) in _CONTAINERS  # subclasses are layers with a name of their own
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
    """Return the units without those that have a parameter in common with anything outside."""
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
    """Return the innermost unit that a parameter is in; nothing for the network around them."""
    return max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default="")
