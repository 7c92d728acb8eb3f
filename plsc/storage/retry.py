"""Retry calls to a remote store for a limited time, and abandon calls that get no answer."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from fsspec.callbacks import Callback

from plsc.errors import DataError, PlscError, shown

Answer = TypeVar("Answer")

# A retry does not help: the file is missing, or access is denied.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 8.0
# Also final: missing credentials, by the names in S3 clients, and HDFS's kind of PermissionError.
_DENIED = re.compile(
    "(No|Partial)CredentialsError|CredentialRetrievalError|NoAuthTokenError|AccessControlException"
)
# A separate generator, so that the user's random state does not change.
_jitter = random.Random()
# Where a Java stack trace begins in an HDFS error; the client escapes the line breaks.
_JAVA_TRACE = re.compile(r"(?:\\n|\n)(?:\\t|\t)at ")


def with_retries(
    call: Callable[[], Answer], what: str, *, attempts: int = 6, total_seconds: float = 60.0
) -> Answer:
    """Return ``call()``, tried up to `attempts` times within `total_seconds`.

    The wait between tries starts at 0.1 s and doubles up to 8 s, with jitter, so that many workers do not
    retry at the same moment. Permanent errors (missing file, access denied) are not retried.

    Args:
        what: start of the error message, such as ``s3://b/k cannot be read``.

    Raises:
        DataError: names the last error and how long it was tried.
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
        except Exception as error:  # each client has its own exceptions
            is_final = isinstance(error, _FINAL) or _DENIED.search(f"{type(error).__name__}: {error}")
            passed = time.monotonic() - started
            left = total_seconds - passed
            if is_final or attempt == attempts or left <= 0:
                tries = f"{attempt} tries" if attempt > 1 else "one try"
                after = "" if is_final else f" after {tries} in {passed:.0f} s"
                # The client's traceback may show a secret.
                raise DataError(f"{what}{after} ({reason_of(error)})") from None
            time.sleep(min(pause * _jitter.uniform(0.75, 1.25), left))
            pause = min(2 * pause, _LONGEST_WAIT)


def reason_of(error: BaseException) -> str:
    """Return a client's error on one line, without passwords and cut to 200 characters."""
    text = _JAVA_TRACE.split(str(getattr(error, "strerror", None) or error), maxsplit=1)[0]
    text = shown(" ".join(text[:10_000].split()), by_client=True)[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_LOOK_SECONDS = 0.5


class Progress(Callback):
    """Report the bytes of a transfer, as a callback of fsspec, and keep the time of the last ones."""

    def __init__(self, on_bytes: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.last = time.monotonic()
        self._on_bytes, self._reported = on_bytes, 0

    def call(self, *_: Any, **__: Any) -> None:
        """Report what has changed; fewer bytes if another try has begun."""
        self.last = time.monotonic()
        new, self._reported = self.value - self._reported, self.value
        if self._on_bytes is not None and new:
            self._on_bytes(new)

    def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Progress:
        """Return itself, for the only file of a transfer."""
        return self


def with_timeout(call: Callable[[], Answer], silence: float, progress: Progress | None = None) -> Answer:
    """Run ``call()`` in a thread and return its result; TimeoutError after `silence` seconds without a byte.

    Python cannot end the thread of an abandoned call. It is a daemon, so it does not keep the process alive.
    """
    progress = progress or Progress()
    progress.absolute_update(0)
    outcome: Future[Answer] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="plsc-store").start()
    while not wait([outcome], _LOOK_SECONDS).done:
        if time.monotonic() - progress.last > silence:
            raise TimeoutError(f"no answer for {silence:g} s")
    return outcome.result()
