"""A folder to work in: claimed by one run, cleaned of what a killed one left, published by a rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path

from plsc.errors import DataError
from plsc.storage.sync import sync, sync_tree

SUFFIX = ".plsc-partial"


class Workspace:
    """``.<name>.plsc-partial`` in `parent`, locked while this process lives.

    What an earlier run that was killed left in it is removed; `cleaned` tells whether there was any. Leaving
    the context removes the folder unless it was published. Raises DataError if another run has it.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self.path = parent / f".{name}{SUFFIX}"
        self.cleaned = False
        self._name = name
        self._is_published = False
        with _telling(f"cannot work in {parent}"):
            parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._claim()
            for entry in list(self.path.iterdir()):
                self.cleaned = True
                _remove(entry)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_published:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.path)
        os.close(self._lock)

    def publish(self, target: Path, is_synced: bool = True) -> None:
        """Give the folder its final name, once all of it is on the disk. Raises DataError if it is taken.

        is_synced: wait for the disk; without, a loss of power may leave the name and not all that is in it.
        """
        with _telling(f"cannot publish {target}"):
            if is_synced:
                sync_tree(self.path)
            if os.path.lexists(target):
                raise DataError(f"{target} came into being meanwhile; it is left alone")
            self.path.rename(target)
            self._is_published = True
            if is_synced:
                sync(target.parent)

    def _claim(self) -> int:
        while True:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir()
            try:
                lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue  # the run that had it has just ended
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise DataError(
                    f"another run is at work on {self._name} (it has {self.path}); wait for it or stop it"
                ) from error
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.lstat(self.path)):
                    return lock
            os.close(lock)  # it was published or removed between the two calls


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


@contextlib.contextmanager
def _telling(what: str):  # type: ignore[no-untyped-def]
    try:
        yield
    except OSError as error:
        raise DataError(f"{what}: {error.strerror or error}") from error
