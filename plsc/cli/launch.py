"""``plsc launch``: one process per device on each machine, started by torchrun's agent."""

from __future__ import annotations

import contextlib
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
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.cli.parser import REQUIRED, Argument, Command
from plsc.errors import (
    LAUNCH_PREFIX,
    LAUNCHER_VARIABLE,
    MESSAGE_START,
    DistributedError,
    OptionError,
    kind_and_line,
)
from plsc.storage.regular import open_regular
from plsc.terminal import stop_signals

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

logger = logging.getLogger(__name__)
_RANK_PROCESS = Path(__file__).with_name("rank_process.py")
# From SIGTERM to SIGKILL: more than the 60 seconds that a rank may take to save.
_SECONDS_TO_END = 70
_UNSAVED = 3  # exit status of a run that could not save or upload; a restart would not repair that
# Exit statuses of ranks that saved after a signal.
_STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP}
_ANSWER_SECONDS = 5.0  # for the other machines to answer a launcher
_RECONNECT_SECONDS = 600  # how long a launcher waits for the network before a restart
_LATE_SECONDS = 20  # torchrun sends SIGKILL 30 seconds after SIGTERM
_SIOCGIFADDR = 0x8915  # Linux: the address of a network interface
_NEVER = 2**24  # seconds: a file store grows with each heartbeat, and one machine needs none
_LAST_BYTES = 4096  # of a log, read to find its last line


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
    if max_restarts < 0:
        raise OptionError(f"--max-restarts is {max_restarts}; expected at least 0")
    if not m and not Path(script[0]).is_file():
        raise OptionError(f"{script[0]} does not exist; expected a Python script, or -m and a module")
    ranks = _choose_devices(devices, nproc)
    _set_threads(cpu_threads, ranks)

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SECONDS_TO_END))
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    if nodes[0] < nodes[1] or is_alone:  # torch 2.15 needs it for nodes that join later
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if is_alone:  # nothing listens to other machines
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = min(socket.if_nameindex())[1]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # rank 0's lines at once

    from torch.distributed.launcher.api import LaunchConfig

    logs: dict[int, Path] = {}
    rendezvous: dict[str, Any] = {"read_timeout": _RECONNECT_SECONDS} if max_restarts else {}
    with tempfile.TemporaryDirectory(prefix=LAUNCH_PREFIX) as errors:
        if is_alone:  # torchrun's state in its store is a pickle: a file that only this user can write
            rdzv_endpoint = f"{errors}/rendezvous"
            rendezvous = {"store_type": "file", "keep_alive_interval": _NEVER}
        more: dict[str, Any] = {}
        if hasattr(LaunchConfig, "signals_to_handle"):  # not in every torch that we support
            more = {"signals_to_handle": ",".join(one.name for one in stop_signals(signal.SIGQUIT))}
        config = LaunchConfig(
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            nproc_per_node=ranks,
            run_id="plsc",
            role="",
            rdzv_backend="c10d",
            rdzv_endpoint=str(rdzv_endpoint),
            local_addr=address,
            rdzv_configs=rendezvous,
            max_restarts=max_restarts,
            logs_specs=_rank_logs(Path(log_dir) if log_dir else None, errors, logs),
            **more,
            log_line_prefix_template="${role_name}",  # empty, so that lines are as the rank wrote them
        )
        rank_process = ["-I", "-S", str(_RANK_PROCESS), str(os.getpid()), "both" if log_dir else "apart"]
        command = [sys.executable, "-u", *(["-m"] if m else []), *script]
        _run_ranks(config, [*rank_process, *command], logs)


def _run_ranks(config: LaunchConfig, arguments: list[str], logs: dict[int, Path]) -> None:
    """Run Python with these arguments on each rank; turn what torchrun's agent raises into our errors."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher import api

    api.LocalElasticAgent = _agent_class(logs, config.max_nodes == 1)  # type: ignore[misc] # there is no parameter for it
    for name in ("multiprocessing", "agent"):  # their reports of each signal and exit code
        reports = logging.getLogger(f"torch.distributed.elastic.{name}")
        reports.addHandler(logging.NullHandler())
        reports.propagate = False
    try:
        api.elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        raise _failure(error.failures, logs) from None
    except (RendezvousError, socket.gaierror) as error:
        raise DistributedError(
            f"could not connect to the other machines at {config.rdzv_endpoint}: "
            f"{kind_and_line(error.__cause__ or error)}; check --rdzv-endpoint, and start plsc launch on all "
            "machines"
        ) from error
    except SignalException as error:
        logger.info("all ranks of this machine have ended after %s", error.sigval.name)
        raise SystemExit(128 + error.sigval) from None


def _agent_class(logs: dict[int, Path], is_alone: bool) -> type[LocalElasticAgent]:
    """Return torchrun's agent, which reports each restart and does not hang when the network is down.

    is_alone: there are no other machines.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        def __init__(self, spec: WorkerSpec, *arguments: Any, **named: Any) -> None:
            super().__init__(spec, *arguments, **named)
            for name in ("num_nodes_waiting", "shutdown"):
                setattr(spec.rdzv_handler, name, _bounded(getattr(spec.rdzv_handler, name)))

        def _exit_barrier(self) -> None:
            if not is_alone:  # it waits five minutes for a store that is gone
                super()._exit_barrier()

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            codes = {one.exitcode for one in result.failures.values()}
            # A rank that is slow to exit gets torchrun's SIGTERM, too. With several machines, all ranks stop
            # like this when one machine joins or leaves, and those of the others have to start again.
            is_stopped = bool(codes & _STOPPED) and codes <= {*_STOPPED, -signal.SIGTERM}
            if _UNSAVED in codes or (is_alone and is_stopped):
                self._remaining_restarts = 0
            if result.failures and self._remaining_restarts:
                attempts = worker_group.spec.max_restarts
                number = attempts - self._remaining_restarts + 1
                ending = f"; starting all ranks again ({number} of {attempts})"
                logger.warning("%s", _failure(result.failures, logs, ending))
            return result

    return Agent


def _bounded(call: Callable[[], int]) -> Callable[[], int]:
    """Return a function that calls in a thread; it returns 0 while the call hangs and when it fails."""
    from torch.distributed.elastic.rendezvous import RendezvousError

    results = [0]
    thread = threading.Thread()

    def run() -> None:
        with contextlib.suppress(RendezvousError):
            results[0] = call()

    def bounded() -> int:
        nonlocal thread
        if not thread.is_alive():
            results[0] = 0
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
        thread.join(_ANSWER_SECONDS)
        return results[0]

    return bounded


def _nodes(nnodes: str, rdzv_endpoint: str | None) -> tuple[int, int]:
    """Return the minimum and the maximum number of machines."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise OptionError(f"--nnodes is {nnodes!r}; expected a number of machines, such as 2, or MIN:MAX")
    port = re.fullmatch(r".+:(\d{1,5})", rdzv_endpoint or "host:0")
    if port is None or int(port[1]) > 65535:
        raise OptionError(f"--rdzv-endpoint is {rdzv_endpoint!r}; expected host:port, such as node0:29500")
    if most > 1 and not rdzv_endpoint:
        raise OptionError(
            f"--nnodes is {nnodes}, but --rdzv-endpoint is not set; pass host:port of one machine, the same "
            "on all machines"
        )
    return least, most


def _find_network(endpoint: str) -> tuple[str, str | None]:
    """Return the endpoint for torch and the address of this machine; let gloo use its interface.

    By default all come from the host name, which is often a loopback address on its own machine.
    """
    host, _, port = endpoint.rpartition(":")
    mine, there = _route(host)
    is_here = mine == there or mine.startswith("127.")
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
    if nproc is not None and nproc < 1:
        raise OptionError(f"--nproc is {nproc}; expected at least 1")
    if devices is None:
        devices = "all" if count else "cpu"
    if devices == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return nproc or 1
    if devices == "all":
        if not count:
            raise OptionError("--devices is all, but torch sees no GPU; use --devices cpu")
        chosen = list(range(nproc or count))
    else:
        if not all(word.strip().isdecimal() for word in devices.split(",")):
            raise OptionError(f"--devices is {devices!r}; expected ids such as 0,2, or all, or cpu")
        chosen = [int(word) for word in devices.split(",")]
        if len(set(chosen)) < len(chosen):
            raise OptionError(f"--devices is {devices}, with an id twice; name each GPU once")
        if nproc not in (None, len(chosen)):
            raise OptionError(f"--nproc is {nproc}, but --devices names {len(chosen)} GPUs; remove one flag")
    if max(chosen) >= count:
        raise OptionError(f"GPU {max(chosen)} was chosen, but torch sees {count} GPUs; choose lower ids")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in chosen)
    return len(chosen)


def _set_threads(cpu_threads: int | None, ranks: int) -> None:
    """Set OMP_NUM_THREADS: the argument, else the value in the environment, else cores / ranks."""
    from plsc.parallel.machine import usable_cores

    if cpu_threads is not None:
        if cpu_threads < 1:
            raise OptionError(f"--cpu-threads is {cpu_threads}; expected at least 1")
        os.environ["OMP_NUM_THREADS"] = str(cpu_threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))


def _rank_logs(folder: Path | None, errors: str, files: dict[int, Path]) -> LogsSpecs:
    """Return where the ranks' output goes: to the console, or to a file per rank, which is added to `files`.

    With files, the console shows the output of rank 0 only. errors: folder of the ranks' error records.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    if folder is None:
        return DefaultLogsSpecs(log_dir=errors)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"--log-dir is {folder}, which cannot be created: {error.strerror}; choose another folder"
        ) from error
    root = folder

    class RankLogs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            found = super().reify(envs)
            for local_rank, variables in envs.items():
                rank = int(variables["RANK"])
                files[rank] = _new_file(root, rank)
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


def _failure(
    failures: dict[int, ProcessFailure], logs: dict[int, Path], ending: str = ""
) -> DistributedError:
    """Return the message of the rank that failed first, with an ending, and add it to that rank's log."""
    from plsc.parallel.failure import is_connection_text

    earliest = min(one.timestamp for one in failures.values())

    def order(rank: int) -> tuple[bool | int, ...]:
        one = failures[rank]
        recorded = one.error_file_data["message"]
        # The launcher ends all ranks when one has failed; with SIGKILL those that take long.
        is_ended = one.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)
        is_late = one.timestamp > earliest + _LATE_SECONDS
        if not isinstance(recorded, dict):
            return is_ended, True, is_late, one.exitcode > 0, one.timestamp
        is_consequence = recorded["extraInfo"].get("kind") == DistributedError.__name__
        is_consequence = is_consequence or is_connection_text(recorded["message"])
        return is_consequence, False, is_ended, one.timestamp

    rank = min(sorted(failures), key=order)
    first, log = failures[rank], logs.get(rank)
    message = _message(first, log)
    if not message.startswith("rank "):  # another rank's
        message = f"rank {rank} failed: {message}"
    if log:
        with contextlib.suppress(OSError), open_regular(log, mode="ab") as file:
            file.write(f"{MESSAGE_START}{message}{ending}\n".encode())
        ending = ending or f"; see {log}"
    error = DistributedError(message + ending)
    error.exit_code = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return error


def _message(failure: ProcessFailure, log: Path | None) -> str:
    """Return the message that a rank recorded, else how it ended, and the last line of its log."""
    recorded = failure.error_file_data["message"]
    if isinstance(recorded, dict):
        text = recorded["message"].strip()
        return text.removeprefix(MESSAGE_START) if text.startswith(MESSAGE_START) else text.splitlines()[-1]
    if failure.exitcode < 0:
        name = failure.signal_name()
        return f"ended by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    return f"exit code {failure.exitcode}, {_last_line(log) if log else 'its output is above'}"


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "without output")


COMMAND = Command(
    "run a script on several devices, one process (rank) each, on one machine or several",
    run_launch,
    (
        Argument("devices", str, None, "GPU ids such as 0,2, or all, or cpu; default: all GPUs if any"),
        Argument("nproc", int, None, "number of ranks on this machine; they use the first GPUs or the CPU"),
        Argument("nnodes", str, "1", "number of machines, or MIN:MAX for an elastic run"),
        Argument("rdzv_endpoint", str, None, "host:port of one machine, for the rendezvous"),
        Argument("max_restarts", int, 0, "how often all ranks are restarted after a failure"),
        Argument("log_dir", str, None, "folder for a log file per rank; the console shows rank 0's"),
        Argument("cpu_threads", int, None, "CPU threads per rank; default: OMP_NUM_THREADS or cores / ranks"),
        Argument("m", bool, False, "run a module, as python -m does"),
        Argument(
            "script", tuple[str, ...], REQUIRED, "script, or module, and its arguments", positional=True
        ),
    ),
)
