"""The parser of the command line: commands, their arguments, one flag per option, and option files."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from plsc.config import Options, all_options, find_option
from plsc.config.option import WRONG, convert, describe_kind
from plsc.config.options import nearest_option
from plsc.config.text import from_text, set_from_file
from plsc.errors import OptionError, did_you_mean
from plsc.version import __version__

REQUIRED = dataclasses.MISSING


@dataclass(frozen=True)
class Argument:
    """A flag ``--name`` or a positional argument of a command.

    kind: its type; bool makes a switch. default: default value, or REQUIRED. meaning: help text. positional:
    passed without ``--name``; a list takes several words, a tuple all that follow, flags included.
    """

    name: str
    kind: Any
    default: Any
    meaning: str
    positional: bool = False


def arguments_of(factory: type) -> list[Argument]:
    """Return the flags for the fields of a dataclass, whose metadata has the help texts."""
    kinds = typing.get_type_hints(factory)
    return [
        Argument(one.name, kinds[one.name], one.default, one.metadata["meaning"])
        for one in dataclasses.fields(factory)
    ]


def word(name: str, meaning: str) -> Argument:
    """Return a positional argument."""
    return Argument(name, str, REQUIRED, meaning, positional=True)


@dataclass(frozen=True)
class Command:
    """A command, and the function that it calls with its arguments by name.

    arguments: the arguments, or a function that returns them, to delay imports. takes_options: the command
    has ``--config`` and a flag per option, and `run` gets `options`.
    """

    meaning: str
    run: Callable[..., None]
    arguments: Sequence[Argument] | Callable[[], Sequence[Argument]] = ()
    takes_options: bool = False


@dataclass(frozen=True)
class Group:
    """A group of commands, such as ``plsc data``."""

    meaning: str
    commands: Mapping[str, Command | Group]


def find_command(root: Group, words: Sequence[str]) -> tuple[str, Command, Sequence[str]]:
    """Return the full name of the command at the start of a command line, the command, and the other words.

    Raises OptionError for an unknown command; prints and exits for ``--help`` and ``--version``.
    """
    name, found = "plsc", root
    while isinstance(found, Group):
        word, words = (words[0], words[1:]) if words else ("", words)
        if word in ("-h", "--help", "--version"):
            print(f"plsc {__version__}" if word == "--version" else _overview(name, found))
            raise SystemExit(0)
        if word not in found.commands:
            problem = f"unknown command {word!r}" if word else "no command was given"
            hint = did_you_mean(word, found.commands)
            known = ", ".join(found.commands)
            raise OptionError(_with_help(f"{problem}; known: {known}{hint}", name))
        name, chosen = f"{name} {word}", found.commands[word]
        if isinstance(chosen, Command):
            return name, chosen, words
        found = chosen
    raise AssertionError


def _overview(name: str, group: Group) -> str:
    width = max(map(len, group.commands)) + 2
    lines = [f"  {one:{width}}{command.meaning}" for one, command in group.commands.items()]
    usage = f"usage: {name} <command> [--help] [arguments]"
    return "\n".join([usage, "", _sentence(group.meaning), "", "commands:", *lines])


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
        namespace.given.append((self.dest, "true" if self.nargs == 0 else text))


class CommandParser(argparse.ArgumentParser):
    """The flags of one command."""

    def __init__(self, name: str, command: Command) -> None:
        self._takes_options = command.takes_options
        found = command.arguments() if callable(command.arguments) else command.arguments
        usage = None
        if self._takes_options:
            words = "".join(f" {one.name.upper()}" for one in found if one.positional)
            usage = f"{name}{words} [--config FILE] [--<group>.<option> VALUE ...]"
        super().__init__(prog=name, usage=usage, description=_sentence(command.meaning), allow_abbrev=False)
        self._arguments = {one.name: one for one in found}
        is_flags_only = not any(one.positional for one in self._arguments.values())
        for one in self._arguments.values():
            self._add(one, is_flags_only)
        if self._takes_options:
            self.add_argument("--config", action=_Note, metavar="FILE", help="YAML file of options")
            self.add_argument("--quiet", action="store_true", help="print only warnings and errors")
            groups = {spec.group: self.add_argument_group(spec.group) for spec in all_options()}
            for spec in all_options():
                groups[spec.group].add_argument(
                    f"--{spec.path}",
                    action=_Note,
                    metavar="VALUE",
                    help=_help(spec.meaning, spec.kind, spec.default),
                )

    def _add(self, one: Argument, is_flags_only: bool) -> None:
        how: dict[str, Any] = {"action": _Note, "help": _help(one.meaning, one.kind, one.default)}
        if one.positional:
            if nargs := {tuple: argparse.PARSER, list: "+"}.get(typing.get_origin(one.kind)):
                how["nargs"] = nargs
            self.add_argument(one.name, **how)
            return
        if one.kind is bool:  # a value behind a switch would be taken for a positional argument
            how |= {"nargs": "?", "const": "true"} if is_flags_only else {"nargs": 0}
        spellings = dict.fromkeys((one.name, one.name.replace("_", "-")))
        names = [f"-{name}" if len(name) == 1 else f"--{name}" for name in spellings]
        self.add_argument(*names, dest=one.name, metavar="VALUE", required=one.default is REQUIRED, **how)

    def error(self, message: str) -> NoReturn:
        """Raise OptionError for an error of argparse."""
        raise OptionError(_with_help(message, self.prog))

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Parse the command line; return the arguments of the command's function. Raises OptionError."""
        namespace, unknown = self.parse_known_args(words, argparse.Namespace(given=[]))
        if unknown:
            flag = unknown[0].partition("=")[0]
            problem = "unknown flag" if flag.startswith("-") else "unexpected argument"
            self.error(f"{problem} {flag}{self._hint(flag.lstrip('-'))}")
        if getattr(namespace, "quiet", False):
            logging.getLogger("plsc").setLevel(logging.WARNING)  # until `on_terminal` ends
        options = Options()
        values = {name: one.default for name, one in self._arguments.items() if one.default is not REQUIRED}
        for name, text in namespace.given:
            if isinstance(text, list):
                values[name] = text
            elif name in self._arguments:
                values[name] = self._value(self._arguments[name], text)
            elif name == "config":
                set_from_file(options, text)
            else:
                options.set(name, from_text(text, find_option(name).kind, f"--{name}"), f"--{name}")
        return {**values, "options": options} if self._takes_options else values

    def _hint(self, name: str) -> str:
        near = did_you_mean(name, [one.name for one in self._arguments.values() if not one.positional])
        near = near or (nearest_option(name) if self._takes_options else "")
        return re.sub(r"'([\w.]+)'", r"--\1", near)

    def _value(self, one: Argument, text: str) -> Any:
        value = convert(from_text(text, one.kind, f"--{one.name}"), one.kind)
        if value is WRONG:
            kind = describe_kind(one.kind)
            self.error(f"--{one.name} is {text!r}; expected {kind} ({one.meaning})")
        return value


def _help(meaning: str, kind: Any, default: Any) -> str:
    shown = "" if default in (REQUIRED, None) else f", default: {default}"
    return f"{meaning} ({describe_kind(kind)}{shown})".replace("%", "%%")
