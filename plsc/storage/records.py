"""Read JSON that strangers may have written as typed records: `read_record`."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from plsc.errors import CheckpointError, PlscError
from plsc.storage.regular import parse_json, read_regular

Record = TypeVar("Record")
FileName = Annotated[str, r"(?#a plain file name)(?!\.\.?$)[^/\\\0-\x1f\x7f-\x9f]+"]  # of a folder
Text = Annotated[str, r"(?s).*"]  # may have control characters, as names that are data do
Size = Annotated[int, (1, 2**40)]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal may interpret them
_DEEPEST = 50  # levels of JSON; Python's recursion limit allows some hundred
_NAMES: dict[Any, str] = {dict: "an object", list: "a list", int: "an integer in", Literal: "one of"}


def read_record(
    kind: type[Record],
    json: Any,
    where: object,
    error: type[PlscError] = CheckpointError,
    most: int = 2**26,
) -> Record:
    """Return JSON as a record; every value is checked.

    Args:
        kind: a dataclass, for which unknown names are refused; a TypedDict, for which they are not; or
            ``dict[str, Any]``. Their fields are of such kinds, `Any`, `Literal`, ``X | None``, ``list[X]``,
            ``tuple``, a NamedTuple (as a list), ``str``, ``bool``, ``int`` (of 0 or more), finite ``float``,
            or ``Annotated`` with the limits of a number, (lowest, highest), or the pattern of a string.
        json: the text as bytes; a file, opened as by `open_regular` in its folder; or a value from a text.
        where: the text's path or URL, for messages.
        error: raised for a text that is no such record, over `most` bytes, nested more than 50 levels, or
            that has control characters.
    """
    problem = "cannot be read"
    try:
        if isinstance(json, Path):
            json = read_regular(json, most, json.parent)
        if isinstance(json, bytes):
            if len(json) > most:
                raise ValueError(f"it has {len(json)} bytes; expected at most {most}")
            problem = "is not JSON"
            json = parse_json(json.decode())
        problem = "is damaged"
        record: Record = _typed(kind, json, "it", 0)
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{where} {problem}: {str(getattr(cause, 'strerror', None) or cause)[:400]}") from cause
    return record


_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


@functools.cache
def _parts_of(kind: Any) -> tuple[Any, tuple[Any, ...], Any, bool]:
    """Return a kind without Annotated and None, its arguments, its limits, and whether it may be None."""
    limits, is_optional = None, False
    while (origin := get_origin(kind)) in (Annotated, types.UnionType, Union):
        is_optional |= origin is not Annotated
        kind, limits = get_args(kind)[0], get_args(kind)[-1] if origin is Annotated else None
        if is_typeddict(limits):  # which mypy should take for any dictionary
            kind, limits = limits, None
    return origin or kind, get_args(kind), limits, is_optional


def _typed(kind: Any, value: Any, place: str, depth: int) -> Any:
    """Return a JSON value as a kind. Raises ValueError. place: names the value in messages."""
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} levels")
    kind, parts, limits, is_optional = _parts_of(kind)
    if value is None and is_optional:
        return None
    if isinstance(value, str) and limits is None and _CONTROL.search(value):
        raise ValueError(f"{place:.80} contains control characters")
    if kind is Any:
        kind, parts = type(value), (Any, Any)
        if kind not in (dict, list):
            return value
    is_exact = dataclasses.is_dataclass(kind)
    if isinstance(value, dict) and (kind is dict or is_exact or is_typeddict(kind)):
        hints = {} if kind is dict else _hints(kind)  # in their order: the format and its version first
        names = [*filter(value.__contains__, hints), *(name for name in value if name not in hints)]
        of_name, of_value = parts or (str, Any)
        found = {}
        for name in names:
            if name not in hints:
                _typed(of_name, name, f"a name in {place:.80}", depth)
            inner = f"{name!r:.80} of {place:.80}" if depth or name not in hints else name
            found[name] = _typed(hints.get(name, of_value), value[name], inner, depth + 1)
        odd = hints.keys() - value.keys() - getattr(kind, "__optional_keys__", set())
        odd |= value.keys() - hints.keys() if is_exact else set()
        if odd:
            state = "missing" if odd & hints.keys() else "unknown"
            raise ValueError(f"{min(odd)!r:.80} is {state} in {place}")
        return kind(**found) if is_exact else found
    if isinstance(value, list) and isinstance(kind, type) and issubclass(kind, (list, tuple)):
        parts = tuple(_hints(kind).values()) if hasattr(kind, "_fields") else parts
        if kind is list or parts[-1] is ...:
            parts = parts[:1] * len(value)
        if len(parts) == len(value):
            items = [_typed(*pair, place, depth + 1) for pair in zip(parts, value, strict=True)]
            return kind(*items) if hasattr(kind, "_fields") else kind(items)
    elif kind is Literal:
        limits = parts
        if (type(value), value) in [(type(part), part) for part in parts]:
            return value
    elif kind is int or kind is float:
        limits = limits or ((0, 2**63 - 1) if kind is int else (-sys.float_info.max, sys.float_info.max))
        if type(value) in (int, kind) and limits[0] <= value <= limits[1]:
            return kind(value)
    elif type(value) is kind and (limits is None or re.fullmatch(limits, value)):
        return value
    of = "" if limits is None else f" {limits}"
    raise ValueError(f"{place} is {repr(value)[:80]}, expected {_NAMES.get(kind, kind.__name__)}{of}")
