"""Where plsc keeps what it can make again: indexes and blocks of remote files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from plsc.errors import DataError, shown
from plsc.storage.names import base_name


def cache_folder(*parts: str) -> Path:
    """Return a folder below ``$PLSC_CACHE_DIR``, else ``$XDG_CACHE_HOME/plsc``, else ``~/.cache/plsc``.

    It is made if need be, for its owner alone: cached blocks are as private as the data they are of.
    Raises DataError if it cannot be made.
    """
    root = os.environ.get("PLSC_CACHE_DIR")
    if not root:
        root = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "plsc")
    folder = Path(root).expanduser().joinpath(*parts)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be made ({error.strerror}); "
            "set PLSC_CACHE_DIR to a folder that can be written"
        ) from error
    return folder


def folder_for(kind: str, url: str) -> Path:
    """Return the path in the cache folder of what belongs to a URL; the folder around it is made.

    kind: tells things of one URL apart, such as ``checkpoints``. The path ends in the URL's own name.
    """
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return cache_folder(kind, digest) / base_name(shown(url))
