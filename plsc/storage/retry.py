"""Calls of a remote store: repeated for a bounded time, and given up when the store is silent.

A server may fail for a moment, or take a connection and never answer.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from plsc.errors import DataError, PlscError, shown

Answer = TypeVar("Answer")

# Asking again does not help: the file is not there, or is not for us.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 8.0
# Exceptions of the clients of S3: nothing to sign a request with. By name: the client is an extra.
_NO_CREDENTIALS = re.compile("(No|Partial)CredentialsError|CredentialRetrievalError|NoAuthTokenError")
_SIGN_IN = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; and AWS_ENDPOINT_URL for a store "
    "that is not Amazon's"
)
_ALLOWED = "check its permissions, and as whom you ask"
_REACHABLE = "check that the server runs, and that its host and port are right"
_UNREACHABLE = re.compile(
    r"connection refused|connection reset|could not connect|lookup address|name or service|no route to"
    r"|unreachable|timed out|no answer|getaddrinfo",
    re.IGNORECASE,
)
# A generator of its own: the global one belongs to the user's experiment.
_jitter = random.Random()
# Where the stack trace of an HDFS server begins; its client escapes the line ends.
_JAVA_TRACE = re.compile(r"(?:\\n|\n)(?:\\t|\t)at ")


def with_retries(
    call: Callable[[], Answer], what: str, *, attempts: int = 6, total_seconds: float = 60.0
) -> Answer:
    """Return ``call()``, tried up to `attempts` times as long as `total_seconds` have not passed.

    Between two tries it waits 0.1 s, then twice as long each time, up to 8 s, with some jitter, so that
    many workers do not return at one moment. what: for the message, such as ``s3://b/k cannot be read``.
    Raises DataError that names the last fault, how long it was tried, and what to check.
    """
    started = time.monotonic()
    pause = _FIRST_WAIT
    attempt = 0
    while True:
        attempt += 1
        try:
            return call()
        except PlscError:
            raise
        except Exception as error:  # each client of a store has exceptions of its own
            advice = _advice(error)
            is_final = isinstance(error, _FINAL) or advice in (_SIGN_IN, _ALLOWED)
            passed = time.monotonic() - started
            left = total_seconds - passed
            if is_final or attempt == attempts or left <= 0:
                tries = f"{attempt} tries" if attempt > 1 else "one try"
                after = "" if is_final else f" after {tries} in {passed:.0f} s"
                raise DataError(
                    f"{what}{after} ({reason_of(error)}){advice and f'; {advice}'}"
                ) from None  # a client's traceback may show a secret
            time.sleep(min(pause * _jitter.uniform(0.75, 1.25), left))
            pause = min(2 * pause, _LONGEST_WAIT)


def _advice(error: Exception) -> str:
    """Return what to do about a client's fault, nothing where that is not known."""
    if _NO_CREDENTIALS.fullmatch(type(error).__name__):
        return _SIGN_IN
    # What HDFS says for PermissionError.
    if isinstance(error, PermissionError) or "AccessControlException" in str(error):
        return _ALLOWED
    if isinstance(error, (ConnectionError, TimeoutError)) or _UNREACHABLE.search(str(error)):
        return _REACHABLE
    return ""


def reason_of(error: BaseException) -> str:
    """Return a client's fault in one line: cut short, as some quote whole requests; without passwords."""
    text = _JAVA_TRACE.split(str(getattr(error, "strerror", None) or error), maxsplit=1)[0]
    text = shown(" ".join(text[:10_000].split()), by_client=True)[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_LOOK_SECONDS = 0.5


class Pulse:
    """Counts the bytes of a transfer as they arrive, reports them, and keeps the time of the last."""

    def __init__(self, on_bytes: Callable[[int], None] | None = None) -> None:
        self.last = time.monotonic()
        self._on_bytes = on_bytes
        self._count = 0

    def begin(self) -> None:
        """A try begins: what moved in an earlier one is taken back."""
        self.beat(-self._count)

    def beat(self, count: int) -> None:
        """`count` more bytes have moved."""
        self.last = time.monotonic()
        self._count += count
        if self._on_bytes is not None and count:
            self._on_bytes(count)

    def end(self, total: int) -> None:
        """All `total` bytes have moved, whether the client reported them or not."""
        self.beat(total - self._count)


def watched(call: Callable[[], Answer], silence: float, pulse: Pulse | None = None) -> Answer:
    """Return ``call()``, made in a thread of its own; TimeoutError after `silence` seconds without a beat.

    The thread of a call that was given up stays behind, as nothing can end it; it keeps no process alive.
    """
    pulse = pulse or Pulse()
    pulse.begin()
    outcome: Future[Answer] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="plsc-store").start()
    while not wait([outcome], _LOOK_SECONDS).done:
        if time.monotonic() - pulse.last > silence:
            raise TimeoutError(f"no answer for {silence:g} s")
    return outcome.result()
