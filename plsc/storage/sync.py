"""Have what was written on the disk, so that it outlives a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until what was written to a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Do so for a folder, and all files and folders in it."""
    for inside, _, files in os.walk(folder):
        for name in (*files, "."):
            sync(Path(inside, name))
