"""Open files that may come from anyone, or that users name, and read JSON as typed records: `read_record`.

A named pipe would block, a device may have no end, and a link could have any file of this machine read and
copied: only regular files are opened, and links in a folder must lead to targets inside it.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import re
import stat
import sys
import types
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from plsc.errors import CheckpointError, DataError, PlscError

AnyPath = str | bytes | os.PathLike[str]


def open_regular(
    path: AnyPath,
    folder: AnyPath | None = None,
    size: int | None = None,
    buffering: int = -1,
    mode: str = "rb",
) -> Any:
    """Open a regular file to be read in binary; OSError, with the reason in `strerror`, if it is refused.

    folder: its folder; None if the user named the file. size: the bytes that it must have. mode: or ``r+b``,
    or ``ab``, which may create the file and refuses a link; both refuse a file with a second name.
    """

    def open_flags(name: str, flags: int) -> int:  # without O_NONBLOCK, opening a named pipe would block
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW * bool(flags & os.O_CREAT), 0o666)

    try:
        file = open(path, mode, buffering, opener=open_flags)  # noqa: SIM115
    except ValueError as error:  # a zero byte, or characters that no file name can have
        raise OSError(errno.EINVAL, str(error), repr(path)) from error
    status, reason = os.fstat(file.fileno()), ""
    if not stat.S_ISREG(status.st_mode):
        reason = "it is not a regular file"
    elif mode != "rb" and status.st_nlink > 1:
        reason = "it has another name (a hard link), maybe outside its folder; replace it by a copy"
    elif size not in (None, status.st_size):
        reason = f"it has {status.st_size} bytes; expected {size}"
    elif folder is not None:
        reason = _way_out(path, folder, "it", file.fileno())
    if reason:
        file.close()
        raise OSError(errno.EINVAL, reason, os.fsdecode(path))
    return file


def read_regular(path: AnyPath, limit: int, folder: AnyPath | None = None) -> bytes:
    """Return the bytes of a file as `open_regular` does; OSError if there are more than `limit`."""
    with open_regular(path, folder) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size} bytes; expected at most {limit}", os.fsdecode(path))
        data: bytes = file.read(size)
        return data


def without_mark(text: bytes, place: str) -> bytes:
    """Return the start of a text file without the byte order mark of UTF-8; DataError if it is UTF-16."""
    if re.match(rb"\xff\xfe|\xfe\xff|([\t-~]\0|\0[\t-~]){2}", text):
        raise DataError(f"{place} is UTF-16 text; save it as UTF-8")
    return text.removeprefix(b"\xef\xbb\xbf")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError also for NaN, Infinity and a repeated name."""
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)  # the last value of a name
    if len(found) < len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def check_inside(path: AnyPath, folder: AnyPath) -> None:
    """Raise DataError if links lead from a path in a folder out of it; the user has named any other path."""
    path, folder = (os.path.abspath(os.fsdecode(one)) for one in (path, folder))  # noqa: PTH100
    if path.startswith(os.path.join(folder, "")) and (reason := _way_out(path, folder, path)):  # noqa: PTH118
        raise DataError(reason)


def _way_out(path: AnyPath, folder: AnyPath, name: str, descriptor: int = -1) -> str:
    """Return a message if a path, open as `descriptor`, is outside a folder by links; '' if it is inside."""
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - faster than realpath
    except OSError:
        target = os.path.realpath(os.fsdecode(path))
    root = os.fsdecode(folder)
    inside = (os.path.join(one, "") for one in (root, os.path.realpath(root)))  # noqa: PTH118
    if any(f"{target}/".startswith(one) for one in inside):
        return ""
    return (
        f"{name} is a link that leaves {root}; replace links by what they lead to (cp -rL), or mount it there"
    )


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
