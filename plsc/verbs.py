"""Verbs of a second level, ``plsc data partition`` say: from a table of them to a command line."""

from __future__ import annotations

import argparse
import dataclasses
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from plsc.errors import (
    OptionError,
    PlscError,
    as_worded,
    did_you_mean,
    failure_text,
    record_failure,
)


@dataclass(frozen=True)
class Argument:
    """A flag ``--name``. default: dataclasses.MISSING if it must be given. kind: bool makes a switch.

    positional: it is given by its place, without ``--name``.
    """

    name: str
    kind: Any
    default: Any
    meaning: str
    positional: bool = False


@dataclass(frozen=True)
class Verb:
    """One verb. arguments: asked for when the verb is used, so that the others need not be imported."""

    meaning: str
    arguments: Callable[[], Sequence[Argument]]
    run: Callable[..., None]


_HEAD_START_SECONDS = 1.0  # torchrun ends all ranks of a machine as soon as one has left

_KINDS = {"int": "a whole number", "float": "a number"}


def in_words(problem: str) -> str:
    """Return what argparse says in the words of the other messages: what came, what was expected."""
    if found := re.fullmatch(r"argument (--\S+): invalid (\w+) value: (.*)", problem):
        return f"{found[1]} is {found[3]}; expected {_KINDS.get(found[2], found[2])}"
    if found := re.fullmatch(
        r"argument verb: invalid choice: '(.*?)' \(choose from (.*)\)", problem
    ):
        known = [name.strip(" '") for name in found[2].split(",")]
        hint = did_you_mean(found[1], known)
        return f"there is no verb {found[1]!r}; known: {', '.join(known)}{hint}"
    if found := re.fullmatch(r"argument (--\S+): expected one argument", problem):
        return f"{found[1]} needs a value behind it"
    if problem == "the following arguments are required: verb":
        return "a verb must be given"
    return problem


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{in_words(message)}; see {self.prog} --help")


def run_verb(
    program: str, meaning: str, verbs: Mapping[str, Verb], arguments: Sequence[str] | None
) -> int:
    """Run ``<program> <verb> --flag ...``; return the exit code.

    arguments: those after the program's name; None takes them from sys.argv.
    """
    try:
        parsed, unknown = _parser(program, meaning, verbs).parse_known_args(arguments)
        given = vars(parsed)
        if unknown:
            raise _unknown(unknown[0], program, parsed.verb, verbs)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _leave)
        verbs[given.pop("verb")].run(**given)
    except PlscError as error:
        return report(error, as_worded)
    except KeyboardInterrupt:
        print("plsc: stopped; nothing was published", file=sys.stderr)
        return 130
    return 0


def report(error: PlscError, wording: Callable[[str], str] = str) -> int:
    """Print an error that ends the command, unless another rank does; return the exit code."""
    record_failure(error)
    if isinstance(error, SystemExit):  # a run that a signal stopped has logged it
        return error.exit_code
    if getattr(error, "is_reported", False):
        time.sleep(_HEAD_START_SECONDS)
    else:
        print(wording(failure_text(error)), file=sys.stderr, flush=True)
    return error.exit_code


def _unknown(word: str, program: str, verb: str, verbs: Mapping[str, Verb]) -> OptionError:
    """Return the error for a word that a verb does not take."""
    called = f"{program} {verb}"
    if not word.startswith("-"):
        return OptionError(f"{called} does not take {word!r}; see {called} --help")
    flag = word.partition("=")[0]
    known = [
        f"--{argument.name}" for argument in verbs[verb].arguments() if not argument.positional
    ]
    return OptionError(
        f"{called} has no option {flag}{did_you_mean(flag, known)}; see {called} --help"
    )


def _parser(program: str, meaning: str, verbs: Mapping[str, Verb]) -> argparse.ArgumentParser:
    parser = _Parser(prog=program, description=meaning, allow_abbrev=False)
    choices = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    for name, verb in verbs.items():
        one = choices.add_parser(
            name,
            help=verb.meaning,
            description=f"{verb.meaning[0].upper()}{verb.meaning[1:]}.",
            allow_abbrev=False,
        )
        for argument in verb.arguments():
            _add(one, argument)
    return parser


def _add(parser: argparse.ArgumentParser, argument: Argument) -> None:
    meaning = argument.meaning.replace("%", "%%")
    if argument.positional:
        parser.add_argument(argument.name, type=argument.kind, help=meaning)
    elif argument.kind is bool:
        parser.add_argument(f"--{argument.name}", action="store_true", help=meaning)
    elif argument.default is dataclasses.MISSING:
        parser.add_argument(f"--{argument.name}", type=argument.kind, required=True, help=meaning)
    else:
        if argument.default is not None:
            meaning += f" (default: {argument.default})"
        parser.add_argument(
            f"--{argument.name}", type=argument.kind, default=argument.default, help=meaning
        )


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Turn SIGTERM into an exit that lets what was begun be cleaned up."""
    sys.exit(128 + number)
