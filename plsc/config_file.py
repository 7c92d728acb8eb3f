"""Files of options, looked at before they are parsed: what is wrong is told with the file and the line."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from plsc.config import all_options
from plsc.errors import OptionError
from plsc.redaction import shown

_LARGEST = 2**20  # bytes
_FLAG = "--config"


def check_config_files(arguments: Sequence[str]) -> None:
    """Read the files behind ``--config`` in a command line.

    Raises OptionError that names the file: it is not there, cannot be read, is too large, is no YAML, has
    aliases, or holds something else than options.
    """
    for name in _config_files(arguments):
        _entries(name)


def refuse_aliases(arguments: Sequence[str]) -> None:
    """Raise OptionError for a value in a command line that is YAML with aliases, as the parser reads it."""
    for flag, word in zip(["", *arguments], arguments, strict=False):
        name, value = word.split("=", 1) if word.startswith("--") and "=" in word else (flag, word)
        if "&" in value and "*" in value:
            with contextlib.suppress(yaml.YAMLError, RecursionError):  # the parser reports these
                _Loader(value, name).get_single_node()


class _Loader(yaml.SafeLoader):
    """Refuse aliases: 300 bytes of nested ones stand for gigabytes. where: of the YAML, for the error."""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self._where = where

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise OptionError(
                f"{self._where} has the YAML alias *{event.anchor} in line {event.start_mark.line + 1}; "
                "expected YAML without aliases: write the value itself, or quote a string that starts with *"
            )
        return super().compose_node(parent, index)


def place_in_config_file(path: str, value: str, arguments: Sequence[str]) -> str | None:
    """Return where an option's value stands, ``run.yaml:12`` say, if it came from a file.

    path: of the option, ``train.batch_size``; value: as text. None if the command line itself gives it.
    """
    if value in _values(f"--{path}", arguments):
        return None
    places = (
        f"{name}:{line}"
        for name in reversed(list(_config_files(arguments)))  # a later one wins
        for entry, line in _entries(name)
        if entry == path
    )
    return next(places, None)


def _config_files(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the files; YAML itself may stand behind the flag, too."""
    for value in _values(_FLAG, arguments):
        is_yaml = any(mark in value for mark in ("\n", "{", ": "))
        if not is_yaml or os.path.exists(value):  # noqa: PTH110 - Path's raises for a long text
            yield value


def _values(flag: str, arguments: Sequence[str]) -> list[str]:
    joined = [word[len(flag) + 1 :] for word in arguments if word.startswith(f"{flag}=")]
    apart = [value for word, value in itertools.pairwise(arguments) if word == flag]
    return joined + apart


def _read(name: str) -> yaml.Node | None:
    """Return the file's content as nodes, which know their lines; no object is made of them."""
    try:
        with Path(name).open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise OptionError(
            f"{_FLAG} wants a YAML file of options, but {name} cannot be read: {error.strerror}"
        ) from error
    if len(data) > _LARGEST:
        raise OptionError(
            f"{name} has more than {_LARGEST} bytes; {_FLAG} wants a YAML file of options"
        )
    try:
        return _Loader(data.decode("utf-8-sig"), name).get_single_node()
    except OptionError:
        raise
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{name} is no text in UTF-8 (byte {error.start}); {_FLAG} wants a YAML file of options"
        ) from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = error.problem or error.context or "it cannot be parsed"
        raise OptionError(
            f"{name}{line} is no YAML: {problem}; write options as lines 'train:' and, indented by spaces, "
            "'batch_size: 128'"
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:100]
        raise OptionError(
            f"{name} is no YAML: {reason}; {_FLAG} wants a YAML file of options"
        ) from error


def _entries(name: str) -> list[tuple[str, int]]:
    """Return the options of a file by their dotted names, with their lines, from 1."""
    content = _read(name)
    if isinstance(content, yaml.MappingNode):
        _check_groups(name, content)
        return list(_walk(content))
    found = "is empty"
    if content is not None:
        found = (
            f"holds no options but a {'list' if isinstance(content, yaml.SequenceNode) else 'text'}"
        )
    raise OptionError(
        f"{name} {found}; expected lines such as 'train:' and, indented by spaces, 'batch_size: 128'"
    )


def _check_groups(name: str, mapping: yaml.MappingNode) -> None:
    """Raise OptionError if a group of options has a value itself, which the parser would pass over."""
    groups = {spec.path.partition(".")[0] for spec in all_options()}
    for key, value in mapping.value:
        is_empty = value.tag == "tag:yaml.org,2002:null"  # all lines of it commented out, say
        if key.value in groups and not isinstance(value, yaml.MappingNode) and not is_empty:
            example = next(
                spec.name for spec in all_options() if spec.path.startswith(f"{key.value}.")
            )
            kind = (
                "a list" if isinstance(value, yaml.SequenceNode) else repr(shown(value.value)[:80])
            )
            raise OptionError(
                f"{name}:{key.start_mark.line + 1}: {key.value} is {kind}; it is a group: expected its "
                f"options in lines below it, indented by spaces, '{example}: ...' say"
            )


def _walk(mapping: yaml.MappingNode, above: str = "") -> Iterator[tuple[str, int]]:
    for key, value in mapping.value:
        path = f"{above}{key.value}"
        yield path, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode) and not above:  # what is deeper is an option's own
            yield from _walk(value, f"{path}.")
