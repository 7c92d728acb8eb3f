"""Names of files, local or remote."""

from __future__ import annotations

import posixpath
from pathlib import Path

from plsc.storage.retry import with_retries
from plsc.storage.urls import is_url, open_filesystem, shown


def base_name(location: str) -> str:
    """Return the last part of a path or URL."""
    return location.rstrip("/").rsplit("/", 1)[-1]


def parent_of(location: str) -> str:
    """Return the folder of a path or URL."""
    return (
        location.rstrip("/").rsplit("/", 1)[0] if is_url(location) else str(Path(location).parent)
    )


def join(folder: str, name: str) -> str:
    """Return a path or URL below a folder."""
    return posixpath.join(folder, name)


def exists(location: str) -> bool:
    """Whether there is a file at a path or URL; DataError if the store does not answer."""
    if not is_url(location):
        return Path(location).is_file()
    filesystem, inside = open_filesystem(location)

    def look() -> bool:  # isfile() of the clients says no when the store does not answer
        try:
            return bool(filesystem.info(inside)["type"] == "file")
        except (FileNotFoundError, NotADirectoryError):
            return False

    return with_retries(look, f"{shown(location)} cannot be looked up")
