"""The errors that a user can cause or meet, their texts without the secrets of URLs.

All of them derive from `PlscError`, whose text is one clear sentence or two. The command prints that text
without a traceback; in a script they are ordinary exceptions. Anything else is a defect of the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class PlscError(Exception):
    """Base of every error that is meant for the user's eyes; the secrets of URLs in its text are left out."""

    exit_code = 1

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(shown(one) if isinstance(one, str) else one for one in arguments))


class OptionError(PlscError, ValueError):
    """An option has the wrong type, is out of range, or contradicts another one."""


class DataError(PlscError):
    """A dataset, an image, a label or a pair file is missing or broken.

    kind: what a count of bad samples files it under: unreadable, missing, empty, too large, undecodable,
    not finite, label, or what a source calls it.
    """

    def __init__(self, message: str = "", *, kind: str = "unreadable") -> None:
        super().__init__(message)
        self.kind = kind

    def at(self, where: str) -> DataError:
        """Return the same error with the name of what it is about before its text."""
        return DataError(f"{where}: {self}", kind=self.kind)


class CheckpointError(PlscError):
    """A checkpoint is missing, damaged, or does not fit the run; or it could not be written."""


class TrainingError(PlscError):
    """Training cannot go on: the loss is not finite, for example."""


class DistributedError(PlscError):
    """Another rank failed or was lost; the text says which one and why, when that is known."""


class TrainingInterrupted(PlscError, SystemExit):
    """Training was stopped by a signal, after its state had been saved where that was possible.

    A script that does not catch it exits with 128 + the signal's number, as a shell reports a signal.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.code = self.exit_code = 128 + signal_number


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``known: a, b, c; did you mean 'b'?`` for the error about an unknown name."""
    known = sorted(known)
    return f"known: {', '.join(known)}{did_you_mean(name, known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'b'?``, or nothing where no name is near."""
    import difflib  # for messages alone

    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def add_note(error: BaseException, note: str) -> None:
    """Say, once, below an error's text what it came from; its type and its traceback stay as they are."""
    note = shown(note)
    if hasattr(error, "add_note"):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif note not in str(error):  # Python 3.10
        text, *others = error.args or ("",)
        error.args = (f"{text}; {note}", *others)


def kind_and_line(error: BaseException) -> str:
    """Return an error's type, and the first line of its message if it has one."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


@contextlib.contextmanager
def refusing(what: str, advice: str = "") -> Iterator[None]:
    """Turn whatever code that is not ours raises into OptionError: what failed, the fault, and the advice."""
    try:
        yield
    except PlscError:
        raise
    except Exception as error:
        ending = f"; {advice}" if advice else ""
        raise OptionError(f"{what}: {kind_and_line(error)[:300]}{ending}") from error


MESSAGE_START = "plsc: error: "
LAUNCHER_VARIABLE = "PLSC_LAUNCHER"
"""Environment variable: process id of the `plsc launch` that prints the errors of its ranks."""


def record_failure(error: BaseException, wording: Callable[[str], str] = str) -> bool:
    """Write an error to the file from which torchrun takes its failure summary, if torchrun started us.

    That is its message if it is one for the user, else the traceback. torch.distributed.elastic's `record`
    writes all causes, too, whose texts may hold secrets.

    wording: changes the message, such as setters to flags. Returns whether `plsc launch` will print it.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not isinstance(error, (SystemExit, KeyboardInterrupt)):
        text = f"{MESSAGE_START}{wording(str(error))}"
        if not isinstance(error, PlscError):
            text = shown("".join(traceback.format_exception(error))).rstrip()
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "kind": type(error).__name__}
        content = {"message": {"message": text, "extraInfo": extra}}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(content, file)
            return os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid())
    return False


_SCHEME = r"[a-z][a-z0-9+.-]{1,20}:/{1,2}"  # pathlib makes one slash of two
_CHAIN = re.compile(r"(::)(?=[a-z][a-z0-9+.-]*(?:::|:/))", re.IGNORECASE)
# A '?' is a wildcard, too, but not in front of name=, nor over HTTP.
_QUERY = re.compile(r"(https?:/[^?]*\?|[?#](?=[^/?#]*=)).*", re.IGNORECASE)
_HOST = r"(?:\[[^\]@]*\]|[^@:/?#]*)(?::\d{0,5})?(?:[/?#]|$)"
# The name alone; or name and password, which may hold '/' and '@', to the last '@', or to a '?' in them.
_USER = re.compile(rf"({_SCHEME})(?!{_HOST})(?:[^@:/?#]*@|.*@|[^@/]*(?=[?#]\*\*\*))", re.IGNORECASE)
_USER_OF_CLIENT = re.compile(r"[^/@:'\"(=]*:.*@")


def shown(text: str, *, by_client: bool = False) -> str:
    """Return a URL, or a text with URLs in it, without users, passwords and the values of queries.

    Each URL of a chain (``zip://a.zip::https://...``) is parsed by itself. A text without secrets comes back
    as it is. by_client: it was written by a library, which may have taken the scheme off.
    """

    def redact(word: re.Match[str]) -> str:
        if not by_client and ":/" not in word[0]:
            return word[0]
        url = word[0].rstrip("'\")]}>,.;:")
        parts = [_USER.sub(r"\1", part) for part in _CHAIN.split(_QUERY.sub(r"\1***", url))]
        if by_client:
            parts = [_USER_OF_CLIENT.sub("", part) for part in parts]
        return "".join(parts) + word[0][len(url) :]

    return re.sub(r"\S+", redact, text)


def without_secrets(values: Any) -> Any:
    """Return nested options with all their strings as `shown` has them."""
    if isinstance(values, dict):
        return {key: without_secrets(value) for key, value in values.items()}
    if isinstance(values, list):
        return [without_secrets(value) for value in values]
    return shown(values) if isinstance(values, str) else values
