"""Messages in words of the command line: flags instead of setters, the parser's findings in plain terms."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from plsc.config import all_options
from plsc.errors import did_you_mean
from plsc.option import describe_kind

Flags = Mapping[str, tuple[Any, str]]
"""Name of a flag, without dashes, to its type and its meaning."""

_CALL = re.compile(r"\bset_\w+\(([^()]*)\)")
_PLAIN = {"None": "null", "True": "true", "False": "false"}


def option_flags() -> dict[str, tuple[Any, str]]:
    """Return the flags of a run: one for each option."""
    return {spec.path: (spec.kind, spec.meaning) for spec in all_options()}


def in_flags(text: str, *, short: bool = False) -> str:
    """Return a message with setters as flags: ``set_num_workers(0)`` becomes ``--data.num_workers 0``.

    short: leave the group out, as the flags of ``plsc data`` do: ``--label_column``.
    """
    flags = {spec.setter: spec.name if short else spec.path for spec in all_options()}

    def flag(call: re.Match[str]) -> str:
        name = flags.get(call[0].partition("(")[0])
        if name is None:
            return call[0]
        value = call[1].strip()
        if len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]:
            value = shlex.quote(value[1:-1])
        return f"--{name} {_PLAIN.get(value, value)}".rstrip()

    return _CALL.sub(flag, text)


Place = Callable[[str, str], "str | None"]
"""Where an option's value stands if it came from a file, given both as text."""


def explain(problem: str, flags: Flags, program: str, place: Place) -> str:
    """Return what the option parser says in one line of ours.

    flags: those that the verb has. program: as which it was called, ``plsc train`` say.
    """
    line = " ".join(problem.split())
    for pattern, explanation in _EXPLANATIONS:
        found = pattern.search(line)
        said = explanation(found, flags, place) if found else None
        if said is not None:
            line = said
            break
    return f"{line}; see {program} --help"


def _wrong_value(found: re.Match[str], flags: Flags, place: Place) -> str | None:
    """``Parser key "a.b": ... Got value: x``."""
    if found["name"] not in flags:
        return None
    kind, meaning = flags[found["name"]]
    where = place(found["name"], found["value"])
    name = f"{where}: {found['name']}" if where else f"--{found['name']}"
    return f"{name} is {found['value']!r}; expected {_in_words(kind)} ({meaning})"


def _wrong_file(found: re.Match[str], flags: Flags, place: Place) -> str:
    return f"--config wants a YAML file of options: {found[1]}"


def _unknown_flag(found: re.Match[str], flags: Flags, place: Place) -> str:
    return f"there is no option --{found[1]}{_nearest(found[1], flags)}"


def _unknown_entry(found: re.Match[str], flags: Flags, place: Place) -> str:
    where = place(found[1], "")
    at = f"{where}: " if where else ""
    return f"{at}there is no option {found[1]!r}{_nearest(found[1], flags)}"


def _missing(found: re.Match[str], flags: Flags, place: Place) -> str:
    names = [name.strip().partition(".") for name in found[1].split(",")]
    return f"{', '.join(f'--{name or verb}' for verb, _, name in names)} must be given"


_EXPLANATIONS: tuple[
    tuple[re.Pattern[str], Callable[[re.Match[str], Flags, Place], str | None]], ...
] = (
    (re.compile(r'Parser key "config": (.*)'), _wrong_file),
    (re.compile(r"(?:Problems parsing config|Unexpected config): (.*)"), _wrong_file),
    (re.compile(r'Parser key "(?P<name>[\w.]+)":.*(?:Got|Given) value: (?P<value>.*)'), _wrong_value),
    (re.compile(r"nrecognized arguments: --([\w.]+)"), _unknown_flag),
    (re.compile(r"does not accept option '([\w.]+)'"), _unknown_entry),
    (re.compile(r"following arguments are required: ([\w.]+(?:, [\w.]+)*)"), _missing),
)  # fmt: skip


def _nearest(name: str, flags: Iterable[str]) -> str:
    """Return the hint at the nearest flag; its group may have been left out."""
    known = list(flags)
    same = [flag for flag in known if flag.rpartition(".")[2] == name]
    if same:
        return f"; did you mean {' or '.join(repr(flag) for flag in same)}?"
    return did_you_mean(name, known)


def _in_words(kind: Any) -> str:
    """Return a type as it is written in a flag or in YAML."""
    words = describe_kind(kind).replace("a sequence of", "a list of")
    for python, plain in _PLAIN.items():
        words = words.replace(python, plain)
    return words
