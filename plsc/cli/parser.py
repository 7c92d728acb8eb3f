"""The parser of the command line: commands, their arguments, one flag per option, and option files."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from plsc.config import Options, all_options, find_option
from plsc.config.option import WRONG, Check, convert, describe_kind
from plsc.config.options import nearest_option
from plsc.config.text import from_text, set_from_file
from plsc.errors import OptionError, did_you_mean
from plsc.version import __version__

REQUIRED = dataclasses.MISSING


@dataclass(frozen=True)
class Argument:
    """A flag ``--name`` or a positional argument of a command.

    kind: its type; bool makes a switch. default: default value, or REQUIRED. meaning: help text. positional:
    passed without ``--name``, and may be left out if it has a default; a list takes several words, a tuple
    all that follow, flags included. check: as of an option.
    """

    name: str
    kind: Any
    default: Any
    meaning: str
    positional: bool = False
    check: Check | None = None


def arguments_of(factory: type) -> list[Argument]:
    """Return the flags for the fields of a dataclass, whose metadata has the help texts."""
    kinds = typing.get_type_hints(factory)
    return [
        Argument(one.name, kinds[one.name], one.default, one.metadata["meaning"])
        for one in dataclasses.fields(factory)
    ]


def word(name: str, meaning: str, default: Any = REQUIRED) -> Argument:
    """Return a positional argument."""
    return Argument(name, str, default, meaning, positional=True)


@dataclass(frozen=True)
class Command:
    """A command, and the function that it calls with its arguments by name.

    arguments: the arguments, or a function that returns them, to delay imports. options: if not None, the
    command has ``--config`` and a flag per option, `run` gets `options`, and the help shows these. example:
    its last words, for the help.
    """

    meaning: str
    run: Callable[..., None]
    arguments: Sequence[Argument] | Callable[[], Sequence[Argument]] = ()
    options: Sequence[str] | None = None
    example: str = ""


@dataclass(frozen=True)
class Group:
    """A group of commands, such as ``plsc data``; sections: names of commands by the headings of its help."""

    meaning: str
    commands: Mapping[str, Command | Group]
    sections: Mapping[str, Sequence[str]] | None = None


def find_command(root: Group, words: Sequence[str]) -> tuple[str, Command, Sequence[str]]:
    """Return the full name of the command at the start of a command line, the command, and the other words.

    Raises OptionError for an unknown command; prints and exits for ``--help``, ``--version`` and nothing.
    """
    name, found = "plsc", root
    while True:
        word, words = (words[0], words[1:]) if words else ("--help", words)
        if word in ("-h", "--help", "--version"):
            print(f"plsc {__version__}" if word == "--version" else _overview(name, found))
            raise SystemExit(0)
        if word not in found.commands:
            known, hint = ", ".join(found.commands), did_you_mean(word, found.commands)
            raise OptionError(_with_help(f"unknown command {word!r}; known: {known}{hint}", name))
        name, chosen = f"{name} {word}", found.commands[word]
        if isinstance(chosen, Command):
            return name, chosen, words
        found = chosen


def _overview(name: str, group: Group) -> str:
    width = max(map(len, group.commands)) + 2
    lines = [f"usage: {name} <command> [--help] [arguments]", "", _sentence(group.meaning)]
    for section, words in (group.sections or {"commands": list(group.commands)}).items():
        lines += ["", f"{section}:"]
        for word in words:
            found = group.commands[word]
            inside = f": {', '.join(found.commands)}" if isinstance(found, Group) else ""
            lines.append(f"  {word:{width}}{found.meaning}{inside}")
    return "\n".join(lines)


def _with_help(message: str, command: str) -> str:
    """Return an error message that ends with a reference to the command's help."""
    return f"{message}{' See' if message.endswith('?') else '; see'} {command} --help"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


class _Note(argparse.Action):
    """Record a flag and its text, in the order of the command line."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, text: Any, flag: str | None = None
    ) -> None:
        if self.nargs == 0:
            text = "false" if str(flag).startswith("--no-") else "true"
        namespace.given.append((self.dest, text))


class CommandParser(argparse.ArgumentParser):
    """The flags of one command."""

    def __init__(self, name: str, command: Command) -> None:
        self._takes_options = command.options is not None
        found = command.arguments() if callable(command.arguments) else command.arguments
        usage = epilog = None
        if self._takes_options:
            shapes = [" {}" if one.default is REQUIRED else " [{}]" for one in found if one.positional]
            words = "".join(shapes).format(*(one.name.upper() for one in found if one.positional))
            usage = f"{name}{words} [--config FILE] [--<group>.<option> VALUE ...]"
            epilog = "All options: plsc options [GROUP or WORD]"
        if command.example:
            epilog = f"Example: {name} {command.example}\n{epilog or ''}"
        super().__init__(
            prog=name, usage=usage, description=_sentence(command.meaning), epilog=epilog, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self._arguments = {one.name: one for one in found}
        for one in self._arguments.values():
            self._add(one)
        if (frequent := command.options) is not None:
            self.add_argument("--config", action=_Note, metavar="FILE", help="YAML file of options")
            self.add_argument("--quiet", action="store_true", help="print only warnings and errors")
            shown = self.add_argument_group("frequent options")
            for spec in sorted(all_options(), key=lambda spec: [*frequent, spec.path].index(spec.path)):
                text = argparse.SUPPRESS
                if spec.path in frequent:
                    text = _help(re.split("[;(]", spec.meaning)[0].strip(), spec.kind, spec.default)
                how: dict[str, Any] = {"nargs": 0} if spec.kind is bool else {"metavar": "VALUE"}
                names = [f"--{spec.path}", f"--no-{spec.path}"][: 1 + (spec.kind is bool)]
                shown.add_argument(*names, action=_Note, help=text, **how)

    def _add(self, one: Argument) -> None:
        how: dict[str, Any] = {"action": _Note, "help": _help(one.meaning, one.kind, one.default)}
        if one.positional:
            nargs = None if one.default is REQUIRED else "?"
            how["nargs"] = {tuple: argparse.PARSER, list: "+"}.get(typing.get_origin(one.kind), nargs)
            self.add_argument(one.name, **how)
            return
        spellings = dict.fromkeys((one.name, one.name.replace("_", "-")))
        names = [f"--{name}" for name in spellings] + [f"-{name}" for name in spellings if len(name) == 1]
        if one.kind is bool:
            how["nargs"] = 0
            names += [f"--no-{name}" for name in spellings]
        self.add_argument(*names, dest=one.name, metavar="VALUE", required=one.default is REQUIRED, **how)

    def _passes_words_on(self) -> bool:
        words = [one for one in self._arguments.values() if one.positional]
        return any(typing.get_origin(one.kind) is tuple for one in words)

    def error(self, message: str) -> NoReturn:
        """Raise OptionError for an error of argparse."""
        raise OptionError(_with_help(message, self.prog))

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Parse the command line; return the arguments of the command's function. Raises OptionError."""
        namespace = argparse.Namespace(given=[])
        if self._passes_words_on():
            namespace, unknown = self.parse_known_args(words, namespace)
        else:  # flags may stand before, between and behind the words
            namespace, unknown = self.parse_known_intermixed_args(words, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            problem = "unknown flag" if flag.startswith("-") else "unexpected argument"
            hint = "; a switch is --NAME or --no-NAME" if flag.lower() in ("true", "false") else ""
            self.error(f"{problem} {flag}{hint or self._hint(flag.lstrip('-'))}")
        if getattr(namespace, "quiet", False):
            logging.getLogger("plsc").setLevel(logging.WARNING)  # until `on_terminal` ends
        options = Options()
        values = {name: one.default for name, one in self._arguments.items() if one.default is not REQUIRED}
        for name, text in namespace.given:
            if isinstance(text, list):
                values[name] = text
            elif text is None:  # a word that was left out
                continue
            elif name in self._arguments:
                values[name] = self._value(self._arguments[name], text)
            elif name == "config":
                set_from_file(options, text)
            else:
                options.set(name, from_text(text, find_option(name).kind), f"--{name}")
        return {**values, "options": options} if self._takes_options else values

    def _hint(self, name: str) -> str:
        near = did_you_mean(name, [one.name for one in self._arguments.values() if not one.positional])
        near = near or (nearest_option(name) if self._takes_options else "")
        return re.sub(r"'([\w.]+)'", r"--\1", near)

    def _value(self, one: Argument, text: str) -> Any:
        value = convert(from_text(text, one.kind), one.kind)
        expected = describe_kind(one.kind) if value is WRONG else one.check and one.check(value)
        if expected:
            self.error(f"--{one.name} is {text!r}; expected {expected} ({one.meaning})")
        return value


def describe_options(wanted: str) -> str:
    """Return the rows of the option table whose group, path or description has the word; "": all.

    Raises OptionError if there is none.
    """
    rows = list(all_options())
    found = [spec for spec in rows if spec.group == wanted] or [
        spec for spec in rows if wanted.lower() in f"{spec.path} {spec.meaning}".lower()
    ]
    if not found:
        known = ", ".join(dict.fromkeys(spec.group for spec in rows))
        near = nearest_option(wanted)
        raise OptionError(
            f"no option has {wanted!r} in its path or description{near}; the groups are {known}"
        )
    blank = {"initial_indent": "    ", "subsequent_indent": "    ", "width": 100}
    lines = []
    for spec in found:
        setter = f", {spec.setter}" if spec.setter else ""
        kind = f"or --no-{spec.path}" if spec.kind is bool else describe_kind(spec.kind)
        lines.append(f"--{spec.path} ({kind}, default: {spec.default}{setter})")
        lines += textwrap.wrap(spec.meaning, **blank)  # type: ignore[arg-type]
    return "\n".join(lines)


def _help(meaning: str, kind: Any, default: Any) -> str:
    shown = "" if default in (REQUIRED, None, "") else f", default: {default}"
    return f"{meaning} ({'switch' if kind is bool else describe_kind(kind)}{shown})".replace("%", "%%")
