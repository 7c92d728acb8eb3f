"""The ranks: number, device and process groups, created once and passed along; and what they exchange.

No other module reads the launcher's environment variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plsc.errors import LAUNCH_PREFIX, DistributedError, OptionError, PlscError, kind_and_line, shown
from plsc.values import from_bytes, to_bytes

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 5.0  # a failed rank never arrives


@dataclass(frozen=True)
class World:
    """Rank, world size, device and process groups of this process; the groups are None for one process.

    Attributes:
        backbone_group: gradients of the backbone.
        head_group: the head; separate, so that its collectives do not queue behind gradient buckets.
        control_group: small messages on the CPU (gloo).
        save_group: saving of checkpoints in a background thread (gloo).
        upload_group: uploading of checkpoints in another background thread (gloo).
        store: a part of the rendezvous store for this world only.
        owns_process_group: this world created the default process group, and destroys it in `close`.
        launch_id: identifies torchrun's agent on this machine, which restarts failed ranks; empty: none.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backbone_group: dist.ProcessGroup | None = None
    head_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    save_group: dist.ProcessGroup | None = None
    upload_group: dist.ProcessGroup | None = None
    store: dist.Store | None = None
    owns_process_group: bool = False
    launch_id: str = ""

    @staticmethod
    def single(device: str = "cpu") -> World:
        """Return the world of a single process, without process groups."""
        return World(0, 1, 0, torch.device(device))

    @staticmethod
    def from_environment(
        device: str = "auto",
        backend: str = "auto",
        timeout_seconds: float = 1800.0,
        *,
        init_method: str = "env://",
        rank: int | None = None,
        size: int | None = None,
        store: dist.Store | None = None,
    ) -> World:
        """Join the ranks started by torchrun or another launcher; without one, a single process.

        A default process group that the script has already created is used and not destroyed.

        Args:
            device: auto, cpu or cuda.
            backend: of the collectives: auto, gloo, nccl or mpi.
            timeout_seconds: how long a rank waits for the others.
            init_method: where the ranks meet: env://, tcp://host:port or file:///path.
            rank, size: of this process, and the number of ranks; None: those of the environment.
            store: where the ranks meet instead.

        Raises:
            OptionError: the device or backend is not available, or the rank or world size is unknown.
            DistributedError: the ranks cannot connect.
        """
        already_made = dist.is_initialized()
        if already_made:
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = _rank_and_size(rank, size, may_be_alone=init_method == "env://" and store is None)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        chosen = _choose_device(device, local_rank)
        launch_id = _launch_id()
        if size == 1:
            return World(0, 1, local_rank, chosen, launch_id=launch_id)
        timeout = datetime.timedelta(seconds=timeout_seconds)
        if backend == "auto":
            backend = "nccl" if chosen.type == "cuda" else "gloo"
        try:
            if not already_made:
                if init_method == "env://":
                    store = store or _store_of_launcher(timeout)
                meeting = store or next(dist.rendezvous(init_method, rank, size, timeout=timeout))[0]
                meeting = unused_store(meeting, rank, size, timeout_seconds)
                local_rank = _find_local_rank(meeting, rank)
                chosen = _choose_device(device, local_rank)
            if chosen.type == "cuda":
                torch.cuda.set_device(chosen)
            if not already_made:
                # An MPI group has no store, which the other groups need.
                first = "gloo" if backend == "mpi" else backend
                dist.init_process_group(first, store=meeting, rank=rank, world_size=size, timeout=timeout)
            world = World(
                rank, size, local_rank, chosen, owns_process_group=not already_made, launch_id=launch_id
            )
            world = _with_groups(world, backend, timeout)
        except PlscError:
            raise
        except (RuntimeError, ValueError, TimeoutError) as error:
            place = init_method if store is None else "a store"
            if place == "env://":
                place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise DistributedError(
                f"rank {rank} of {size} could not connect to the other ranks over {backend} at "
                f"{place}: {kind_and_line(error)}; start all ranks with plsc launch or "
                "torchrun, and see docs/launch.md for the network interface"
            ) from error
        _check_own_gpu(world)
        return world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes files."""
        return self.rank == 0

    def log(self, text: str | None, level: int = logging.INFO) -> None:
        """Log a message, line by line, on rank 0."""
        for line in text.splitlines() if text and self.is_main else ():
            logger.log(level, shown(line))

    def in_background(self, group: dist.ProcessGroup | None) -> World:
        """Return a copy for a background thread that uses only this gloo group."""
        return dataclasses.replace(
            self,
            device=torch.device("cpu"),
            backbone_group=group,
            head_group=group,
            control_group=group,
            owns_process_group=False,
        )

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.control_group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; of the types of `plsc.values.encode`."""
        if self.size == 1:
            return [value]
        data = to_bytes(value)
        sizes = [size for [size] in self.gather_numbers(len(data))]
        parts = self._gather(torch.frombuffer(data.ljust(max(sizes)), dtype=torch.uint8))
        return [from_bytes(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value on every rank, of the types of `all_gather_object`."""
        if self.size == 1:
            return value
        data = to_bytes(value) if self.is_main else bytearray()
        size = self.gather_numbers(len(data))[0][0]
        received = torch.frombuffer(data.ljust(size), dtype=torch.uint8)
        dist.broadcast(received, group_src=0, group=self.control_group)
        return from_bytes(received.numpy().tobytes())

    def gather_numbers(self, *values: int) -> list[list[int]]:
        """All-gather integers, equally many per rank, in rank order; one small collective on the CPU."""
        if self.size == 1:
            return [list(values)]
        return [part.tolist() for part in self._gather(torch.tensor(values, dtype=torch.int64))]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.control_group)
        return parts

    def all_reduce_max(self, *values: int) -> list[int]:
        """Return the maximum of each integer over the ranks; one small collective on the CPU."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control_group)
        return [int(value) for value in tensor]

    def close(self, wait: bool = True) -> None:
        """Destroy the process groups if this world created them.

        wait: wait up to `_LEAVE_SECONDS` for the other ranks, because a slower rank may still be in the last
        collective.
        """
        if self.owns_process_group and dist.is_initialized():
            if wait:
                self._wait_for_all_to_leave()
            dist.destroy_process_group()

    def _wait_for_all_to_leave(self) -> None:
        if self.store is None:
            return
        deadline = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(RuntimeError):  # the host of the store is already gone
            leaving = self.store.add("leaving", 1)
            while leaving < self.size and time.monotonic() < deadline:
                time.sleep(0.01)
                leaving = self.store.add("leaving", 0)


def _rank_and_size(rank: int | None, size: int | None, may_be_alone: bool) -> tuple[int, int]:
    """Return rank and world size: those given, else the environment's; 0 and 1 without a launcher."""
    environment = os.environ if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else {}
    rank = int(environment.get("RANK", "-1")) if rank is None else rank
    size = int(environment.get("WORLD_SIZE", "0")) if size is None else size
    if rank < 0 and not size and may_be_alone:
        return 0, 1
    if not 0 <= rank < size:
        raise OptionError(
            f"rank is {rank if rank >= 0 else 'not set'} and world size {size or 'not set'}; expected a rank "
            "from 0 to world size - 1; set runtime.rank and runtime.world_size"
        )
    return rank, size


def _find_local_rank(store: dist.Store, rank: int) -> int:
    """Return LOCAL_RANK of the environment, else the number of lower ranks on this machine."""
    store.set(f"host/{rank}", socket.gethostname())
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    hosts = [store.get(f"host/{lower}").decode() for lower in range(rank)]
    return hosts.count(socket.gethostname())


def _store_of_launcher(timeout: datetime.timedelta) -> dist.Store | None:
    """Return a store in the private folder of `plsc launch`, if all ranks are on this machine, else None.

    A TCPStore lets in every user who can connect.
    """
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent  # new for each restart
    is_alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    if not is_alone or not attempt.parent.parent.name.startswith(LAUNCH_PREFIX):
        return None
    store = dist.FileStore(str(attempt / "store"))
    store.set_timeout(timeout)
    return store


def _with_groups(world: World, backend: str, timeout: datetime.timedelta) -> World:
    """Return the world with process groups, and a part of the store; a collective."""
    backbone_group = _new_group(backend, timeout) if backend == "mpi" else dist.group.WORLD
    head_group = _new_group(backend, timeout)
    # One group per thread: collectives of two threads in one group would pair up in any order.
    control_group, save_group, upload_group = (_new_group("gloo", timeout) for _ in range(3))
    return dataclasses.replace(
        world,
        backbone_group=backbone_group,
        head_group=head_group,
        control_group=control_group,
        save_group=save_group,
        upload_group=upload_group,
        store=_private_store(control_group),
    )


def _new_group(backend: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    group: Any = dist.new_group(backend=backend, timeout=timeout)
    return group


def _private_store(control_group: dist.ProcessGroup) -> dist.Store:
    """Return a part of the rendezvous store that no other world uses, also none of terminated processes."""
    token = torch.frombuffer(bytearray(secrets.token_bytes(8)), dtype=torch.uint8)
    dist.broadcast(token, group_src=0, group=control_group)
    # torch has no public function for the default store.
    return dist.PrefixStore(
        f"plsc/{token.numpy().tobytes().hex()}", dist.distributed_c10d._get_default_store()
    )


def _launch_id() -> str:
    """Return an identifier of torchrun's agent; empty without one.

    Each agent creates a new folder for errors: <folder>/attempt_<n>/<local rank>/error.json. Its run id is
    not unique, and it is not always the parent process.
    """
    parents = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    if len(parents) < 3 or not parents[1].name.startswith("attempt_"):
        return ""
    return f"{socket.gethostname()}:{parents[2]}"


def _choose_device(device: str, local_rank: int) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1:  # as with `srun --gpus-per-task=1`; `_check_own_gpu` finds ranks with the same one
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise OptionError(
            f"local rank {local_rank} has no GPU: torch finds {count} on this machine; start that many ranks "
            "per machine, or set runtime.device to cpu"
        )
    return torch.device("cuda", local_rank)


def _check_own_gpu(world: World) -> None:
    """Raise OptionError on all ranks if two of them use the same physical GPU; a collective."""
    own = str(torch.cuda.get_device_properties(world.device).uuid) if world.device.type == "cuda" else ""
    ranks: dict[str, int] = {}
    for rank, gpu in enumerate(world.all_gather_object(own)):
        if gpu and ranks.setdefault(gpu, rank) != rank:
            raise OptionError(
                f"ranks {ranks[gpu]} and {rank} use the same GPU {gpu}; start one rank per GPU, or "
                "set runtime.device to cpu"
            )


_POLL_SECONDS = 0.02


def unused_store(store: dist.Store, rank: int, ranks: int, timeout_seconds: float) -> dist.Store:
    """Return a part of ``store`` that no earlier process has used, the same on all ranks; a collective.

    torchrun uses one store for all restarts. Keys of terminated ranks (such as their addresses) would be
    mistaken for those of the ranks that replace them. The environment does not identify a restart, because
    each agent counts restarts separately.

    Rank 0 draws a random name. Every other rank posts a random token and waits for the answer to this token.
    Rank 0 answers all tokens, also those of terminated processes, until every rank has confirmed the name.

    Raises TimeoutError if a rank does not arrive in time.
    """
    deadline = time.monotonic() + timeout_seconds
    if rank == 0:
        name = secrets.token_hex(8)
        _answer(store, name, ranks, deadline)
    else:
        token = secrets.token_hex(8)
        store.set(f"plsc/hello/{rank}", token)
        _wait_for(store, f"plsc/answer/{token}", deadline, "rank 0 did not arrive")
        name = store.get(f"plsc/answer/{token}").decode()
        store.set(f"plsc/confirmed/{name}/{rank}", "1")
    return dist.PrefixStore(f"plsc/{name}", store)


def _answer(store: dist.Store, name: str, ranks: int, deadline: float) -> None:
    missing = set(range(1, ranks))
    answered: set[bytes] = set()
    while missing:
        for rank in sorted(missing):
            if store.check([f"plsc/confirmed/{name}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"plsc/hello/{rank}"]):
                token = store.get(f"plsc/hello/{rank}")
                if token not in answered:
                    store.set(f"plsc/answer/{token.decode()}", name)
                    answered.add(token)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"rank {min(missing)} did not arrive")
        time.sleep(_POLL_SECONDS if missing else 0)


def _wait_for(store: dist.Store, key: str, deadline: float, problem: str) -> None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        time.sleep(_POLL_SECONDS)


# The classes of a rank.


def class_range(class_num: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return ``(start, stop)``, the classes of ``rank`` out of ``ranks``; may be empty.

    Rank r has [min(C, r k), min(C, (r + 1) k)) with k = ceil(C / R), exactly as DTensor's ``Shard(0)``.
    """
    rows = -(-class_num // ranks)
    return min(class_num, rank * rows), min(class_num, (rank + 1) * rows)


def class_ranges(class_num: int, ranks: int) -> list[tuple[int, int]]:
    """Return the range of every rank, in rank order."""
    return [class_range(class_num, rank, ranks) for rank in range(ranks)]


# Collectives for batches of different sizes.

PREFIX = "plsc: "  # of the phases of a step, as torch.profiler shows them


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Name a block, or a decorated function, for torch.profiler.

    Takes one microsecond without a profiler; `record_function` takes six.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.profiler.record_function(PREFIX + name):
            yield
    else:
        yield


# PyTorch 2.14 renamed both, and warns of the old names.
IS_RENAMED = hasattr(dist, "all_gather_single")
ALL_GATHER = "all_gather_single" if IS_RENAMED else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if IS_RENAMED else "reduce_scatter_tensor"


def all_gather(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> None:
    """Write the tensors of all ranks, which have one shape, into a tensor, in rank order."""
    getattr(dist, ALL_GATHER)(gathered, mine, group=group)


def gather_sizes(rows: int, device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    """Return the number of rows of every rank."""
    if group is None:
        return [rows]
    sizes = torch.empty(group.size(), dtype=torch.int64, device=device)
    mine = torch.tensor([rows], dtype=torch.int64, device=device)
    with span("gather batch"):
        all_gather(sizes, mine, group)
    return sizes.tolist()


def gather_rows(tensor: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows of all ranks [sum(sizes), ...], in rank order, on every rank. Not differentiable."""
    if group is None:
        return tensor
    largest = max(sizes)  # the collective needs equal sizes: pad smaller blocks
    gathered = tensor.new_empty((len(sizes) * largest, *tensor.shape[1:]))
    mine = _pad_rows(tensor, largest)
    with span("gather batch"):
        all_gather(gathered, mine, group)
    if min(sizes) == largest:
        return gathered
    blocks = gathered.split(largest)
    return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])


def gather_together(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the tensors of all ranks, each [R, ...] on every rank, by one collective. Not differentiable."""
    if group is None:
        return [tensor[None] for tensor in tensors]
    # As bytes, so that tensors of several types travel together.
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    gathered = gather_rows(torch.cat(parts)[None], [1] * group.size(), group)
    columns = gathered.split([len(part) for part in parts], dim=1)
    return [
        # A copy begins at an address that is aligned for any type.
        column.contiguous().view(tensor.dtype).view(-1, *tensor.shape)
        for column, tensor in zip(columns, tensors, strict=True)
    ]


def send_rows(tensor: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send each rank the rows of its own batch; return what all ranks sent, [ranks, sizes[rank], ...].

    tensor: [sum(sizes), ...] on every rank. Not differentiable.
    """
    if group is None:
        return tensor[None]
    mine, ranks = sizes[group.rank()], len(sizes)
    received = tensor.new_empty((ranks * mine, *tensor.shape[1:]))
    with span("gather batch"):
        dist.all_to_all_single(received, tensor.contiguous(), [mine] * ranks, sizes, group=group)
    return received.view(ranks, mine, *tensor.shape[1:])


class ScatteredSum:
    """An asynchronous reduce-scatter (sum) of rows.

    tensor: [sum(sizes), ...] on every rank. Rank r receives the sum of the sizes[r] rows of its own batch.
    """

    def __init__(self, tensor: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> None:
        self._work: dist.Work | None = None
        if group is None:
            self._mine = tensor
            return
        largest, rank = max(sizes), group.rank()
        blocks = tensor
        if min(sizes) < largest:  # as in gather_rows
            blocks = torch.cat([_pad_rows(block, largest) for block in tensor.split(sizes)])
        padded = tensor.new_empty((largest, *tensor.shape[1:]))
        self._sent = blocks  # must stay alive until the collective has finished
        self._work = getattr(dist, REDUCE_SCATTER)(padded, blocks, group=group, async_op=True)
        self._mine = padded[: sizes[rank]]

    def wait(self) -> Tensor:
        """Wait for the collective, and return the rows [sizes[rank], ...]."""
        if self._work is not None:
            with span("scatter embedding gradient"):
                self._work.wait()
            self._work = None
            del self._sent
        return self._mine


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add the tensors of all ranks, in place, and return it. Not differentiable."""
    if group is not None:
        with span("sum over ranks"):
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


def max_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Take the element-wise maximum over all ranks, in place, and return it. Not differentiable."""
    if group is not None:
        with span("sum over ranks"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - len(tensor)
    if missing == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


# Copies between a GPU and host memory that do not stop the computation.

_PIECE = 2**26  # bytes


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device; a copy from the CPU to a GPU is asynchronous."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # A copy from pageable memory would wait for all kernels in the queue.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Arriving:
    """A tensor whose values arrive in page-locked memory; a tensor on the CPU is there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._values, self._arrived = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Tensor:
        """Wait for the values and return them, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def host_copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies in pageable memory.

    Those from a GPU come through page-locked pieces: while one arrives, the one before it is moved on.
    """
    copies: list[Tensor] = []
    coming: deque[tuple[Tensor, Arriving]] = deque()

    def move() -> None:
        target, piece = coming.popleft()
        target.copy_(piece.read())

    for tensor in tensors:
        # No huge pages: where the kernel has to create them first, the copy takes twice as long.
        copies.append(torch.empty(tensor.shape, dtype=tensor.dtype))
        if not tensor.is_cuda:
            copies[-1].copy_(tensor)
            continue
        count = max(1, _PIECE // tensor.element_size())
        parts = copies[-1].view(-1).split(count), tensor.contiguous().view(-1).split(count)
        for target, piece in zip(*parts, strict=True):
            coming.append((target, Arriving(piece)))
            if len(coming) > 2:
                move()
    while coming:
        move()
    return copies
