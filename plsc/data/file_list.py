"""The original's file_list.txt: the names of the data files of a set, one a line."""

from __future__ import annotations

import posixpath
from pathlib import Path

from plsc.errors import DataError
from plsc.storage.retry import with_retries
from plsc.storage.urls import exists, is_url, open_filesystem, shown

_MAX_BYTES = 64 * 2**20


def read_file_list(
    data_dir: str | Path, file_list: str = "file_list.txt", *, must_exist: bool = True
) -> list[str]:
    """Return the paths or URLs of the files that `file_list` names, in its order.

    data_dir: local folder or fsspec URL. `file_list` lies in it, or is a path or URL of its own. A line is
    one name, blanks inside it included: relative to data_dir, absolute, or a URL. Blanks around it, blank
    lines, CRLF and a byte order mark are accepted. Raises DataError for a list that is missing, empty, too
    long, names a file twice, or, with `must_exist`, a file that is not there.
    """
    listing = _join(str(data_dir), file_list)
    if not is_url(file_list) and not is_url(listing) and not Path(listing).exists():
        listing = file_list if Path(file_list).exists() else listing
    text = _read(listing)
    found: list[str] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        name = line.strip()
        if not name:
            continue
        path = _join(str(data_dir), name)
        if path in seen:
            raise DataError(
                f"{shown(listing)}:{number} names {name} again (first in line {seen[path]}); take one out"
            )
        if must_exist and not exists(path):
            raise DataError(
                f"{shown(listing)}:{number} names {name}, which is not in {shown(str(data_dir))}"
            )
        seen[path] = number
        found.append(path)
    if not found:
        raise DataError(f"{shown(listing)} names no files; expected one name a line")
    return found


def _join(folder: str, name: str) -> str:
    if is_url(name) or name.startswith("/"):
        return name
    return posixpath.join(folder, name)


def _read(path: str) -> str:
    try:
        if is_url(path):
            data = _read_remote(path)
        else:
            with Path(path).open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"{shown(path)} cannot be read: {error.strerror or error}; expected the list of the data files, "
            "one name a line"
        ) from error
    if len(data) > _MAX_BYTES:
        raise DataError(f"{shown(path)} is over {_MAX_BYTES} bytes; is it a list of files?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{shown(path)} is not UTF-8 text (byte {error.start}); expected one name a line"
        ) from error


def _read_remote(url: str) -> bytes:
    filesystem, inside = open_filesystem(url)

    def read() -> bytes:
        with filesystem.open(inside, "rb") as file:
            return bytes(file.read(_MAX_BYTES + 1))

    return with_retries(read, f"{shown(url)}, the list of the data files, cannot be read")
