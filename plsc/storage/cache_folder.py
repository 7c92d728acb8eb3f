"""Where plsc keeps what it can make again: indexes and blocks of remote files."""

from __future__ import annotations

import os
from pathlib import Path

from plsc.errors import DataError


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
