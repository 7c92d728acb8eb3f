"""Folders that appear, are replaced and go away whole.

Only complete folders have a published name. Everything else is hidden behind a prefix: a save that
is under way, the old version while a new one takes its name, what is being deleted.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from plsc.checkpoint.manifest import MANIFEST_NAME
from plsc.errors import CheckpointError
from plsc.storage.sync import sync

SAVING, REPLACED, DELETING = ".saving-", ".replaced-", ".deleting-"
HIDDEN = re.compile(r"(\.saving-|\.replaced-|\.deleting-)(.+)-[0-9a-f]{8}")


def hidden_name(name: str, prefix: str) -> str:
    """Return a fresh name that `HIDDEN` recognises, such as ``.saving-5-0f3a9b1c``."""
    return f"{prefix}{name}-{secrets.token_hex(4)}"


def hidden(folder: Path, prefix: str) -> Path:
    """Return a fresh hidden path beside ``folder``."""
    return folder.with_name(hidden_name(folder.name, prefix))


def publish(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name; an older checkpoint of that name goes away.

    At every moment one of the two is there whole: under the name, or where `clean_leftovers` finds it.

    Raises:
        OSError, CheckpointError: nothing has changed.
    """
    check_replaceable(folder)
    old = hidden(folder, REPLACED)
    is_replacing = folder.exists()
    if is_replacing:
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if is_replacing:
            old.rename(folder)
        raise
    sync(folder.parent)
    if is_replacing:
        delete(old)


def check_replaceable(folder: Path) -> None:
    """See that nothing but a checkpoint stands where a checkpoint is to be.

    Raises:
        CheckpointError: a file, a link, or a folder of something else.
    """
    is_there = folder.exists() or folder.is_symlink()
    if is_there and (folder.is_symlink() or not (folder / MANIFEST_NAME).is_file()):
        raise CheckpointError(
            f"{folder} is there already and is no checkpoint; move it away or save elsewhere"
        )


def withdraw(folder: Path) -> None:
    """Delete a published checkpoint, hiding it first so that no half of it keeps the name."""
    doomed = hidden(folder, DELETING)
    folder.rename(doomed)
    delete(doomed)


def delete(folder: Path) -> None:
    """Delete a hidden folder, its manifest first: from then on it is no checkpoint."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder)


def clean_leftovers(save_dir: str | os.PathLike[str]) -> list[Path]:
    """Tidy ``save_dir`` after a kill; return the checkpoints that were put back under their names.

    For one process (rank 0), before a run's first save, and not while another run saves there.
    Deletes unfinished saves; puts an old version back if it was hidden and the new one never came.

    Raises:
        CheckpointError: a folder cannot be renamed or deleted.
    """
    save_dir = Path(save_dir)
    restored = []
    try:
        leftovers = sorted(save_dir.iterdir()) if save_dir.is_dir() else []
        for path in leftovers:
            match = HIDDEN.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_dir():
                continue
            home = save_dir / match[2]
            is_whole = (path / MANIFEST_NAME).is_file()
            if match[1] == REPLACED and is_whole and not home.exists():
                path.rename(home)
                restored.append(home)
            else:
                delete(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot tidy {save_dir}: {error.strerror} ({error.filename})"
        ) from error
    return restored
