"""Tell whether a file is still the one that it was."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.errors import DataError
from plsc.storage.retry import with_retries
from plsc.storage.urls import is_url, open_filesystem, shown

# What fsspec's clients call the thing that changes with the content, best first.
_STAMP_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified")
_TIME_KEYS = ("modificationTime", "modification_time", "modified", "created")


@dataclass(frozen=True)
class FileStamp:
    """The size of a file in bytes, and a text that changes when its content does.

    Locally that is the time of the last change in nanoseconds; remotely the store's ETag, or its time.
    """

    size: int
    stamp: str


def stamp_of(location: str | Path) -> FileStamp:
    """Return the stamp of a local file or fsspec URL; DataError if it is missing or no plain file."""
    return _remote_stamp(str(location)) if is_url(location) else local_stamp(Path(location))


def local_stamp(path: Path, descriptor: int | None = None) -> FileStamp:
    """Return the stamp of a local file, or of the open file `descriptor`."""
    try:
        status = path.stat() if descriptor is None else os.fstat(descriptor)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a plain file")
    return FileStamp(status.st_size, str(status.st_mtime_ns))


def _remote_stamp(url: str) -> FileStamp:
    filesystem, inside = open_filesystem(url)
    info: dict[str, Any] = with_retries(
        lambda: filesystem.info(inside), f"{shown(url)} cannot be looked up"
    )
    size = info.get("size")
    if info.get("type") not in (None, "file") or not isinstance(size, int) or size < 0:
        raise DataError(f"{shown(url)} is not a plain file of known size")
    found = next((str(info[key]) for key in (*_STAMP_KEYS, *_TIME_KEYS) if info.get(key)), "")
    return FileStamp(size, found.strip('"'))
