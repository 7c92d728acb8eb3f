"""Rank, world size, device and process groups, made once and passed along.

Nothing else in the package reads the launcher's environment variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plsc.config.runtime import RuntimeOptions
from plsc.errors import DistributedError, OptionError, PlscError, kind_and_line

_LEAVE_SECONDS = 5.0  # a rank that failed never comes


@dataclass(frozen=True)
class World:
    """This process among its peers.

    The groups are separate so that head traffic does not queue behind gradient buckets, and so that
    control messages travel over gloo on the CPU whatever the device is; a checkpoint is saved and another
    one sent to a store in the background, in threads with a gloo group each. All are None in one process.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backbone_group: dist.ProcessGroup | None = None
    head_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    save_group: dist.ProcessGroup | None = None
    send_group: dist.ProcessGroup | None = None
    store: dist.Store | None = None
    owns_process_group: bool = False
    launch: str = ""  # torchrun's agent on this machine, which starts new ranks for failed ones

    @staticmethod
    def single(device: str = "cpu") -> World:
        """Return the world of one process, without any process group."""
        return World(0, 1, 0, torch.device(device))

    @staticmethod
    def from_environment(
        device: str = "auto", backend: str = "auto", timeout_seconds: float = 1800.0
    ) -> World:
        """Join the ranks that torchrun (or any env:// launcher) started, or stay alone without one."""
        return World.from_options(RuntimeOptions(device=device, backend=backend, timeout=timeout_seconds))

    @staticmethod
    def from_options(options: RuntimeOptions, store: dist.Store | None = None) -> World:
        """Join the other ranks at `init_method` or in a given store, or stay alone without a launcher.

        A process group that the script made itself is used and left standing at the end.

        Raises OptionError for a device, backend, rank or world size that is not there or cannot be,
        DistributedError when the ranks do not meet.
        """
        already_made = dist.is_initialized()
        rank, size = (
            (dist.get_rank(), dist.get_world_size()) if already_made else _rank_and_size(options, store)
        )
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        chosen = _choose_device(options.device, local_rank)
        launch = _launch()
        if size == 1:
            return World(0, 1, local_rank, chosen, launch=launch)
        backend, timeout = options.backend, datetime.timedelta(seconds=options.timeout)
        if backend == "auto":
            backend = "nccl" if chosen.type == "cuda" else "gloo"
        if backend == "mpi" and not dist.is_mpi_available():
            raise OptionError("backend is 'mpi', but this torch was built without MPI; use 'gloo' or 'nccl'")
        try:
            if not already_made:
                meeting = store
                if meeting is None:
                    meeting, _, _ = next(
                        iter(dist.rendezvous(options.init_method, rank, size, timeout=timeout))
                    )
                part = fresh_store(meeting, rank, size, options.timeout)
                part.set(f"host/{rank}", socket.gethostname())
                if "LOCAL_RANK" not in os.environ:
                    local_rank = _count_local_rank(part, rank)
                    chosen = _choose_device(options.device, local_rank)
            if chosen.type == "cuda":
                torch.cuda.set_device(chosen)
            if not already_made:
                # An MPI group has no store, which the other groups need.
                first = "gloo" if backend == "mpi" else backend
                dist.init_process_group(first, store=part, rank=rank, world_size=size, timeout=timeout)
            backbone_group = _new_group(backend, timeout) if backend == "mpi" else dist.group.WORLD
            head_group = _new_group(backend, timeout)
            control_group, save_group, send_group = (_new_group("gloo", timeout) for _ in range(3))
            own_store = _own_store(control_group)
        except PlscError:
            raise
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise DistributedError(
                f"rank {rank} of {size} could not join the others over {backend} at "
                f"{_where(options, store)}: {kind_and_line(error)}; start all ranks with torchrun"
            ) from error
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            device=chosen,
            backbone_group=backbone_group,
            head_group=head_group,
            control_group=control_group,
            save_group=save_group,
            send_group=send_group,
            store=own_store,
            owns_process_group=not already_made,
            launch=launch,
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def beside(self, group: dist.ProcessGroup | None) -> World:
        """Return the same ranks for a thread in the background, with a gloo group of its own."""
        return dataclasses.replace(
            self,
            device=torch.device("cpu"),
            backbone_group=group,
            head_group=group,
            control_group=group,
            owns_process_group=False,
        )

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self.control_group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's small Python value, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control_group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's small Python value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control_group)
        return box[0]

    def gather_numbers(self, *values: int) -> list[list[int]]:
        """Return every rank's integers, as many on each, in rank order: one small collective on the CPU."""
        if self.size == 1:
            return [list(values)]
        gathered = torch.empty(self.size * len(values), dtype=torch.int64)
        mine = torch.tensor(values, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, mine, group=self.control_group)
        return gathered.view(self.size, len(values)).tolist()

    def agree_max(self, *values: int) -> list[int]:
        """Return the largest of each integer over the ranks: one small collective."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control_group)
        return [int(value) for value in tensor]

    def close(self, wait: bool = True) -> None:
        """Leave the process groups, if this world made them; `wait` for the others to leave too, briefly.

        A rank that is done with the last collective and closes its connections would otherwise take from
        a slower peer the end of it.
        """
        if self.owns_process_group and dist.is_initialized():
            if wait:
                self._wait_for_all_to_leave()
            dist.destroy_process_group()

    def _wait_for_all_to_leave(self) -> None:
        if self.store is None:
            return
        deadline = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(RuntimeError):  # the store's host has left already
            leaving = self.store.add("leaving", 1)
            while leaving < self.size and time.monotonic() < deadline:
                time.sleep(0.01)
                leaving = self.store.add("leaving", 0)


def _rank_and_size(options: RuntimeOptions, store: dist.Store | None) -> tuple[int, int]:
    """Return rank and world size: the options', else the environment's; 0 and 1 without a launcher."""
    environment = os.environ if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else {}
    rank = int(environment.get("RANK", "-1")) if options.rank is None else options.rank
    size = int(environment.get("WORLD_SIZE", "0")) if options.world_size is None else options.world_size
    if rank < 0 and not size and options.init_method == "env://" and store is None:
        return 0, 1
    if not 0 <= rank < size:
        raise OptionError(
            f"rank is {rank if rank >= 0 else 'not set'} and world size {size or 'not set'}; expected a rank "
            "from 0 to world size - 1; call set_rank(rank) and set_world_size(ranks)"
        )
    return rank, size


def _count_local_rank(store: dist.Store, rank: int) -> int:
    """Return the number of lower ranks on this machine."""
    hosts = [store.get(f"host/{lower}").decode() for lower in range(rank)]
    return hosts.count(socket.gethostname())


def _where(options: RuntimeOptions, store: dist.Store | None) -> str:
    if options.init_method != "env://":
        return options.init_method
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if store is None else "a store"


def _new_group(backend: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend, timeout=timeout)
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError("this rank is not a member of its own group")
    return group


def _own_store(control_group: dist.ProcessGroup) -> dist.Store:
    """Return a corner of the rendezvous store that no other world, of these processes or dead ones, uses."""
    box = [secrets.token_hex(8)]
    dist.broadcast_object_list(box, group_src=0, group=control_group)
    # torch keeps no public name for the store.
    return dist.PrefixStore(f"plsc/{box[0]}", dist.distributed_c10d._get_default_store())


def _launch() -> str:
    """Return what identifies torchrun's agent; empty without one.

    Each agent makes a new folder for the errors of its ranks: <folder>/attempt_<n>/<local rank>/error.json.
    Its run id is often that of other launches, too, and it is not always the parent process.
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
    if device != "cuda":
        raise OptionError(f"device is {device!r}; expected 'auto', 'cpu' or 'cuda'")
    if not torch.cuda.is_available():
        raise OptionError("device is 'cuda' but torch sees no CUDA device; use 'auto' or 'cpu'")
    if local_rank >= torch.cuda.device_count():
        raise OptionError(
            f"local rank {local_rank} has no GPU of its own: torch sees "
            f"{torch.cuda.device_count()}; start that many ranks, or set_device('cpu')"
        )
    return torch.device("cuda", local_rank)


_POLL_SECONDS = 0.02


def fresh_store(store: dist.Store, rank: int, ranks: int, timeout_seconds: float) -> dist.Store:
    """Return a part of ``store`` that no earlier process has used, the same on all ranks; a collective.

    torchrun hosts one store for all its attempts. What a group of dead ranks left there (the addresses at
    which they listened) would be taken for that of the ranks that replace them, and the environment does not
    identify an attempt: each launcher has its own count of restarts.

    Rank 0 draws the name of the part. Every other rank leaves a number of its own and waits for an answer to
    just that number; rank 0 answers each number that it finds, those of dead processes too, until
    every rank has confirmed. Raises TimeoutError if some rank never comes.
    """
    deadline = time.monotonic() + timeout_seconds
    if rank == 0:
        name = secrets.token_hex(8)
        _answer(store, name, ranks, deadline)
    else:
        number = secrets.token_hex(8)
        store.set(f"plsc/hello/{rank}", number)
        _wait_for(store, f"plsc/answer/{number}", deadline, "rank 0 did not come")
        name = store.get(f"plsc/answer/{number}").decode()
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
                number = store.get(f"plsc/hello/{rank}")
                if number not in answered:
                    store.set(f"plsc/answer/{number.decode()}", name)
                    answered.add(number)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"rank {min(missing)} did not come")
        time.sleep(_POLL_SECONDS if missing else 0)


def _wait_for(store: dist.Store, key: str, deadline: float, problem: str) -> None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        time.sleep(_POLL_SECONDS)
