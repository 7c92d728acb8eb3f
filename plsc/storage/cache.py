"""The cache folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from plsc.errors import DataError
from plsc.storage.urls import base_name, shown

_NOBODY = 65534  # to whom NFS maps root


def cache_folder(*parts: str) -> Path:
    """Return a folder below ``$PLSC_CACHE_DIR``, else ``$XDG_CACHE_HOME/plsc``, else ``~/.cache/plsc``.

    Creates it with mode 700 if missing, because cached data may be private. Raises OSError if that fails, and
    DataError if it is another user's.
    """
    root = os.environ.get("PLSC_CACHE_DIR")
    if not root:
        root = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "plsc")
    folder = Path(root).expanduser().joinpath(*parts)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (Path(root).expanduser(), folder):  # whose owner could replace what is in it
        if place.stat().st_uid not in (os.geteuid(), 0, _NOBODY):
            raise DataError(f"the cache folder {place} is another user's; set PLSC_CACHE_DIR to your own")
    return folder


def folder_for(kind: str, url: str) -> Path:
    """Return the cache path for a URL, ending in the URL's last part; its parent folder is created.

    kind: of the content, such as ``checkpoints``.
    """
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return cache_folder(kind, digest) / base_name(shown(url))
