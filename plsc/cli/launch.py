"""``plsc launch``: one process per device on each machine, started by torchrun's agent."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import io
import itertools
import logging
import os
import re
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.cli.parser import REQUIRED, Argument, Command
from plsc.config.option import at_least
from plsc.errors import (
    LAUNCH_PREFIX,
    LAUNCHER_VARIABLE,
    MESSAGE_START,
    DistributedError,
    OptionError,
    kind_and_line,
)
from plsc.machine import stop_signals
from plsc.storage.urls import local_folder

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

logger = logging.getLogger(__name__)
_RANK_PROCESS = Path(__file__).with_name("rank_process.py")
# From SIGTERM to SIGKILL: more than the 60 seconds that a rank may take to save.
_SECONDS_TO_END = 70
# Exit codes that no restart follows: not saved, which it would not repair, and saved after a signal.
_FINAL = {3, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM}
_RECONNECT_SECONDS = 600  # how long a launcher waits for the network before a restart
_ANSWER_SECONDS = 5.0  # for the other machines to answer a launcher
_SIOCGIFADDR = 0x8915  # Linux: the address of a network interface


def run_launch(
    devices: str | None, nproc: int | None, nnodes: str, rdzv_endpoint: str | None, max_restarts: int,
    log_dir: str | None, cpu_threads: int | None, m: bool, script: list[str],
) -> None:  # fmt: skip
    """Start the ranks of this machine and wait for them.

    Raises OptionError for a wrong argument, DistributedError with the message of the rank that failed first,
    SystemExit after a signal.
    """
    nodes = _nodes(nnodes, rdzv_endpoint)
    is_alone = nodes[1] == 1
    address: str | None = "127.0.0.1"
    if rdzv_endpoint and not is_alone:
        rdzv_endpoint, address = _find_network(rdzv_endpoint)
    ranks = _choose_devices(devices, nproc)
    _set_threads(cpu_threads, ranks)

    _set_variables(nodes, log_dir)

    from torch.distributed.launcher.api import LaunchConfig

    # torch restarts the ranks of several machines together.
    own_restarts, its_restarts = (max_restarts, 0) if is_alone else (0, max_restarts)
    for name in ("multiprocessing", "agent.server"):  # which rank failed, if torch restarts it
        reports = logging.getLogger(f"torch.distributed.elastic.{name}.api")
        reports.setLevel(logging.ERROR if its_restarts else logging.CRITICAL)
    logs: dict[int, Path] = {}
    more: dict[str, Any] = {}
    if hasattr(LaunchConfig, "signals_to_handle"):  # not in every torch that we support
        more["signals_to_handle"] = ",".join(number.name for number in stop_signals(signal.SIGQUIT))
    rank_process = ["-I", "-S", str(_RANK_PROCESS), str(os.getpid()), "both" if log_dir else "apart"]
    command = [*rank_process, sys.executable, "-u", *(["-m"] if m else []), *script]
    with tempfile.TemporaryDirectory(prefix=LAUNCH_PREFIX) as errors, contextlib.ExitStack() as stack:
        opened = os.open(errors, os.O_RDONLY)
        stack.callback(os.close, opened)
        fcntl.flock(opened, fcntl.LOCK_SH)  # systemd does not clean it after ten days
        config = LaunchConfig(
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            nproc_per_node=ranks,
            run_id="plsc",
            role="",
            rdzv_backend=_register(is_alone),
            rdzv_endpoint=str(rdzv_endpoint),
            local_addr=address,
            rdzv_configs={"read_timeout": _RECONNECT_SECONDS} if its_restarts else {},
            max_restarts=its_restarts,
            logs_specs=_rank_logs(log_dir, errors, logs),
            log_line_prefix_template="${role_name}",  # empty, so that lines are as the rank wrote them
            **more,
        )
        _run_ranks(config, command, own_restarts, logs)


def _set_variables(nodes: tuple[int, int], log_dir: str | None) -> None:
    """Set what torch and the ranks read from the environment; print rank 0's lines at once."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SECONDS_TO_END))
    if nodes[1] == 1 and not log_dir:  # else each rank also writes its error
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    if nodes[0] < nodes[1]:  # torch 2.15 needs it for nodes that join later
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if nodes[1] == 1:  # nothing listens to other machines
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = min(socket.if_nameindex())[1]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _run_ranks(config: LaunchConfig, command: list[str], restarts: int, logs: dict[int, Path]) -> None:
    """Start the ranks and wait for them; start them again after a failure, at most so many times."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    try:
        for attempt in itertools.count(1):
            try:
                elastic_launch(config, sys.executable)(*command)
                return
            except ChildFailedError as error:
                failure = _failure(*error.get_first_failure(), logs)
            if attempt > restarts or failure.exit_code in _FINAL:
                raise failure
            logger.warning("%s; starting all ranks again (%d of %d)", failure, attempt, restarts)
    except (RendezvousError, socket.gaierror) as error:
        raise DistributedError(
            f"lost or could not make the connection to the other machines at {config.rdzv_endpoint}: "
            f"{kind_and_line(error.__cause__ or error)}; start plsc launch on all of them"
        ) from error
    except SignalException as error:
        logger.info("all ranks of this machine have ended after %s", error.sigval.name)
        raise SystemExit(128 + error.sigval) from None


def _register(is_alone: bool) -> str:
    """Register a rendezvous with torch and return its name.

    Of one machine: in memory, because torch's own have a store that other users can write to, with a pickle
    in it. Of several: torch's, which does not hang when the network is down.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    class Alone(RendezvousHandler):
        def next_rendezvous(self) -> RendezvousInfo:
            store = dist.HashStore()
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, "127.0.0.1"))

        def get_backend(self) -> str:
            return "plsc"

        def get_run_id(self) -> str:
            return "plsc"

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def shutdown(self) -> bool:
            return True

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        if is_alone:
            return Alone()
        backend, store = create_backend(parameters)
        handler = create_handler(store, backend, parameters)
        handler.get_backend = lambda: "plsc"  # type: ignore[method-assign] # as registered
        for name in ("num_nodes_waiting", "shutdown"):
            setattr(handler, name, _bounded(getattr(handler, name)))
        return handler

    rendezvous_handler_registry.register("plsc", create)
    return "plsc"


def _bounded(call: Callable[[], int]) -> Callable[[], int]:
    """Return a function that calls in a thread; it returns 0 while the call hangs and when it fails."""
    from torch.distributed.elastic.rendezvous import RendezvousError

    from plsc.machine import BackgroundThread

    thread = BackgroundThread("plsc-rendezvous")
    pending: concurrent.futures.Future[int] | None = None

    def bounded() -> int:
        nonlocal pending
        if pending is None or pending.done():
            pending = thread.submit(call)
        with contextlib.suppress(RendezvousError, concurrent.futures.TimeoutError):
            return pending.result(_ANSWER_SECONDS)
        return 0

    return bounded


def _nodes(nnodes: str, rdzv_endpoint: str | None) -> tuple[int, int]:
    """Return the minimum and the maximum number of machines."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most or (most > 1 and not re.fullmatch(r".+:\d+", rdzv_endpoint or "")):
        raise OptionError(
            f"--nnodes is {nnodes!r}, --rdzv-endpoint is {rdzv_endpoint!r}; expected a number of machines or "
            "MIN:MAX, and for several of them host:port of one, the same on all"
        )
    return least, most


def _find_network(endpoint: str) -> tuple[str, str | None]:
    """Return the endpoint for torch and the address of this machine; let gloo use its interface.

    By default all come from the host name, which is often a loopback address on its own machine.
    """
    host, _, port = endpoint.rpartition(":")
    mine, there = _route(host)
    is_here = mine != "" and (mine == there or mine.startswith("127."))
    if mine.startswith("127."):
        mine, _ = _route("203.0.113.1")  # outside: the default route
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ImportError, OSError), socket.socket() as probe:
            import fcntl

            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(found[20:24]) == mine:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return f"localhost:{port}" if is_here else endpoint, mine or None


def _route(host: str) -> tuple[str, str]:
    """Return the IPv4 addresses of this machine and of a host on the route to it; empty if there is none."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return probe.getsockname()[0], probe.getpeername()[0]
    return "", ""


def _choose_devices(devices: str | None, nproc: int | None) -> int:
    """Make only the chosen GPUs visible to the ranks; return the number of ranks."""
    import torch

    count = torch.cuda.device_count()
    if devices is None:
        devices = "all" if count else "cpu"
    if devices == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return nproc or 1
    words = [str(number) for number in range(nproc or count)] if devices == "all" else devices.split(",")
    chosen = [int(word) for word in words if word.strip().isdecimal()]
    if not words or len(set(chosen)) < len(words) or nproc not in (None, len(words)) or max(chosen) >= count:
        raise OptionError(
            f"--devices is {devices!r}, --nproc is {nproc}, and torch sees {count} GPU(s); expected an id "
            "per rank, such as 0,2, or all, or cpu"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in chosen)
    return len(chosen)


def _set_threads(cpu_threads: int | None, ranks: int) -> None:
    """Set OMP_NUM_THREADS: the argument, else the value in the environment, else cores / ranks."""
    from plsc.machine import usable_cores

    if cpu_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(cpu_threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))


def _rank_logs(log_dir: str | None, errors: str, files: dict[int, Path]) -> LogsSpecs:
    """Return where the ranks' output goes: to the console, or to a file per rank, which is added to `files`.

    With files, the console shows the output of rank 0 only. errors: folder of the ranks' error records.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    if not log_dir:
        return DefaultLogsSpecs(log_dir=errors)
    folder = local_folder(log_dir, "--log-dir")
    folder.mkdir(parents=True, exist_ok=True)

    class RankLogs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            found = super().reify(envs)
            for local_rank, variables in envs.items():
                rank = int(variables["RANK"])
                files[rank] = _new_file(folder, rank)
                descriptor = os.open(files[rank], os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                # torch opens it again, but not by its name, which may be a link by then.
                found.stdouts[local_rank] = f"/proc/self/fd/{descriptor}"
                if rank == 0:
                    found.tee_stdouts[local_rank] = found.stdouts[local_rank]
            return found

    return RankLogs(log_dir=errors)


def _new_file(folder: Path, rank: int) -> Path:
    """Return ``rank<n>.log``; an earlier one becomes ``rank<n>.1.log``, or the next free number."""
    path = folder / f"rank{rank}.log"
    if os.path.lexists(path):  # also a link that leads nowhere: the log would be written to its target
        numbered = (folder / f"rank{rank}.{number}.log" for number in itertools.count(1))
        path.rename(next(name for name in numbered if not os.path.lexists(name)))
    return path


def _failure(rank: int, failure: ProcessFailure, logs: dict[int, Path]) -> DistributedError:
    """Return the message that a rank recorded, else how it ended."""
    recorded = failure.error_file_data["message"]
    if isinstance(recorded, dict):
        text = recorded["message"].strip()
        text = text.removeprefix(MESSAGE_START) if text.startswith(MESSAGE_START) else text.splitlines()[-1]
    elif failure.exitcode < 0:
        text = f"ended by {failure.signal_name()}{' (out of memory?)' if failure.exitcode == -9 else ''}"
    else:
        text = f"exit code {failure.exitcode}"
    if not text.startswith("rank "):  # another rank's
        text = f"rank {rank} failed: {text}"
    error = DistributedError(f"{text}; see {logs[rank]}" if rank in logs else text)
    error.exit_code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return error


_ONE = at_least(1)
COMMAND = Command(
    "run a script on several devices, one process (rank) each, on one machine or several",
    run_launch,
    (
        Argument("devices", str, None, "GPU ids such as 0,2, or all, or cpu; default: all GPUs if any"),
        Argument("nproc", int, None, "ranks on this machine; they use the first GPUs or the CPU", check=_ONE),
        Argument("nnodes", str, "1", "number of machines, or MIN:MAX for an elastic run"),
        Argument("rdzv_endpoint", str, None, "host:port of one machine, for the rendezvous"),
        Argument("max_restarts", int, 0, "restarts of all ranks after a failure", check=at_least(0)),
        Argument("log_dir", str, None, "folder for a log file per rank; the console shows rank 0's"),
        Argument("cpu_threads", int, None, "per rank; default: OMP_NUM_THREADS, cores / ranks", check=_ONE),
        Argument("m", bool, False, "run a module, as python -m does"),
        Argument(
            "script", tuple[str, ...], REQUIRED, "script, or module, and its arguments", positional=True
        ),
    ),
)
