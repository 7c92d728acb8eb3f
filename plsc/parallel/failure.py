"""How the ranks stop together: when one fails, and on SIGINT or SIGTERM.

A rank that waits in a collective cannot receive anything else, and a collective may wait for half an
hour. So a failing rank puts its message into the rendezvous store, and a thread of every rank reads
it there twice a second. What it finds is raised at the next chance; a rank that has none, because it hangs
in a collective, is ended by the thread. A signal sets a flag, on which the ranks agree at a step boundary.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from plsc.errors import DistributedError, PlscError
from plsc.parallel.world import World

logger = logging.getLogger(__name__)
_FAILURE = "failure"  # the message of the first rank that failed
_POLL_SECONDS = 0.5
_POST_SECONDS = 3.0  # how long a failing rank may take to post its message
_JOIN_SECONDS = 2.0  # the store's host may be gone
_LEAVE_SECONDS = 10.0  # how long a rank may take to leave by itself, once a failure is known


class FailureWatch:
    """Context manager around everything that the ranks do together.

    Leaving it with an exception stops the other ranks. An exception that only follows from another
    rank's failure (its connection closed) becomes a DistributedError with that rank's message.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self._host = socket.gethostname()

    def __enter__(self) -> FailureWatch:
        if self._world.size > 1 and self._world.store is not None:
            # A client of its own: the main thread's may be blocked inside a collective's set-up.
            self._watch_store = self._world.store.clone()
            self._thread = threading.Thread(target=self._watch, daemon=True, name="plsc-failure")
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._thread is not None and error is not None:
                self._explain(error)
        finally:
            self._left.set()
            if self._thread is not None:
                # A thread that is inside the store's C++ when the interpreter ends takes the process down.
                self._thread.join(_JOIN_SECONDS)

    def _explain(self, error: BaseException) -> None:
        """Post this rank's failure for the others, or raise that of the rank that failed first."""
        is_echo = _is_connection_failure(error)
        first = self._wait_for_failure() if is_echo else None
        own = str(error) if isinstance(error, PlscError) else f"{type(error).__name__}: {error}"
        message = _LOST if is_echo else own
        first = first or self._post(message)
        if first is None or first["rank"] == self._world.rank:
            if is_echo:
                raise DistributedError(_LOST) from error
            return
        raised = error if message == first["message"] else DistributedError(_of_another(first))
        # The command prints a failure once: on the rank that failed, and on one of each other machine.
        raised.is_reported = first["host"] == self._host or self._world.local_rank != 0  # type: ignore[attr-defined]
        if raised is not error:
            raise raised from error

    def _post(self, message: str) -> dict | None:
        """Put my message into the store unless one is there; return the one that is there then."""
        failure = {"rank": self._world.rank, "host": self._host, "message": message}
        if self._world.store is None:
            return None
        try:
            return json.loads(self._world.store.compare_set(_FAILURE, "", json.dumps(failure)))
        except (RuntimeError, ValueError):
            return None  # the store went down with its host: there is no rank left to inform

    def _wait_for_failure(self) -> Any:
        """Give the rank that failed a moment to post its message."""
        deadline = time.monotonic() + _POST_SECONDS
        while time.monotonic() < deadline:
            value = _read_failure(self._world.store)
            if value is not None:
                return value
            time.sleep(0.05)
        return None

    def _watch(self) -> None:
        while not self._left.wait(_POLL_SECONDS):
            failure = _read_failure(self._watch_store)
            if failure is None or failure["rank"] == self._world.rank:
                continue
            if self._left.wait(_LEAVE_SECONDS):
                return
            # The main thread hangs in a collective that will never complete; there is nothing of
            # ours left to save, as a checkpoint is published by a rename only.
            if self._world.local_rank == 0 and failure["host"] != self._host:
                logger.error("%s", _of_another(failure))
            os._exit(1)


_LOST = (
    "lost the connection to another rank, which ended without a message (killed, or out of "
    "memory?); see the launcher's report for its exit code"
)


def _of_another(failure: dict[str, Any]) -> str:
    return f"rank {failure['rank']} failed: {failure['message']}"


def _read_failure(store: dist.Store | None) -> Any:
    try:
        is_there = store is not None and store.check([_FAILURE])
        return json.loads(store.get(_FAILURE)) if store is not None and is_there else None
    except (RuntimeError, ValueError):
        return None


def _is_connection_failure(error: BaseException) -> bool:
    """Whether this is what a collective raises when a peer has gone."""
    if isinstance(error, PlscError) or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return any(mark in text for mark in ("gloo", "Gloo", "NCCL", "Connection", "TCPStore"))


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Context manager that turns the first SIGINT or SIGTERM into a request to stop.

    `number` is the signal's, or 0. A second SIGINT raises KeyboardInterrupt at once. When the process is
    still inside the context `deadline_seconds` after the first signal, it is ended: a peer may be
    dead, and the collective that waits for it would never return. Outside the main thread, where Python
    delivers no signals, it does nothing.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self.number = 0
        self._deadline_seconds = deadline_seconds
        self._left = threading.Event()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python runs handlers between two bytecodes, so not while the main thread is inside a
        # collective. The wake-up descriptor is written by the C handler itself, at once.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous_descriptor = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        threading.Thread(target=self._watch, daemon=True, name="plsc-deadline").start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._previous:
            return
        self._left.set()
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
                if number not in _SIGNALS:
                    continue
                if not self._left.wait(self._deadline_seconds):
                    logger.error(
                        "no step boundary within %g s after %s; stopped without saving",
                        self._deadline_seconds,
                        signal.Signals(number).name,
                    )
                    os._exit(128 + number)
                return
        finally:
            os.close(self._read_end)
