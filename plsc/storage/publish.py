"""Files and folders that appear under their name whole or not at all, on a disk or in a store.

What is not whole yet has a hidden name in the same folder; it is synced, then renamed. Where a store cannot
rename (S3), the file that is written last, the manifest, is the publication. A lock keeps a second process
out, and ends with its process: what a killed one left is recognised, and removed by the next.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from plsc.errors import DataError, PlscError
from plsc.storage.retry import reason_of, with_retries
from plsc.storage.urls import base_name, is_object_store, is_url, open_filesystem, parent_of, shown

if TYPE_CHECKING:
    from plsc.storage.store import Store

# Of a folder in a store: written last, it says that the folder is whole.
MANIFEST_NAME = "manifest.json"
SAVING, REPLACED, DELETING = ".saving-", ".replaced-", ".deleting-"
HIDDEN = re.compile(r"(\.saving-|\.replaced-|\.deleting-)([^.].*)-[0-9a-f]{8}")  # not ".."
WORKSPACE_SUFFIX = ".plsc-partial"
_LOCK_NAME = ".lock"
_PATIENCE = 3.0  # seconds; a process that was just killed may be on its way out
_BUFFER = 4 * 2**20


def hidden_name(name: str, prefix: str = SAVING) -> str:
    """Return a fresh name that `HIDDEN` recognises, such as ``.saving-5-0f3a9b1c``."""
    return f"{prefix}{name}-{secrets.token_hex(4)}"


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


# Locks.


def _try_lock(lock: Callable[[int, int], None], descriptor: int) -> bool:
    """Return whether the lock was free; a file system without locks has none that is taken."""
    try:
        lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


class FolderLock:
    """Keeps a second run out of a folder of checkpoints while this process lives.

    It is a record lock, which children that were forked do not inherit. note: written to the lock file, with
    this host and process; `lock_note` returns it, later too.
    """

    def __init__(self, folder: Path, note: dict[str, Any] | None = None) -> None:
        """Raise DataError, naming the other process, if there is one."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with _telling(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / _LOCK_NAME, flags, 0o666)
        give_up = time.monotonic() + _PATIENCE
        while not _try_lock(fcntl.lockf, self._descriptor):
            if time.monotonic() > give_up:
                self.release()
                there = lock_note(folder)
                holder = f" (process {there['pid']} on {there['host']})" if there else ""
                raise DataError(
                    f"another run{holder} is saving to {folder}; wait for it, stop it, or save elsewhere "
                    "(set_model_save_dir)"
                )
            time.sleep(0.1)
        content = {"host": socket.gethostname(), "pid": os.getpid(), **(note or {})}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(content).encode(), 0)

    def release(self) -> None:
        """Let others in."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def lock_note(folder: Path) -> dict[str, Any]:
    """Return what the last holder of the folder's lock noted: host, pid and more; nothing if unknown."""
    try:
        if not (folder / _LOCK_NAME).is_file():
            return {}
        with (folder / _LOCK_NAME).open("rb") as file:
            note = json.loads(file.read(2**24))
        launches = [str(one) for one in note.get("launches", [])]
        return {
            "pid": int(note["pid"]),
            "host": ascii(str(note["host"]))[1:-1][:100],
            "launches": launches,
        }
    except Exception:  # it may hold anything
        return {}


# Files and folders that a command writes.


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, is_synced: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to the local file `path` that takes its place when the block succeeds.

    When the block fails, `path` is unchanged and the temporary file is removed. Raises DataError if the file
    cannot be written (no such folder, no permission, a full disk).
    """
    path = Path(path)
    temporary = path.with_name(hidden_name(path.name))
    try:
        with _telling(path):
            yield temporary
            if is_synced:
                sync(temporary)
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def publishing(location: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary file to write, which appears at a path or URL when the block succeeds.

    Local folders above it are made. When the block fails there is nothing under that name, and what was
    written is removed. Raises DataError: something is there already, a full disk, no permission.
    """
    location = str(location)
    refuse_existing(location)
    if is_url(location):
        with _publishing_remotely(location) as file:
            yield file
        return
    path = Path(location)
    with _telling(path), Workspace(path.parent, path.name) as work:
        with (work.path / path.name).open("wb", buffering=_BUFFER) as file:
            yield file
        work.publish(path, path.name)


@contextlib.contextmanager
def publishing_folder(path: str | Path) -> Iterator[Path]:
    """Yield a hidden folder next to a local path, which takes that name when the block succeeds.

    Raises DataError as `publishing` does.
    """
    path = Path(path)
    refuse_existing(str(path))
    with _telling(path), Workspace(path.parent, path.name) as work:
        yield work.path
        work.publish(path)


class Workspace:
    """``.<name>.plsc-partial`` in `parent`, locked while this process lives.

    What an earlier run that was killed left in it is removed; `cleaned`: whether there was any. Leaving
    the context removes the folder unless it was published. Raises DataError if another run has it.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self.path = parent / f".{name}{WORKSPACE_SUFFIX}"
        self.cleaned = False
        self._name = name
        self._is_published = False
        with _telling(parent / name):
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

    def publish(self, target: Path, inner: str = "", *, is_synced: bool = True) -> None:
        """Give the folder, or the file `inner` in it, its final name. Raises DataError if it is taken.

        is_synced: wait for the disk; without, a loss of power may leave the name and not all that is in it.
        """
        with _telling(target):
            if is_synced:
                sync_tree(self.path)
            if os.path.lexists(target):
                raise DataError(f"{target} was created meanwhile; it is unchanged")
            (self.path / inner).rename(target)
            self._is_published = not inner
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
            if not _try_lock(fcntl.flock, lock):
                os.close(lock)
                raise DataError(
                    f"another run is at work on {self._name} (it has {self.path}); wait for it or stop it"
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.lstat(self.path)):
                    return lock
            os.close(lock)  # it was published or removed between the two calls


def refuse_existing(location: str) -> None:
    """Raise DataError if there is a file or folder of this name, local or remote."""
    if is_url(location):
        filesystem, inside = open_filesystem(location)
        there = with_retries(
            lambda: bool(filesystem.exists(inside)), f"{shown(location)} cannot be looked up"
        )
    else:
        there = os.path.lexists(location)
    if there:
        raise DataError(f"{shown(location)} exists already; remove it, or choose another name")


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}; nothing was published"
        raise DataError(f"cannot write {path}: {reason}") from error


@contextlib.contextmanager
def _publishing_remotely(url: str) -> Iterator[BinaryIO]:
    # Written under another name, because some clients publish what there is when a writer fails.
    filesystem, inside = open_filesystem(url)
    name = f"{parent_of(inside)}/{hidden_name(base_name(inside))}"
    try:
        with filesystem.open(name, "wb", block_size=64 * 2**20) as file:
            sink: Any = _Sink(file)
            yield sink
        size = filesystem.info(name)["size"]
        filesystem.mv(name, inside)
        # Some clients do nothing, and say nothing, when they cannot.
        if filesystem.info(inside)["size"] != size:
            raise OSError("it was not renamed")
    except PlscError:
        raise
    except Exception as error:  # each client has exceptions of its own
        raise DataError(f"cannot write {shown(url)} ({reason_of(error)})") from error
    finally:
        with contextlib.suppress(Exception):
            if filesystem.exists(name):
                filesystem.rm(name)


class _Sink(io.RawIOBase):
    """A client's file as Python's own are: some have no tell(), and a parser must not close it early."""

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


# Folders with a manifest, in a `Store`: checkpoints on a disk or remote, and partitions that are sent.


def publish(store: Store, temporary: str, name: str) -> None:
    """Give a complete folder its name; an older one of that name is deleted.

    At every moment one of the two is there whole: under the name, or where `clean` finds it. Raises
    DataError; then nothing has changed.
    """
    old = hidden_name(name, REPLACED)
    is_replacing = store.exists(name)
    if is_replacing:
        store.rename(name, old)
    try:
        store.rename(temporary, name)
    except DataError:
        if is_replacing:
            store.rename(old, name)
        raise
    if is_replacing:
        delete(store, old)


def delete(store: Store, name: str) -> None:
    """Delete a folder, its manifest first: from then on it is not whole."""
    store.delete(f"{name}/{MANIFEST_NAME}")
    store.delete(name)


def withdraw(store: Store, name: str) -> None:
    """Delete a published folder, hidden first, so that no half of it keeps the name."""
    doomed = name
    if store.can_rename:
        doomed = hidden_name(name, DELETING)
        store.rename(name, doomed)
    delete(store, doomed)


def clean(store: Store) -> list[str]:
    """Remove what a killed process left; return the names of the folders that were put back.

    For one process, while no other writes there. Unfinished files and folders are deleted; an old version
    that was hidden, and whose successor was never published, gets its name back.
    """
    restored = []
    names, folders = store.names(), store.names(only_folders=True)
    for name in names:
        match = HIDDEN.fullmatch(name)
        if match is None or store.is_link(name):
            continue
        if match[1] == SAVING:
            store.delete(name)
        elif match[1] == REPLACED and match[2] not in names and MANIFEST_NAME in store.names(name):
            store.rename(name, match[2])
            restored.append(match[2])
        elif name in folders:
            delete(store, name)
    return restored


@contextlib.contextmanager
def staged(url: str, open_store: Callable[[str], Store]) -> Iterator[str]:
    """Yield the URL to write a folder's files to; when the block succeeds, the folder is at `url`.

    On an object store that is the place itself, and the manifest, written last, publishes. Raises DataError
    if the store fails; what was written is removed when the block does not succeed.
    """
    url = url.rstrip("/")
    parent, _, name = url.rpartition("/")
    if is_object_store(url):
        store, temporary = open_store(url), ""
    else:
        store, temporary = open_store(parent), f".{name}{WORKSPACE_SUFFIX}"
    try:
        if temporary:
            store.delete(temporary)  # a run that was killed left it
        store.make_folder(temporary)
        yield store.child(temporary) if temporary else url
        if temporary:
            store.rename(temporary, name)
    except BaseException:
        with contextlib.suppress(Exception):
            store.delete(temporary)
        raise
