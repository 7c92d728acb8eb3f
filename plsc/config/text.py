"""Options as text: values of command-line flags, YAML files, and the output of `plsc config`."""

from __future__ import annotations

import math
import re
import types
import typing
from pathlib import Path
from typing import Any

import yaml

from plsc.config.options import Options, all_options, find_option
from plsc.errors import OptionError

_EXPECTED = "a YAML file with lines such as 'train:' and, indented below it, '  batch_size: 128'"
_FLOAT, _TIMESTAMP = "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number and a date is a string."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML has it
        first: [(tag, pattern) for tag, pattern in found if tag not in (_FLOAT, _TIMESTAMP)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)


_NUMBERS = re.compile(r"[-\d.eE ]+(,[-\d.eE ]+)+")  # 3,112,112


def from_text(text: str, kind: Any) -> Any:
    """Parse a string as a value of type `kind`; return the string itself if that is impossible.

    A string option takes the text unchanged (or null, if None is allowed); other types are parsed as numbers
    or YAML.
    """
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                pass
    is_yaml = text in ("null", "~") if types.NoneType in kinds else text[:1] == "{" and len(kinds) > 1
    if not text.strip() or (str in kinds and not is_yaml):
        return text
    if types.NoneType in kinds and text in ("None", "none"):
        return None
    if any(typing.get_origin(one) is tuple for one in kinds) and _NUMBERS.fullmatch(text):
        text = f"[{text}]"
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def set_from_file(options: Options, name: str) -> None:
    """Set the options of a YAML file: lines ``train.batch_size: 64``, or nested groups.

    Raises OptionError, with file and line, if the file cannot be read, is not valid YAML, or has unknown
    options or invalid values.
    """
    for path, value, place in _entries(name):
        try:
            if isinstance(value, str):
                value = from_text(value, find_option(path).kind)
            options.set(path, value, place)
        except OptionError as error:
            raise OptionError(f"{place}: {error}") from error


def _entries(name: str) -> list[tuple[str, Any, str]]:
    """Return path, value and place of each option in a file."""
    try:
        return _walk(_Loader(Path(name).read_bytes().decode("utf-8-sig")), name)
    except OptionError:
        raise
    except OSError as error:
        raise OptionError(f"cannot read {name!r}: {error.strerror}; expected {_EXPECTED}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())[:100]
        place = f"{name}:{mark.line + 1}" if mark else name
        raise OptionError(f"{place} is not valid YAML: {problem}; expected {_EXPECTED}") from error


def _walk(loader: _Loader, name: str) -> list[tuple[str, Any, str]]:
    content = loader.get_single_node()
    if not isinstance(content, yaml.MappingNode):
        raise OptionError(f"{name} contains no options; expected {_EXPECTED}")
    groups = {spec.group for spec in all_options()}
    found = []

    def add(prefix: str, key: yaml.Node, value: yaml.Node) -> None:
        place = f"{name}:{key.start_mark.line + 1}"
        path = f"{prefix}{key.value}"[:200]
        is_empty = value.tag == "tag:yaml.org,2002:null"
        if path in groups and isinstance(value, yaml.MappingNode):
            for inner, content in value.value:
                add(f"{path}.", inner, content)
        elif not (path in groups and is_empty):  # an empty group is fine: all its lines may be comments
            found.append((path, loader.construct_object(value, deep=True), place))

    for key, value in content.value:
        add("", key, value)
    return found


def render_options(options: Options) -> str:
    """Return all options as YAML for --config, each with its description, and where a set value comes from.

    Options that were not set are comments, because every option in the file would count as set, and a loss
    rejects options that it does not use.
    """
    lines: list[str] = []
    group = ""
    for spec in all_options():
        if spec.group != group:
            group = spec.group
            lines.append(f"{group}:")
        lines.append(f"  # {spec.meaning} (default: {_plain(spec.default)})")
        origin = options.origins.get(spec.path)
        value = f"{spec.name}: {_plain(options.get(spec.path))}"
        lines.append(f"  # {value}" if origin is None else f"  {value}  # {origin}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).replace("\n...", "").strip()
