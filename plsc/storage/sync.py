"""Have what was written on the disk, so that it outlives a loss of power."""

from __future__ import annotations

import os


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until what was written to a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
