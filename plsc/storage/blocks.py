"""Random access to the bytes of a file, local or remote: ``open_bytes(location).read_at(offset, length)``.

A remote file is read in blocks of 4 MiB. They are cached on disk, because samples in random order would
otherwise be one request each: 36 times as long from a server with 10 ms of latency. A block is stored in
``<cache folder>/blocks/<file>/<block>``. <file> is a hash of the URL and the file's fingerprint, which is
looked up again after each block: a changed file never uses old blocks, nor are new ones stored as old. All
processes of a machine share the blocks. A block is written under a temporary name and renamed; it is valid if
its size is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from plsc.errors import DataError
from plsc.storage.disk import AnyPath, open_regular, replacing, without_mark
from plsc.storage.urls import cache_folder, info_of, is_url, open_filesystem, shown, with_retries

BLOCK_BYTES = 4 * 2**20
CACHE_BYTES = 16 * 2**30  # of all cached blocks together
_LOCKS = 16


# fsspec clients' names for what changes with the content, the most reliable first.
_VERSION_KEYS = (
    *("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "Last-Modified"),
    *("modificationTime", "modification_time", "modified", "created"),
)


@dataclass(frozen=True)
class Fingerprint:
    """The size of a file in bytes, and a string that changes when the content does.

    Local: the times of modification and of change, in nanoseconds. Remote: the store's ETag, or its
    modification time.
    """

    size: int
    version: str


class Bytes(Protocol):
    """A file that does not change. Thread-safe; unpickling opens it again, also in another process."""

    size: int
    location: str
    fingerprint: Fingerprint

    def read_at(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; DataError if the range is outside the file."""
        ...


def open_bytes(
    location: str | Path, folder: AnyPath | None = None, fingerprint: Fingerprint | None = None
) -> Bytes:
    """Open a local file (as `open_regular`) or fsspec URL; DataError if it is missing or refused.

    fingerprint: that of before. DataError if the file has changed since; a remote one, when it is read.
    """
    if is_url(location):
        return RemoteBytes(str(location), fingerprint)
    return LocalBytes(location, folder, fingerprint)


def fingerprint_of(location: str | Path) -> Fingerprint:
    """Return the fingerprint of a local file or fsspec URL; DataError if missing or not a regular file."""
    return open_bytes(location).fingerprint


class LocalBytes:
    """A local file, read with pread: threads share no file position and do not wait for each other.

    It is not memory-mapped: if another process truncated the file, reading the map would kill this process.
    fingerprint: that of before; DataError if the file was changed since.
    """

    def __init__(
        self, path: str | Path, folder: AnyPath | None = None, fingerprint: Fingerprint | None = None
    ) -> None:
        self.location = str(path)
        try:
            with open_regular(self.location, folder, buffering=0) as file:
                self._descriptor = os.dup(file.fileno())
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            is_missing = isinstance(error, FileNotFoundError)
            reason = (
                "does not exist" if is_missing else f"cannot be read: {getattr(error, 'strerror', error)}"
            )
            raise DataError(f"{self.location} {reason}") from error
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        # Tools that unpack or copy set the modification time; nothing sets the time of the last change.
        found = Fingerprint(self.size, f"{status.st_mtime_ns}-{status.st_ctime_ns}")
        self.fingerprint = fingerprint or found
        self.check()

    def check(self) -> None:
        """Raise DataError if the file was overwritten since `fingerprint` was taken."""
        status = os.fstat(self._descriptor)
        modified = self.fingerprint.version.rpartition("-")[0]  # a backup may change the time of change
        if (status.st_size, str(status.st_mtime_ns)) != (self.fingerprint.size, modified):
            raise DataError(f"{self.location} changed while in use; start again")

    def read_at(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; DataError if the range is outside the file."""
        _check_range(self, offset, length)
        data = self._read(offset, length)
        while len(data) < length:  # one call returns at most 2 GiB
            more = self._read(offset + len(data), length - len(data))
            if not more:
                raise DataError(f"{self.location} became shorter while in use; start again")
            data += more
        return data

    def _read(self, offset: int, length: int) -> bytes:
        try:
            return os.pread(self._descriptor, length, offset)
        except OSError as error:  # of a disk, which does not name the file
            raise DataError(f"{self.location} cannot be read: {error.strerror}") from error

    def fileno(self) -> int:
        """Return the file descriptor, for code that calls pread itself."""
        return self._descriptor

    def __del__(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "fingerprint": self.fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["location"], None, state["fingerprint"])  # type: ignore[misc]


class RemoteBytes:
    """A file in a remote store, read in cached blocks.

    Two threads that need the same block fetch it once. A failed fetch is retried for up to a minute.
    is_kept: False disables the cache, for a file that is read once from start to end.
    """

    def __init__(self, url: str, fingerprint: Fingerprint | None = None, *, is_kept: bool = True) -> None:
        self.location = url
        self._is_kept = is_kept
        self._process = -1
        self._connect()
        self.fingerprint = fingerprint or self._look_up()
        self.size = self.fingerprint.size
        self._cache = BlockCache(url, self.fingerprint, is_kept=is_kept)

    def _look_up(self) -> Fingerprint:
        what = f"{shown(self.location)} cannot be looked up"
        info: dict[str, Any] = with_retries(lambda: info_of(self._filesystem, self._path), what)
        size = info.get("size")
        if info.get("type") not in (None, "file") or not isinstance(size, int) or size < 0:
            raise DataError(f"{shown(self.location)} is not a plain file of known size")
        version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
        return Fingerprint(size, version.strip('"'))

    def _connect(self) -> None:
        """Open the client; a forked process needs its own client and unlocked locks."""
        if self._process == os.getpid():
            return
        self._filesystem, self._path = open_filesystem(self.location)
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._process = os.getpid()

    def read_at(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; DataError if they cannot be read."""
        _check_range(self, offset, length)
        self._connect()
        parts = []
        while length > 0:
            block, start = divmod(offset, BLOCK_BYTES)
            wanted = min(length, BLOCK_BYTES - start)
            found = self._cache.read(block, start, wanted)
            if found is None:
                with self._locks[block % _LOCKS]:
                    found = self._cache.read(block, start, wanted)  # another thread may have fetched it
                    if found is None:
                        data = self._fetch(block)
                        self._cache.write(block, data)
                        found = data[start : start + wanted]
            parts.append(found)
            offset, length = offset + wanted, length - wanted
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _fetch(self, block: int) -> bytes:
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self.size)

        def fetch() -> bytes:
            data: bytes = self._filesystem.cat_file(self._path, start=start, end=end)
            if len(data) != end - start:
                raise OSError(f"received {len(data)} bytes of {end - start}")
            return data

        data = with_retries(fetch, f"{shown(self.location)} cannot be read at byte {start}")
        self._filesystem.invalidate_cache()
        if self._look_up() != self.fingerprint:
            raise DataError(f"{shown(self.location)} changed while in use; start again")
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "fingerprint": self.fingerprint, "is_kept": self._is_kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["location"], state["fingerprint"], is_kept=state["is_kept"])  # type: ignore[misc]


class BlockCache:
    """The cached blocks of one remote file.

    The blocks of all files together stay below `CACHE_BYTES`. Each time a process has written 1/64 of that,
    it removes the least recently used blocks until an eighth is free. On a full disk nothing is cached and
    reading continues.
    """

    def __init__(self, url: str, fingerprint: Fingerprint, *, is_kept: bool = True) -> None:
        self._size = fingerprint.size
        key = hashlib.sha256(f"{url}\n{fingerprint.size}\n{fingerprint.version}".encode()).hexdigest()[:32]
        self._root: Path | None = None
        # Without a version, a changed file could not be detected.
        if is_kept and fingerprint.version:
            with contextlib.suppress(DataError, OSError):
                self._root = cache_folder("blocks")
        self._folder = self._root / key if self._root else None
        self._written = 0

    def read(self, block: int, start: int, length: int) -> bytes | None:
        """Return a part of a block, or None if the block is not cached completely."""
        if self._folder is None:
            return None
        path = self._folder / str(block)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if os.fstat(descriptor).st_size != min(BLOCK_BYTES, self._size - block * BLOCK_BYTES):
                return None
            data = os.pread(descriptor, length, start)
            os.utime(descriptor)  # blocks are evicted by their last use
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return data if len(data) == length else None

    def write(self, block: int, data: bytes) -> None:
        """Cache a block, if the disk has room."""
        if self._folder is None or self._root is None:
            return
        with contextlib.suppress(DataError, OSError):  # usually a full disk
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with replacing(self._folder / str(block), is_synced=False) as temporary:
                temporary.write_bytes(data)
        self._written += len(data)
        if self._written > CACHE_BYTES // 64:
            self._written = 0
            remove_oldest(self._root, CACHE_BYTES)


def remove_oldest(root: Path, limit: int) -> None:
    """Remove the least recently used blocks until all together take at most 7/8 of `limit`."""
    blocks: list[tuple[float, int, Path]] = []
    for path in root.glob("*/*"):
        with contextlib.suppress(OSError):  # another process may have removed it
            status = path.lstat()
            blocks.append((status.st_mtime, status.st_size, path))
    blocks.sort()
    total = sum(size for _, size, _ in blocks)
    for _, size, path in blocks:
        if total <= limit - limit // 8:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size


class BytesFile(io.RawIOBase):
    """A raw file object over `Bytes`, for parsers. Wrap it in io.BufferedReader for small reads."""

    def __init__(self, data: Bytes) -> None:
        super().__init__()
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, which may be past the end; return it."""
        self._position = (0, self._position, self._data.size)[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read up to the size of the buffer; return the number of bytes, 0 at the end."""
        length = min(len(buffer), max(0, self._data.size - self._position))
        if length:
            buffer[:length] = self._data.read_at(self._position, length)
            self._position += length
        return length


def buffered(data: Bytes, buffer_bytes: int = 2**20) -> io.BufferedReader:
    """Return a buffered reader over the bytes, at position 0."""
    return io.BufferedReader(BytesFile(data), buffer_bytes)


def streamed(location: str | Path, folder: AnyPath | None = None) -> io.BufferedReader:
    """Open a local file (as `open_regular`) or fsspec URL to be read once, from start to end, uncached."""
    data = RemoteBytes(str(location), is_kept=False) if is_url(location) else LocalBytes(location, folder)
    return buffered(data, BLOCK_BYTES)


def text_lines(file: BinaryIO, name: str, most: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number from 1, offset in bytes, the line with its LF) of each line, without a byte order mark.

    Raises DataError that names the line if it is over `most` bytes (it might fill the memory), or UTF-16.
    """
    offset = 0
    for number in itertools.count(1):
        line = file.readline(most + 1)
        if not line:
            return
        if len(line) > most:
            raise DataError(f"{name}:{number} is longer than {most} bytes; fix the line")
        offset += len(line)
        line = without_mark(line, name) if number == 1 else line
        yield number, offset - len(line), line


def _check_range(data: Bytes, offset: int, length: int) -> None:
    if offset < 0 or length < 0 or offset + length > data.size:
        raise DataError(
            f"{shown(data.location)} has {data.size} bytes; cannot read {length} bytes at offset {offset}"
        )
