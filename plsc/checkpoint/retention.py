"""Which checkpoints there are, and which may go."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from plsc.checkpoint.folders import withdraw
from plsc.checkpoint.manifest import Manifest, read_manifest
from plsc.errors import CheckpointError, OptionError


def list_checkpoints(save_dir: str | os.PathLike[str]) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints of ``save_dir`` with their manifests, fewest steps first.

    Hidden folders, and folders without a sound manifest, are not checkpoints. No folder, none.

    Raises:
        CheckpointError: ``save_dir`` cannot be read.
    """
    save_dir = Path(save_dir)
    try:
        candidates = sorted(save_dir.iterdir()) if save_dir.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"cannot list checkpoints in {save_dir}: {error.strerror}") from error
    found = []
    for path in candidates:
        if path.name.startswith("."):
            continue
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError:
            continue
    return sorted(found, key=lambda entry: (entry[1].step, entry[1].epoch, entry[0].name))


def prune(
    save_dir: str | os.PathLike[str], keep: int, protect: Iterable[str | os.PathLike[str]] = ()
) -> list[Path]:
    """Delete all but the ``keep`` latest checkpoints (-1: delete none); return those deleted, oldest first.

    For one process (rank 0). ``protect``: paths that stay although they are old; a linked folder stays
    too. A kill at any moment leaves no half of a checkpoint under a published name.

    Raises:
        OptionError: keep is neither -1 nor at least 1.
        CheckpointError: a folder cannot be deleted; the others are as they were.
    """
    if keep == -1:
        return []
    if keep < 1:
        raise OptionError(f"keep is {keep}; expected at least 1, or -1 to keep all checkpoints")
    protected = {Path(path).resolve() for path in protect}
    deleted = []
    for path, _ in list_checkpoints(save_dir)[:-keep]:
        if path.is_symlink() or path.resolve() in protected:
            continue
        try:
            withdraw(path)
        except OSError as error:
            raise CheckpointError(
                f"cannot delete old checkpoint {path}: {error.strerror}; check its permissions"
            ) from error
        deleted.append(path)
    return deleted
