"""Where a changed checkpoint may be written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from plsc.checkpoint.shard_file import Entry
from plsc.errors import CheckpointError, OptionError


def check_destination(source: Path, destination: Path) -> None:
    """Raise OptionError unless a new folder can be made there, outside of the source."""
    if destination.exists() or destination.is_symlink():
        raise OptionError(f"{destination} is there already; give a path that is not")
    if destination.name.startswith(".") or not destination.name:
        raise OptionError(f"a checkpoint cannot be named {destination.name!r}; give a plain name")
    if not destination.absolute().parent.is_dir():
        raise OptionError(f"there is no folder {destination.parent} for the new checkpoint")
    if destination.resolve().is_relative_to(source.resolve()):
        raise OptionError(f"{destination} is inside the checkpoint {source}; write beside it")


def check_space(destination: Path, files: Sequence[Sequence[Entry]]) -> None:
    """Raise CheckpointError if what is to be written does not fit."""
    needed = sum(entry.size for entries in files for entry in entries)
    free = shutil.disk_usage(destination.absolute().parent).free
    if needed > free:
        raise CheckpointError(
            f"{destination} needs {needed} bytes, {free} are free there; make room or write elsewhere"
        )
