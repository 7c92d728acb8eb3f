"""Ask a remote store again when it fails for a moment, for a bounded time."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

from plsc.errors import DataError, PlscError, shown

Answer = TypeVar("Answer")

# Asking again does not help: the file is not there, or is not for us.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 8.0
# Exceptions of the clients of S3: nothing to sign a request with. By name: the client is an extra.
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "NoAuthTokenError",
}
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
# Where HDFS goes on with the stack of its server; its client escapes the line ends.
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
    wait = _FIRST_WAIT
    for attempt in range(1, attempts + 1):
        try:
            return call()
        except (PlscError, KeyboardInterrupt):
            raise
        except Exception as error:  # each client of a store has exceptions of its own
            advice = _advice(error)
            if isinstance(error, _FINAL) or advice in (_SIGN_IN, _ALLOWED):
                raise DataError(
                    f"{what} ({reason_of(error)}){advice and f'; {advice}'}"
                ) from _cause(error)
            passed = time.monotonic() - started
            left = total_seconds - passed
            if attempt == attempts or left <= 0:
                tries = f"{attempt} tries" if attempt > 1 else "one try"
                raise DataError(
                    f"{what} after {tries} in {passed:.0f} s ({reason_of(error)}){advice and f'; {advice}'}"
                ) from _cause(error)
            time.sleep(min(wait * _jitter.uniform(0.75, 1.25), left))
            wait = min(2 * wait, _LONGEST_WAIT)
    raise AssertionError("attempts must be at least 1")


def _cause(error: BaseException) -> BaseException | None:
    """Return a client's fault as the cause of ours, None where its traceback would show a secret."""
    one: BaseException | None = error
    while one is not None:
        if shown(str(one), by_client=True) != str(one):
            return None
        one = one.__cause__ or one.__context__
    return error


def _advice(error: Exception) -> str:
    """Return what to do about a client's fault, nothing where that is not known."""
    if type(error).__name__ in _NO_CREDENTIALS:
        return _SIGN_IN
    # What HDFS says for PermissionError.
    if isinstance(error, PermissionError) or "AccessControlException" in str(error):
        return _ALLOWED
    if isinstance(error, (ConnectionError, TimeoutError)) or _UNREACHABLE.search(str(error)):
        return _REACHABLE
    return ""


def reason_of(error: BaseException) -> str:
    """Return a client's fault in a line: cut short, as some put whole requests into it; without passwords."""
    text = _JAVA_TRACE.split(str(getattr(error, "strerror", None) or error), maxsplit=1)[0]
    text = shown(" ".join(text[:10_000].split()), by_client=True)[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
