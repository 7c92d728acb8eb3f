"""Locks, hidden names, and files and folders that appear at once: what the commands write.

Data are written under a hidden name in the same folder, synced, then renamed. A lock keeps a second process
out. It is released when its process ends; the next process removes unfinished files.

Checkpoints and other folders with a manifest, local or remote, are published by `publish`, `withdraw` and
`clean` in plsc/storage/store.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypedDict
from weakref import WeakSet

from plsc.errors import DataError, PlscError
from plsc.storage.regular import Text, open_regular, read_record
from plsc.storage.urls import (
    base_name,
    is_url,
    join,
    local_folder,
    open_filesystem,
    parent_of,
    reason_of,
    shown,
    with_retries,
)

# The last file written to a folder in a store: a folder that has it is complete.
MANIFEST_NAME = "manifest.json"
SAVING, REPLACED, DELETING = ".saving-", ".replaced-", ".deleting-"
HIDDEN = re.compile(r"(\.saving-|\.replaced-|\.deleting-)([^.].*)-[0-9a-f]{8}")  # [^.] excludes ".."
WORKSPACE_SUFFIX = ".plsc-partial"
_LOCK_NAME = ".lock"
_PATIENCE = 3.0  # seconds; a process that was just killed may not have exited yet
_BUFFER = 4 * 2**20


def hidden_name(name: str, prefix: str = SAVING) -> str:
    """Return a new name that matches `HIDDEN`, such as ``.saving-5-0f3a9b1c``."""
    return f"{prefix}{name}-{secrets.token_hex(4)}"


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file's data, or a folder's directory entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Locks.


def _try_lock(descriptor: int) -> bool:
    """Return whether the lock was acquired; also True on a file system that does not support locks.

    A record lock would go as soon as this process closes another descriptor of the file, such as to read it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


class FolderLock:
    """Prevent a second run from using a folder while this process lives.

    A context manager. Forked children, which may live longer, close their descriptor of it.

    Args:
        folder: the folder to lock; created if missing.
        note: JSON fields stored in the lock file with the host and the process id. `lock_note` reads them,
            also after the lock is released.
    """

    def __init__(self, folder: Path, note: dict[str, Any] | None = None) -> None:
        """Acquire the lock. Raise DataError, naming the other process, if it is taken."""
        with _as_data_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with _as_data_error(folder / _LOCK_NAME):  # such as a pipe
            self._file = open_regular(folder / _LOCK_NAME, buffering=0, mode="ab")
        _HELD.add(self)
        give_up = time.monotonic() + _PATIENCE
        while not _try_lock(self._file.fileno()):
            if time.monotonic() > give_up:
                self.release()
                there = lock_note(folder)
                holder = f" (process {there['pid']} on {there['host']})" if there else ""
                raise DataError(
                    f"another run{holder} is using {folder}; wait for it, stop it, or choose another folder"
                )
            time.sleep(0.1)
        content = {"host": socket.gethostname(), "pid": os.getpid(), **(note or {})}
        with _as_data_error(folder / _LOCK_NAME):
            self._file.truncate(0)
            self._file.write(json.dumps(content).encode())

    def release(self) -> None:
        """Release the lock."""
        self._file.close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_HELD: WeakSet[FolderLock] = WeakSet()


def _release_in_child() -> None:
    for lock in _HELD:
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


class _Holder(TypedDict):
    pid: int
    host: Text


class _Note(_Holder, total=False):
    launches: list[str]


def lock_note(folder: Path) -> dict[str, Any]:
    """Return what the last lock holder stored: host, pid and launches; empty if unknown."""
    try:
        note = read_record(_Note, folder / _LOCK_NAME, _LOCK_NAME, DataError, 2**24)
    except DataError:  # the file may hold anything
        return {}
    return {"launches": [], **note, "host": ascii(note["host"])[1:-1][:100]}


# Files and folders that commands write.


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, is_synced: bool = True) -> Iterator[Path]:
    """Yield a temporary path that replaces the local file `path` when the block succeeds.

    When the block fails, `path` is unchanged and the temporary file is removed. Raises DataError if the file
    cannot be written (missing folder, no permission, full disk).
    """
    path = Path(path)
    temporary = path.with_name(hidden_name(path.name))
    try:
        with _as_data_error(path):
            yield temporary
            if is_synced:
                sync(temporary)
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def publishing(location: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary file that appears at a path or URL when the block succeeds.

    Missing local parent folders are created. When the block fails, nothing is published and what was
    written is removed. Raises DataError if the name exists or cannot be written.
    """
    location = str(location)
    refuse_existing(location)
    if is_url(location):
        with _publishing_remotely(location) as file:
            yield file
        return
    path = Path(location)
    with _as_data_error(path), Workspace(path.parent, path.name) as work:
        with (work.path / path.name).open("xb", buffering=_BUFFER) as file:
            yield file
        work.publish(path, path.name)


@contextlib.contextmanager
def publishing_folder(path: str | Path) -> Iterator[Path]:
    """Yield a hidden folder next to the local `path`; it is renamed to `path` when the block succeeds.

    Raises DataError as `publishing` does; OptionError for a URL.
    """
    path = local_folder(path, "the new folder")
    refuse_existing(str(path))
    with _as_data_error(path), Workspace(path.parent, path.name) as work:
        yield work.path
        work.publish(path)


class Workspace:
    """The folder ``.<name>.plsc-partial`` in `parent`, locked while this process lives.

    Files left by an earlier, killed run are removed. Leaving the context removes the folder unless it was
    published. Raises DataError if another run holds the lock.

    mode: permissions of the folder, less those that the umask removes.
    """

    def __init__(self, parent: Path, name: str, mode: int = 0o777) -> None:
        self.path = parent / f".{name}{WORKSPACE_SUFFIX}"
        self._name = name
        self._is_published = False
        with _as_data_error(parent / name):
            parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._claim(mode)
            for entry in list(self.path.iterdir()):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_published:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.path)
        os.close(self._lock)

    def publish(self, target: Path, inner: str = "") -> None:
        """Rename the folder, or the file `inner` in it, to `target`. Raises DataError if `target` exists."""
        with _as_data_error(target):
            for inside, _, files in os.walk(self.path):
                for name in (*files, "."):
                    sync(Path(inside, name))
            refuse_existing(str(target))  # created by another process in the meantime
            (self.path / inner).rename(target)
            self._is_published = not inner
            sync(target.parent)

    def _claim(self, mode: int) -> int:
        while True:
            is_new = False
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode)
                is_new = True
            try:
                lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue  # the run that held it has just ended
            if not _try_lock(lock):
                os.close(lock)
                raise DataError(
                    f"another run is working on {self._name} (it holds {self.path}); wait for it or stop it"
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(status := os.fstat(lock), os.lstat(self.path)):
                    if is_new or status.st_uid == os.geteuid():
                        return lock
                    os.close(lock)
                    raise DataError(f"{self.path} belongs to another user; remove it, or use another folder")
            os.close(lock)  # the folder was published or removed between open and lock


def refuse_existing(location: str) -> None:
    """Raise DataError if a file or folder of this name exists, local or remote."""
    if is_url(location):
        filesystem, inside = open_filesystem(location)
        there = with_retries(
            lambda: bool(filesystem.exists(inside)), f"{shown(location)} cannot be looked up"
        )
    else:
        there = os.path.lexists(location)
    if there:
        raise DataError(f"{shown(location)} already exists; remove it, or choose another name")


@contextlib.contextmanager
def _as_data_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}; nothing was published"
        raise DataError(f"cannot write {path}: {reason}") from error


@contextlib.contextmanager
def _publishing_remotely(url: str) -> Iterator[BinaryIO]:
    # Write under a hidden name: some clients publish a partial file when a writer fails.
    filesystem, inside = open_filesystem(url)
    name = join(parent_of(inside), hidden_name(base_name(inside)))
    try:
        with filesystem.open(name, "wb", block_size=64 * 2**20) as file:
            sink: Any = _Sink(file)
            yield sink
        size = filesystem.info(name)["size"]
        refuse_existing(url)  # again: in an object store, the move would replace it
        filesystem.mv(name, inside)
        # Some clients do nothing and report nothing when they cannot rename.
        if filesystem.info(inside)["size"] != size:
            raise OSError("the file was not renamed")
    except PlscError:
        raise
    except Exception as error:  # each client has its own exceptions
        raise DataError(f"cannot write {shown(url)} ({reason_of(error)})") from error
    finally:
        with contextlib.suppress(Exception):
            if filesystem.exists(name):
                filesystem.rm(name)


class _Sink(io.RawIOBase):
    """A client's file with tell(), which some lack; closing it does not close the client's file."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        data = bytes(data)
        self._file.write(data)
        self._position += len(data)
        return len(data)
