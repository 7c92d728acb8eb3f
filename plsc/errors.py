"""User-fixable errors, and the removal of secrets from messages.

All derive from `PlscError`. The command line prints their messages without a traceback; in a script they are
ordinary exceptions. Any other exception is a bug in plsc or in user code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parent)
_THREADS = str(Path(contextlib.__file__).parent / "concurrent")  # frames of a thread's result


class PlscError(Exception):
    """Base class of user-fixable errors; the message has no secrets of URLs and no control characters."""

    exit_code = 1

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(in_terminal(one) if isinstance(one, str) else one for one in arguments))


class OptionError(PlscError, ValueError):
    """An option has the wrong type, is out of range, or contradicts another one."""


class DataError(PlscError):
    """A dataset, an image, a label or a pair file is missing or damaged.

    kind: the category in which bad samples are counted: unreadable, missing, empty, too large, undecodable,
    not finite, label, or a category of the source.
    """

    def __init__(self, message: str = "", *, kind: str = "unreadable") -> None:
        super().__init__(message)
        self.kind = kind

    def at(self, where: str) -> DataError:
        """Return the same error with a location in front of its message."""
        return DataError(f"{where}: {self}", kind=self.kind)


class naming:  # noqa: N801 - used as contextlib.suppress; a generator would take five times as long
    """Put ``name(*arguments)``, a location, in front of the message of a DataError in the block."""

    def __init__(self, name: Callable[..., str], *arguments: Any) -> None:
        self.name, self.arguments = name, arguments

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DataError):
            raise error.at(self.name(*self.arguments)) from error


class CheckpointError(PlscError):
    """A checkpoint is missing, damaged, or does not fit the run; or it could not be written."""


class NotSavedError(CheckpointError, SystemExit):
    """A run has ended, but checkpoints could not be uploaded.

    result: its TrainResult. A script that does not catch the error exits with 3; the run has logged it.
    """

    exit_code = 3

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.code, self.result = self.exit_code, result


class TrainingError(PlscError):
    """Training cannot continue: the loss is not finite, for example."""


class DistributedError(PlscError):
    """Another rank failed or was lost; the message names the rank and the reason if they are known."""


class TrainingInterrupted(PlscError, SystemExit):
    """Training was stopped by a signal, after its state was saved if possible.

    A script that does not catch it exits with 128 + the number of the signal, as shells do.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.code = self.exit_code = 128 + signal_number


# Control characters, line breaks, surrogates, and embeddings, overrides and isolates of bidirectional text.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def check_name(name: str) -> str:
    """Return the name of an entry or class. Raises DataError for a character that `printable` escapes."""
    if _UNSAFE.search(name):
        raise DataError(f"the name '{printable(name[:200])}' has a control character or changes direction")
    return name


def printable(text: bytes | str) -> str:
    """Return a string (bytes: UTF-8) as one line that changes neither a terminal nor the order of characters.

    What people write is unchanged: zero-width joiners and non-joiners, and blanks of all kinds.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def in_terminal(text: str) -> str:
    """Return lines without secrets (`shown`) and control characters (`printable`)."""
    return re.sub(r"[^\n\t]+", lambda part: printable(part[0]), shown(text))


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``known: a, b, c; did you mean 'b'?`` for an error about an unknown name."""
    known = sorted(known)
    return f"known: {', '.join(known)}{did_you_mean(name, known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'b'?``, or '' if no name is similar."""
    import difflib  # only needed for error messages

    known = list(known)
    near = difflib.get_close_matches(name, known, 1, cutoff=0.7)
    near = near or [one for one in known if len(one) > 3 and name.startswith(one)]  # nproc-per-node
    return f"; did you mean {near[0]!r}?" if near else ""


def add_note(error: BaseException, note: str) -> None:
    """Add a note below an error's message, once; its type and traceback are unchanged."""
    note = in_terminal(note)
    if hasattr(error, "add_note"):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif note not in str(error):  # Python 3.10
        text, *others = error.args or ("",)
        error.args = (f"{text}; {note}", *others)


def without_our_frames(error: PlscError) -> PlscError:
    """Return the error for a script that called plsc: its line and the message; the whole is logged as DEBUG.

    Of the tracebacks of the error and its causes, the frames go that are above the first one outside plsc.
    """
    logging.getLogger("plsc").debug(in_terminal("".join(traceback.format_exception(error))))
    part: BaseException | None = error
    while part is not None:
        trace = part.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_PACKAGE, _THREADS)):
            trace = trace.tb_next
        part.__traceback__ = trace
        part = part.__cause__
    return error


def kind_and_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, if any, without secrets."""
    return shown(": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]]))


@contextlib.contextmanager
def refusing(what: str, advice: str = "") -> Iterator[None]:
    """Convert any exception in the block to OptionError: `what`, the cause and the advice."""
    try:
        yield
    except PlscError:
        raise
    except Exception as error:
        ending = f"; {advice}" if advice else ""
        raise OptionError(f"{what}: {kind_and_line(error)[:300]}{ending}") from error


MESSAGE_START = "plsc: error: "
LAUNCH_PREFIX = "plsc-launch-"  # of the private folder of a `plsc launch`
LAUNCHER_VARIABLE = "PLSC_LAUNCHER"
"""Environment variable: process id of the `plsc launch` that prints the errors of its ranks."""


def record_failure(error: BaseException) -> bool:
    """Write an error to the file for torchrun's failure summary, if torchrun started this process.

    Writes the message of a PlscError, the traceback of other errors. The `record` decorator of
    torch.distributed.elastic would also write all causes, which may contain secrets.
    Returns whether `plsc launch` will print the message.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not isinstance(error, (SystemExit, KeyboardInterrupt)):
        text = f"{MESSAGE_START}{error}"
        if not isinstance(error, PlscError):
            text = in_terminal("".join(traceback.format_exception(error))).rstrip()
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "kind": type(error).__name__}
        content = {"message": {"message": text, "extraInfo": extra}}
        with contextlib.suppress(OSError):
            # A rank may be stopped at any moment, and torchrun fails on half a file.
            Path(f"{path}.new").write_text(json.dumps(content), encoding="utf-8")
            os.replace(f"{path}.new", path)  # noqa: PTH105
            return os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid())
    return False


_SCHEME = r"[a-z][a-z0-9+.-]{1,20}:/{1,2}"  # pathlib reduces two slashes to one
_CHAIN = re.compile(r"(::)(?=(?:[a-z][a-z0-9+.-]*::){0,9}[a-z][a-z0-9+.-]*:/)", re.IGNORECASE)
# A '?' may be a wildcard, but not before name=, nor in HTTP URLs.
_QUERY = re.compile(r"(https?:/[^?#]*[?#]|[?#](?=[^/?#]*=)).*", re.IGNORECASE)
_HOST = r"(?:\[[^\]@]*\]|[^@:/?#]*)(?::\d{1,5})?(?:[/?#]|$)"
_CONTAINER = r"(?:abfss?|az):/{1,2}[^@:/?#]*@(?![^/?#]*@)"  # of an account of Azure
# A bucket of S3 has no port: what follows a ':' is a password, which may begin with digits and '/'.
_START = rf"s3[an]?:/{{1,2}}(?=[^@/?#]*:)|{_SCHEME}(?!{_HOST})"
# A user name; or user name and password, which may contain '/' and '@', up to the last '@' or to a '?'.
_USER = re.compile(
    rf"({_CONTAINER})|({_START})(?:[^@:/?#]*@(?![^/?#]*@)|.*@|[^@/]*(?=[?#]\*\*\*))", re.IGNORECASE
)
# A password with blanks, unless the ':' is before a port or ends a part of the sentence.
_BLANKS = re.compile(
    rf"({_SCHEME})[^@/\s:\[]*:(?!:|\d{{0,5}}[\s/])[^@\s?#]{{0,99}}[^\S\n][^@\n]{{0,99}}@", re.IGNORECASE
)
_END_OF_HOST = re.compile(r"[/?#]|::(?![\w:.%]{0,60}\])")  # '::' is also in an IPv6 address
_PORTS = re.compile(r"(?:(?:\[[^\]]*\]|[^:,\[]*)(?::\d{0,5})?(?:,|$))*")  # PostgreSQL takes several hosts
_NO_PORTS = re.compile(r"(?:arn:.*|[^:]*)", re.IGNORECASE)  # access points of S3 are named arn:...
_LONGEST_URL = 4096
_USER_OF_CLIENT = re.compile(r"[^/@:'\"(=]*:.*@")


def shown(text: str, *, by_client: bool = False) -> str:
    """Remove user names, passwords and query values from all URLs in a text.

    Each URL of a chain (``zip://a.zip::https://...``) is parsed separately. Texts without secrets are
    unchanged. by_client: the text comes from a client library, which may have removed the scheme.
    """

    return re.sub(r"\S+", lambda word: _redacted(word[0], by_client), _BLANKS.sub(r"\1", text))


def _redacted(text: str, by_client: bool = False) -> str:
    """Return a URL, or a word with one, without user names, passwords and query values."""
    if not by_client and ":/" not in text:
        return text
    if len(text) > _LONGEST_URL:  # the search takes quadratic time
        return f"({len(text)} characters)"
    url = text.rstrip("'\")]}>,.;:")
    parts = [_USER.sub(r"\1\2", part) for part in _CHAIN.split(_QUERY.sub(r"\1***", url))]
    if by_client:
        parts = [_USER_OF_CLIENT.sub("", part) for part in parts]
    return "".join(parts) + text[len(url) :]


def has_open_secret(url: str) -> bool:
    """Return whether messages could not tell where the user name and password of a URL end.

    A password is before the last '@' of the host's part, without a blank or '::', and no other '@' follows
    that part; what follows a ':' without an '@' is a port. In a chain, that holds for each URL.
    """
    for part in _CHAIN.split(url):
        scheme, _, rest = part.partition("://")
        place = _END_OF_HOST.split(rest, maxsplit=1)[0]
        _, at, hosts = place.rpartition("@")
        ports = _NO_PORTS if scheme.lower() in ("s3", "s3a", "s3n") else _PORTS
        has_more = at and ":" in place and "@" in rest[len(place) :]
        if has_more or re.search(r"\s", place) or not ports.fullmatch(hosts):
            return True
    return False


def without_secrets(values: Any) -> Any:
    """Apply `shown` to all strings in nested options."""
    if isinstance(values, dict):
        return {key: without_secrets(value) for key, value in values.items()}
    if isinstance(values, list):
        return [without_secrets(value) for value in values]
    if not isinstance(values, str):
        return values
    # A value that is a URL may have blanks in any part.
    return _redacted(values) if re.match(_SCHEME, values, re.IGNORECASE) else shown(values)
