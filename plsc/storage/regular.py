"""Open files of data and model folders, which may come from anyone, and files that users name.

A named pipe would block, a device may have no end, and a link could have any file of this machine read and
copied: only regular files are opened, and links in a folder must lead to targets inside it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from typing import Any, NoReturn

from plsc.errors import DataError

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
