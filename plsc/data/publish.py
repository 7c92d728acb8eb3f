"""Write a file or folder, local or remote, that appears under its name whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from plsc.data.atomic import replacing
from plsc.errors import DataError, PlscError
from plsc.storage.names import base_name, parent_of
from plsc.storage.retry import reason_of, with_retries
from plsc.storage.sync import sync, sync_tree
from plsc.storage.urls import is_url, open_filesystem, shown

_BUFFER = 4 * 2**20


@contextlib.contextmanager
def publishing(location: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary file to write, which appears at a path or URL when the block succeeds.

    The folders above it are made. When the block fails there is nothing under that name, and what was written
    is removed.

    Raises DataError: something is there already, a full disk, no permission.
    """
    location = str(location)
    refuse_existing(location)
    if is_url(location):
        with _publishing_remotely(location) as file:
            yield file
        return
    make_parent(Path(location))
    remove_leftovers(Path(location))
    with replacing(location) as temporary, temporary.open("wb", buffering=_BUFFER) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@contextlib.contextmanager
def publishing_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside a local path, which takes that name when the block succeeds.

    Raises DataError as `publishing` does.
    """
    path = Path(path)
    refuse_existing(str(path))
    make_parent(path)
    remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    lock = -1
    try:
        temporary.mkdir()
        lock = os.open(temporary, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield temporary
        sync_tree(temporary)
        temporary.rename(path)
        sync(path.parent)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def make_parent(path: Path) -> None:
    """Make the folder that a local file or folder is in, and those above it; DataError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def remove_leftovers(path: Path) -> None:
    """Remove what runs that were killed left of this local file or folder.

    A run that is alive holds a lock on its temporary file or folder, and loses nothing.
    """
    leftover = re.compile(re.escape(f".{path.name}.") + r"[0-9]+-[0-9a-f]{8}\.tmp")
    with contextlib.suppress(OSError):
        for entry in path.parent.iterdir():
            if leftover.fullmatch(entry.name):
                _remove_unlocked(entry)


def _remove_unlocked(entry: Path) -> None:
    with contextlib.suppress(OSError):  # which it is when another one holds the lock
        descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        finally:
            os.close(descriptor)


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


@contextlib.contextmanager
def _publishing_remotely(url: str) -> Iterator[BinaryIO]:
    # Written under another name, because some clients publish what there is when a writer fails.
    filesystem, inside = open_filesystem(url)
    name = f"{parent_of(inside)}/.{base_name(inside)}.{secrets.token_hex(8)}.tmp"
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
        _remove(filesystem, name)


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


def _remove(filesystem: Any, name: str) -> None:
    with contextlib.suppress(Exception):
        if filesystem.exists(name):
            filesystem.rm(name)
