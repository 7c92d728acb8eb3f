"""A folder on a local disk or behind an fsspec URL (HDFS, S3 and others).

Calls to a remote store are retried for a limited time and abandoned when the store stops answering. Where a
client may fail silently, the result is checked. Errors are DataError, without secrets.

`publish`, `withdraw` and `clean` are for folders with a manifest, such as checkpoints. An object store such
as S3 cannot rename: there the manifest, which is written last, publishes the folder.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from plsc.errors import DataError, PlscError
from plsc.storage.disk import (
    DELETING,
    HIDDEN,
    MANIFEST_NAME,
    REPLACED,
    SAVING,
    hidden_name,
    sync,
)
from plsc.storage.urls import (
    Progress,
    info_of,
    is_entry,
    is_object_store,
    is_url,
    open_filesystem,
    shown,
    with_retries,
    with_timeout,
)

Answer = TypeVar("Answer")
OnBytes = Callable[[int], object]
_PATTERN = re.compile(r"[*?[]")
_BY_TIME = 10**6  # attempts; only the time limits them


class Store:
    """The folder at `url`, a local path or fsspec URL. Names are relative to it: ``5/manifest.json``.

    Args:
        total_seconds: how long a remote call is retried. Local calls are not retried.
        silence: seconds without a byte after which one try is abandoned.
    """

    def __init__(self, url: str | Path, *, total_seconds: float = 60.0, silence: float = 30.0) -> None:
        self.url = str(url).rstrip("/")
        self.shown = shown(self.url)
        self.is_remote = is_url(self.url)
        self.can_rename = not is_object_store(self.url)
        self._total_seconds = total_seconds
        self._silence = silence
        self._filesystem: Any = LocalFileSystem()
        self._path = str(Path(self.url).absolute())
        if self.is_remote:
            filesystem, path = self._call(lambda: open_filesystem(self.url), "cannot be opened")
            self._filesystem, self._path = filesystem, path.rstrip("/")
        self._is_on_disk = isinstance(self._filesystem, LocalFileSystem)

    def child(self, name: str) -> str:
        """Return the path or URL of an entry of the folder."""
        return f"{self.url}/{name}"

    def names(self, folder: str = "", *, only_folders: bool = False) -> list[str]:
        """Return the sorted names in a folder; empty if it is missing or a file."""

        def call() -> list[str]:
            self._filesystem.invalidate_cache()
            try:
                found = self._filesystem.ls(self._at(folder), detail=only_folders)
            except (FileNotFoundError, NotADirectoryError):
                return []
            if only_folders:  # includes links, which may lead to folders
                found = [one["name"] for one in found if one["type"] == "directory" or one.get("islink")]
            own = self._at(folder).strip("/")
            paths = {str(one).rstrip("/") for one in found}
            if "http" in self._filesystem.protocol:
                paths = {path for path in paths if is_entry(path, own)}
            return sorted(one.rsplit("/", 1)[-1] for one in paths if one.strip("/") != own)

        return self._call(call, f"{folder or 'the folder'} cannot be listed")

    def is_link(self, name: str) -> bool:
        """Return whether this is a symbolic link; always False in a remote store."""
        return self._is_on_disk and Path(self._at(name)).is_symlink()

    def exists(self, name: str = "") -> bool:
        """Return whether a file or folder of this name exists."""

        def call() -> bool:
            self._filesystem.invalidate_cache()
            return bool(self._filesystem.exists(self._at(name)))

        return self._call(call, f"{name or 'the folder'} cannot be looked up")

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if there is no such file."""

        def call() -> int | None:
            self._filesystem.invalidate_cache()
            try:
                info = info_of(self._filesystem, self._at(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return int(info["size"]) if info["type"] == "file" else None

        return self._call(call, f"{name} cannot be looked up")

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the bytes of a small file, None if it is missing; DataError if larger than `limit`."""
        size = self.size(name)
        if size is None:
            return None
        if size > limit:
            raise DataError(f"{shown(self.child(name))} has {size} bytes; expected at most {limit}")

        def call() -> bytes:
            with self._filesystem.open(self._at(name), "rb") as file:
                return bytes(file.read(limit + 1))

        return self._call(call, f"{name} cannot be read")

    def write(self, name: str, data: bytes) -> None:
        """Write a small file; where the store can rename, readers see either the old or the new content."""
        folder, base = os.path.split(name)
        temporary = os.path.join(folder, hidden_name(base)) if self.can_rename else name  # noqa: PTH118

        def call() -> None:
            with self._filesystem.open(self._at(temporary), "wb") as file:
                file.write(data)
            self._sync(temporary)
            if temporary != name:
                if not self._is_on_disk:  # a local rename replaces the file
                    with contextlib.suppress(FileNotFoundError):
                        self._filesystem.rm_file(self._at(name))
                self._move(temporary, name)
                self._sync(folder)

        self._call(call, f"{name} cannot be written")
        self._check_size(name, len(data))

    def put(self, local: Path, name: str, on_bytes: OnBytes | None = None) -> None:
        """Upload a local file. on_bytes gets the number of new bytes, negative when a try failed."""
        progress = Progress(on_bytes)
        size = local.stat().st_size

        def call() -> None:
            self._filesystem.put_file(str(local), self._at(name), callback=progress)
            self._sync(name)

        self._call(call, f"{name} cannot be written", progress)
        self._check_size(name, size)
        progress.absolute_update(size)

    def get(self, name: str, local: Path, on_bytes: OnBytes | None = None, most: float = math.inf) -> None:
        """Download a file to a local path. Raises DataError if it has more than `most` bytes."""
        progress = Progress(on_bytes, most)

        def call() -> None:
            self._filesystem.get_file(self._at(name), str(local), callback=progress)

        self._call(call, f"{name} cannot be read", progress)
        progress.absolute_update(local.stat().st_size)

    def make_folder(self, name: str = "") -> None:
        """Create a folder and its parents, where the store has folders.

        A missing bucket is not created: it is likely a typo. Raises DataError.
        """
        bucket = self._path.strip("/").split("/", 1)[0]

        def is_there() -> bool:
            with contextlib.suppress(PermissionError):  # a bucket may be writable but not listable
                return bool(self._filesystem.exists(bucket))
            return True

        if not self.can_rename:
            if not self.url.startswith("memory://") and not self._call(is_there, "cannot be looked up"):
                raise DataError(f"{self.shown}: bucket {bucket!r} does not exist; create it first")
            return
        self._call(
            lambda: self._filesystem.makedirs(self._at(name), exist_ok=True),
            f"{name or 'the folder'} cannot be created",
        )

    def rename(self, name: str, new_name: str) -> None:
        """Rename a folder to a name that does not exist; DataError if it does. Only where `can_rename`."""
        if self.exists(new_name):  # HDFS would move the folder into it
            raise DataError(f"{self.shown}: {new_name} was created by another process in the meantime")

        def call() -> None:
            if not self.exists(name) and self.exists(new_name):
                return  # an earlier try succeeded, though it reported an error
            self._move(name, new_name)
            self._sync(os.path.dirname(new_name))  # noqa: PTH120 - a name, no path

        self._call(call, f"{name} cannot be renamed to {new_name}")
        # Some clients do nothing and report nothing when they cannot rename.
        if self.exists(name) or not self.exists(new_name):
            raise DataError(f"{self.shown}: {name} was not renamed to {new_name}")

    def delete(self, name: str) -> None:
        """Delete a file or folder; do nothing if it is missing."""

        def call() -> None:
            self._filesystem.invalidate_cache()
            path = self._at(name)
            with contextlib.suppress(FileNotFoundError):
                # rm would delete all that match a pattern, and in an object store what is below a file.
                if not self._is_on_disk and self._filesystem.isfile(path):
                    self._filesystem.rm_file(path)
                elif self._is_on_disk or not _PATTERN.search(path):
                    self._filesystem.rm(path, recursive=True)
                else:
                    raise DataError(f"{self.shown}: {name} is a folder whose name is a pattern; delete it")

        self._call(call, f"{name} cannot be deleted")

    def _sync(self, name: str) -> None:
        """Flush a file or a folder's entries to the disk; nothing for a remote store."""
        if self._is_on_disk:
            sync(self._at(name))

    def _move(self, name: str, new_name: str) -> None:
        if self._is_on_disk:  # fsspec's move would put it into a folder to which a link of that name leads
            os.replace(self._at(name), self._at(new_name))  # noqa: PTH105 - strings
        else:
            self._filesystem.mv(self._at(name), self._at(new_name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _check_size(self, name: str, size: int) -> None:
        there = self.size(name)
        if there != size:
            raise DataError(f"{shown(self.child(name))} has {there} bytes after writing {size}; try again")

    def _call(self, call: Callable[[], Answer], what: str, progress: Progress | None = None) -> Answer:
        if not self.is_remote:
            try:
                return call()
            except OSError as error:
                reason = f"{error.strerror or error} ({error.filename or self._path})"
                raise DataError(f"{self.shown}: {what}: {reason}") from error
        return with_retries(
            lambda: with_timeout(call, self._silence, progress),
            f"{self.shown}: {what}",
            attempts=_BY_TIME,
            total_seconds=self._total_seconds,
        )


def format_bytes(count: float) -> str:
    """Return a number of bytes with its unit, such as ``1.4 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def publish(store: Store, temporary: str, name: str, check: Callable[[str], None]) -> None:
    """Rename a complete folder to `name`; an older folder of that name is deleted.

    At every moment one complete version exists: under the name, or where `clean` finds it. Raises DataError
    if the rename fails; the older folder then has its name back.

    check: raises a PlscError if the older folder must not be replaced. It gets its hidden name: under the
    other, another process could replace it meanwhile.
    """
    old = hidden_name(name, REPLACED)
    is_replacing = store.exists(name)
    if is_replacing:
        store.rename(name, old)
    try:
        if is_replacing:
            check(old)
        store.rename(temporary, name)
    except PlscError:
        if is_replacing:
            store.rename(old, name)
        raise
    if is_replacing:
        delete(store, old)


def delete(store: Store, name: str) -> None:
    """Delete a folder, its manifest first, so that it counts as incomplete from then on."""
    store.delete(f"{name}/{MANIFEST_NAME}")
    store.delete(name)


def withdraw(store: Store, name: str) -> None:
    """Hide a published folder, then delete it, so that no partial folder keeps the name."""
    doomed = name
    if store.can_rename:
        doomed = hidden_name(name, DELETING)
        store.rename(name, doomed)
    delete(store, doomed)


def clean(store: Store) -> list[str]:
    """Remove unfinished files and folders of killed processes; return the names of restored folders.

    Call from one process, while no other writes there. A hidden older version whose replacement was never
    published gets its name back.
    """
    old, folders = hidden_versions(store), store.names(only_folders=True)
    for name in store.names():
        match = HIDDEN.fullmatch(name)
        if match is None or store.is_link(name):
            continue
        if match[1] == SAVING:
            store.delete(name)
        elif name in old:
            store.rename(name, old[name])
        elif name in folders:
            delete(store, name)
    return list(old.values())


def hidden_versions(store: Store) -> dict[str, str]:
    """Return the hidden older versions whose replacement was never published, with the names they had."""
    names = store.names()
    matches = [match for match in map(HIDDEN.fullmatch, names) if match and match[1] == REPLACED]
    return {
        match[0]: match[2]
        for match in matches
        if match[2] not in names and not store.is_link(match[0]) and MANIFEST_NAME in store.names(match[0])
    }


@contextlib.contextmanager
def staged(url: str, open_store: Callable[[str], Store], names: Sequence[str]) -> Iterator[str]:
    """Yield the URL to write the files `names` to; they are in the folder `url` when the block succeeds.

    On an object store this is `url` itself, which must be empty; writing the manifest last publishes the
    folder. Raises DataError if the store fails, or if another process writes there. When the block fails,
    what it wrote is removed, and nothing else.
    """
    url = url.rstrip("/")
    parent, _, name = url.rpartition("/")
    is_direct, mark = is_object_store(url), hidden_name(name)
    store, own = open_store(url if is_direct else parent), [mark]
    try:
        if is_direct:
            # Who sees the mark of another process stops, so that at most one process writes.
            store.write(mark, b"")
            if others := [one for one in store.names() if one != mark]:
                raise DataError(f"{store.shown} already exists: it has {others[0]}; remove it, or wait")
            own += names
        else:
            for old in store.names():
                if (match := HIDDEN.fullmatch(old)) and match[1] == SAVING and match[2] == name:
                    store.delete(old)  # left by a killed run
            store.make_folder(mark)
        yield url if is_direct else store.child(mark)
        inside = set(store.names("" if is_direct else mark))
        if missing := set(names) - inside:
            raise DataError(f"{shown(url)}: another process has removed {min(missing)}; try again")
        if is_direct:
            store.delete(mark)
        else:
            for left in inside.difference(names):  # of an attempt that was killed
                store.delete(f"{mark}/{left}")
            store.rename(mark, name)
    except BaseException:
        with contextlib.suppress(Exception):
            for one in own:
                store.delete(one)
        raise
