"""Random access to the bytes of a file, local or remote: ``open_bytes(location).read_at(offset, length)``."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from plsc.errors import DataError
from plsc.storage.regular import AnyPath, open_regular, without_mark
from plsc.storage.retry import with_retries
from plsc.storage.urls import is_url, open_filesystem, shown

_AHEAD = 4 * 2**20  # bytes


# fsspec clients' names for what changes with the content, the most reliable first.
_VERSION_KEYS = (
    *("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified"),
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


def open_bytes(location: str | Path, folder: AnyPath | None = None) -> Bytes:
    """Open a local file (as `open_regular`) or fsspec URL; DataError if it is missing or refused."""
    return RemoteBytes(str(location)) if is_url(location) else LocalBytes(location, folder)


def fingerprint_of(location: str | Path) -> Fingerprint:
    """Return the fingerprint of a local file or fsspec URL; DataError if missing or not a regular file."""
    return open_bytes(location).fingerprint


class LocalBytes:
    """A local file, read with pread: threads share no file position and do not wait for each other.

    It is not memory-mapped: if another process truncated the file, reading the map would kill this process.
    """

    def __init__(self, path: str | Path, folder: AnyPath | None = None) -> None:
        self.location = str(path)
        self._open(folder)

    def _open(self, folder: AnyPath | None = None) -> None:
        try:
            with open_regular(self.location, folder, buffering=0) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            reason = "does not exist" if is_missing else f"cannot be read: {error.strerror}"
            raise DataError(f"{self.location} {reason}") from error
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        # Tools that unpack or copy set the modification time; nothing sets the time of the last change.
        self.fingerprint = Fingerprint(self.size, f"{status.st_mtime_ns}-{status.st_ctime_ns}")

    def read_at(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; DataError if the range is outside the file."""
        _check_range(self, offset, length)
        data = os.pread(self._descriptor, length, offset)
        while len(data) < length:  # one call returns at most 2 GiB
            more = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not more:
                raise DataError(f"{self.location} became shorter while in use; start again")
            data += more
        return data

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
        self.location = state["location"]
        self._open()
        if self.fingerprint != state["fingerprint"]:
            raise DataError(f"{self.location} changed while in use; start again")


class RemoteBytes:
    """A file in a remote store. A failed request is retried for up to a minute.

    Requests that follow each other are read ahead; any other one fetches its bytes alone, because samples in
    random order would have the file transferred many times.
    """

    def __init__(self, url: str, fingerprint: Fingerprint | None = None) -> None:
        self.location = url
        self._connect()
        if fingerprint is None:
            info: dict[str, Any] = with_retries(
                lambda: self._filesystem.info(self._path), f"{shown(url)} cannot be looked up"
            )
            size = info.get("size")
            if info.get("type") not in (None, "file") or not isinstance(size, int) or size < 0:
                raise DataError(f"{shown(url)} is not a plain file of known size")
            version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
            fingerprint = Fingerprint(size, version.strip('"'))
        self.fingerprint, self.size = fingerprint, fingerprint.size

    def _connect(self) -> None:
        self._filesystem, self._path = open_filesystem(self.location)
        self._last: tuple[int, bytes] = (0, b"")
        self._process = os.getpid()

    def read_at(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; DataError if they cannot be read."""
        _check_range(self, offset, length)
        if self._process != os.getpid():  # a forked process needs its own client
            self._connect()
        start, data = self._last
        begin = offset - start
        if begin < 0 or begin + length > len(data):
            is_next = 0 <= begin <= len(data) + _AHEAD // 4  # threads read in no exact order
            stop = min(self.size, offset + max(length, _AHEAD)) if is_next else offset + length
            begin, data = 0, self._fetch(offset, stop)
            self._last = offset, data
        return data[begin : begin + length]

    def _fetch(self, start: int, stop: int) -> bytes:
        def fetch() -> bytes:
            data: bytes = (
                self._filesystem.cat_file(self._path, start=start, end=stop) if start < stop else b""
            )
            if len(data) != stop - start:
                raise OSError(f"received {len(data)} bytes of {stop - start}")
            return data

        return with_retries(fetch, f"{shown(self.location)} cannot be read at byte {start}")

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "fingerprint": self.fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["location"], state["fingerprint"])  # type: ignore[misc]


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
        base = (0, self._position, self._data.size)[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
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
    """Open a local file (as `open_regular`) or fsspec URL to be read once, from start to end."""
    return buffered(open_bytes(location, folder), _AHEAD)


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
