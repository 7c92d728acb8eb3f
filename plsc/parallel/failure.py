"""Run an action on every rank; stop all ranks when one of them fails, and on SIGINT, SIGTERM or SIGHUP.

An action that fails on some ranks, such as writing a file, raises the same error on all (`on_every_rank`).

A collective may wait half an hour for a failed rank. So a failing rank writes its error message to the
rendezvous store, and a thread on every rank polls the store twice per second. If the main thread hangs in a
collective, this thread ends the process. A signal sets a flag; the ranks exchange it at the next step
boundary and stop together.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from plsc.errors import CheckpointError, DistributedError, PlscError, kind_and_line
from plsc.machine import BackgroundThread, stop_signals
from plsc.parallel.world import World

logger = logging.getLogger(__name__)
_FAILURE = "failure"  # key of the message of the first rank that failed
_CALL = "call"  # key at which all ranks answer
_POLL_SECONDS = 0.5
_POST_SECONDS = 3.0  # maximum wait for the message of a failed rank, and for the other ranks' answers
_JOIN_SECONDS = 2.0  # the host of the store may be down
_LEAVE_SECONDS = 10.0  # how long the main thread may take to stop after a failure on another rank


T = TypeVar("T")


def on_every_rank(
    world: World,
    doing: str,
    action: Callable[[], T],
    advice: str = "",
    kind: type[PlscError] = CheckpointError,
) -> list[T]:
    """Run ``action`` on every rank and return all results, in rank order. Collective.

    Args:
        doing: for the message, as in "rank 1: could not save /a/b: No space left on device".
        advice: appended to the message.
        kind: of the error.

    Raises:
        CheckpointError, or kind: on all ranks, if the action failed on any: the reason of the first failing
            rank, and how many others failed.
        DistributedError: the connection to another rank was lost.
    """
    result: T | None = None
    failure: str | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure, cause = _reason(doing, error), error
    try:
        outcomes = world.all_gather_object((failure, result))
    except RuntimeError as error:
        raise DistributedError(f"lost the connection to another rank: {_reason(doing, error)}") from error
    failures = {rank: outcome[0] for rank, outcome in enumerate(outcomes) if outcome[0]}
    if not failures:
        return [outcome[1] for outcome in outcomes]
    rank, reason = min(failures.items())
    if len(failures) < world.size or len(set(failures.values())) > 1:
        more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        reason = f"rank {rank}{more}: {reason}"
    raise kind(f"{reason}; {advice}" if advice else reason) from cause


def own_result(
    world: World, doing: str, action: Callable[[], T], kind: type[PlscError] = CheckpointError
) -> T:
    """Run ``action`` on every rank and return this rank's own result; otherwise as `on_every_rank`."""
    results: list[T] = []
    on_every_rank(world, doing, lambda: results.append(action()), kind=kind)
    return results[0]


def on_main_rank(world: World, doing: str, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and return its result on every rank; otherwise as `on_every_rank`."""
    results: list[Any] = on_every_rank(world, doing, lambda: action() if world.is_main else None)
    return results[0]


def rank_on_shared_disk(folder: Path, world: World) -> tuple[int, int]:
    """Return this rank's index among the ranks that see the same `folder`, and their number. Collective.

    Creates the folder. Raises CheckpointError, on all ranks, if a rank cannot write there.
    """
    doing = f"write to {folder}"
    mark = f".rank-{secrets.token_hex(8)}"

    def leave() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / mark).touch()
        return mark

    marks = on_every_rank(world, doing, leave, "check the permissions, or choose another folder")

    def look() -> list[int]:
        return [rank for rank, one in enumerate(marks) if (folder / one).exists()]

    mine = own_result(world, doing, look)
    on_every_rank(world, doing, (folder / mark).unlink)
    return mine.index(world.rank), len(mine)


def _reason(doing: str, error: Exception) -> str:
    """Return an error message; those of PlscError are already complete."""
    if isinstance(error, PlscError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"could not {doing}: {error.strerror}{where}"
    return f"could not {doing}: {kind_and_line(error)}"


class FailureWatch:
    """Context manager around all code with collectives.

    An exception that leaves it stops the other ranks. An exception that is a consequence of another rank's
    failure (a closed connection) becomes a DistributedError with that rank's message.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._exited = threading.Event()
        self._thread: threading.Thread | None = None
        self._host = socket.gethostname()

    def __enter__(self) -> FailureWatch:
        if self._world.size > 1 and self._world.store is not None:
            # A separate client: the main thread's may be blocked while a process group is created.
            self._watch_store = self._world.store.clone()
            self._hosts = self._world.all_gather_object(self._host)
            self._thread = threading.Thread(target=self._watch, daemon=True, name="plsc-failure")
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._thread is not None and error is not None:
                self._report(error)
        finally:
            self._exited.set()
            if self._thread is not None:
                # The process aborts if a thread is inside the store's C++ code when the interpreter exits.
                self._thread.join(_JOIN_SECONDS)

    def _report(self, error: BaseException) -> None:
        """Post this rank's failure for the others, or raise that of the rank that failed first."""
        # A lost connection mostly follows from another rank's failure, which is the one to report.
        is_consequence = _is_connection_failure(error)
        message = str(error) if isinstance(error, PlscError) else f"{type(error).__name__}: {error}"
        first = self._ask_store(lambda: self._find_first(message) if is_consequence else self._post(message))
        if first is None:  # the machine of the store does not answer
            if not is_consequence:
                return
            lost = _LOST.format(f"rank 0 on {self._hosts[0]}")
            first = {"rank": self._world.rank, "host": self._host, "message": lost}
        if first["rank"] == self._world.rank:
            if is_consequence:
                raise DistributedError(first["message"]) from error
            return
        raised = error if message == first["message"] else DistributedError(_failure_text(first))
        # The command prints a failure on the rank that failed, and on one rank of each other machine.
        is_reported = first["host"] == self._host or self._world.local_rank != 0
        raised.is_reported = is_reported  # type: ignore[attr-defined]
        if raised is not error:
            raise raised from error

    def _ask_store(self, action: Callable[[], Any]) -> Any:
        """Return the result of an action that uses the store; None if the store does not answer in time."""
        # In a thread: if the store was on a machine that is lost, a call to it blocks for minutes.
        with contextlib.suppress(concurrent.futures.TimeoutError, RuntimeError):
            return BackgroundThread("plsc-lost").submit(action).result(2 * _POST_SECONDS)
        return None

    def _post(self, message: str) -> dict | None:
        """Post a message unless there already is one; return the one in the store."""
        failure = {"rank": self._world.rank, "host": self._host, "message": message}
        if self._world.store is None:
            return None
        with contextlib.suppress(ValueError):
            return json.loads(self._world.store.compare_set(_FAILURE, "", json.dumps(failure)))
        return None

    def _find_first(self, message: str) -> Any:
        """Return the failure of another rank, else post and return which ranks do not answer."""
        store = self._watch_store
        store.set(_CALL, "")
        deadline = time.monotonic() + _POST_SECONDS
        while time.monotonic() < deadline:
            value = _read_failure(store)
            if value is not None:
                return value
            time.sleep(0.05)
        silent = [rank for rank in range(self._world.size) if not store.check([f"here/{rank}"])]
        if not silent:
            return self._post(f"{message}; all ranks respond")
        names = ", ".join(f"rank {rank} on {self._hosts[rank]}" for rank in silent)
        return self._post(_LOST.format(names))

    def _watch(self) -> None:
        while not self._exited.wait(_POLL_SECONDS):
            with contextlib.suppress(RuntimeError):
                if self._watch_store.check([_CALL]):
                    self._watch_store.set(f"here/{self._world.rank}", "")
            failure = _read_failure(self._watch_store)
            if failure is None or failure["rank"] == self._world.rank:
                continue
            if self._exited.wait(_LEAVE_SECONDS):
                return
            # The main thread hangs in a collective. Exiting is safe: checkpoints are published by a rename.
            if self._world.local_rank == 0 and failure["host"] != self._host:
                logger.error("%s", _failure_text(failure))
            os._exit(1)


_LOST = "lost the connection to {} (killed, out of memory, or no network)"


def _failure_text(failure: dict[str, Any]) -> str:
    return f"rank {failure['rank']} failed: {failure['message']}"


def _read_failure(store: dist.Store | None) -> Any:
    try:
        is_there = store is not None and store.check([_FAILURE])
        return json.loads(store.get(_FAILURE)) if store is not None and is_there else None
    except (RuntimeError, ValueError):
        return None


def _is_connection_failure(error: BaseException) -> bool:
    """Return whether a collective raises this error when another rank is gone."""
    if isinstance(error, DistributedError):
        error = error.__cause__ or error
    if not isinstance(error, RuntimeError):
        return False
    marks = ("gloo", "Gloo", "pair closure", "NCCL", "Connection", "TCPStore")
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in marks)


class StopSignal:
    """Context manager that turns the first SIGINT, SIGTERM or SIGHUP into a request to stop.

    Signals that are ignored when it is entered stay so. A second SIGINT raises KeyboardInterrupt at once. If
    the process is still inside the context `deadline_seconds` after the first signal, it exits: it may hang
    in a collective with a dead rank. Does nothing outside the main thread, because Python delivers signals
    there only. shows: log the first signal at once.

    Attributes:
        number: the signal's number, or 0.
    """

    def __init__(self, deadline_seconds: float, shows: bool = True) -> None:
        self.number, self._shows = 0, shows
        self._deadline_seconds = deadline_seconds
        self._exited = threading.Event()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python handlers do not run while the main thread is inside a collective, but the C handler writes to
        # the wake-up descriptor immediately.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous_descriptor = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._handle)
        threading.Thread(target=self._watch, daemon=True, name="plsc-deadline").start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._previous:
            return
        self._exited.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        os.close(self._write_end)  # ends the watching thread, which closes its own end

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    def _watch(self) -> None:
        try:
            while received := os.read(self._read_end, 1):
                number = received[0]
                if number not in self._previous:
                    continue
                if self._shows:
                    name = signal.Signals(number).name
                    logger.info(f"{name}: stopping after this step; the next SIGINT stops at once, unsaved")
                if not self._exited.wait(self._deadline_seconds):
                    logger.error(
                        "the current step did not end within %g s after %s; exiting without saving",
                        self._deadline_seconds,
                        signal.Signals(number).name,
                    )
                    os._exit(128 + number)
                return
        finally:
            os.close(self._read_end)
