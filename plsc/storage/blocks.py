"""Random access to the bytes of a file, local or remote: ``open_bytes(location).read_at(offset, length)``.

A remote file is read in blocks of 4 MiB, which are cached (see `plsc.storage.cache.BlockCache`).
"""

from __future__ import annotations

import io
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from plsc.errors import DataError
from plsc.storage.cache import BLOCK_BYTES, BlockCache, Fingerprint, fingerprint_of, local_fingerprint
from plsc.storage.regular import AnyPath, open_regular, without_mark
from plsc.storage.retry import with_retries
from plsc.storage.urls import is_url, open_filesystem, shown

_LOCKS = 16


class Bytes(Protocol):
    """A file that does not change. Thread-safe; unpickling opens it again, also in another process."""

    size: int
    location: str

    def read_at(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; DataError if the range is outside the file."""
        ...


def open_bytes(location: str | Path, folder: AnyPath | None = None) -> Bytes:
    """Open a local file (as `open_regular`) or fsspec URL; DataError if it is missing or refused."""
    return RemoteBytes(str(location)) if is_url(location) else LocalBytes(location, folder)


class LocalBytes:
    """A local file, read with pread: threads share no file position and do not wait for each other.

    It is not memory-mapped: if another process truncated the file, reading the map would kill this process.
    """

    def __init__(self, path: str | Path, folder: AnyPath | None = None) -> None:
        self.location = str(path)
        self._open(folder)
        self.size = self._fingerprint.size

    def _open(self, folder: AnyPath | None = None) -> None:
        try:
            with open_regular(self.location, folder, buffering=0) as file:
                self._descriptor = os.dup(file.fileno())
        except FileNotFoundError:
            raise DataError(f"{self.location} does not exist") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{self.location} cannot be read: {getattr(error, 'strerror', error)}") from error
        self._fingerprint = local_fingerprint(Path(self.location), self._descriptor)

    def read_at(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; DataError if the range is outside the file."""
        _check_range(self, offset, length)
        try:
            data = os.pread(self._descriptor, length, offset)
            while len(data) < length:  # one call returns at most 2 GiB
                more = os.pread(self._descriptor, length - len(data), offset + len(data))
                if not more:
                    raise DataError(f"{self.location} became shorter while in use; start again")
                data += more
        except OSError as error:
            raise DataError(f"{self.location} cannot be read ({error.strerror})") from error
        return data

    def fileno(self) -> int:
        """Return the file descriptor, for code that calls pread itself."""
        return self._descriptor

    def __del__(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "fingerprint": self._fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.location = state["location"]
        self._open()
        if self._fingerprint != state["fingerprint"]:
            raise DataError(f"{self.location} changed while in use; start again")
        self.size = self._fingerprint.size


class RemoteBytes:
    """A file in a remote store, read in cached blocks.

    Two threads that need the same block fetch it once. A failed fetch is retried for up to a minute.
    is_kept: False disables the cache, for a file that is read once from start to end.
    """

    def __init__(self, url: str, fingerprint: Fingerprint | None = None, *, is_kept: bool = True) -> None:
        self.location = url
        self._fingerprint = fingerprint or fingerprint_of(url)
        self.size = self._fingerprint.size
        self._is_kept = is_kept
        self._cache = BlockCache(url, self._fingerprint, is_kept=is_kept)
        self._process = -1
        self._connect()

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
            parts.append(self._read_in_block(block, start, wanted))
            offset, length = offset + wanted, length - wanted
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_in_block(self, block: int, start: int, length: int) -> bytes:
        found = self._cache.read(block, start, length)
        if found is not None:
            return found
        with self._locks[block % _LOCKS]:
            found = self._cache.read(block, start, length)  # another thread may have fetched it
            if found is not None:
                return found
            data = self._fetch(block)
            self._cache.write(block, data)
        return data[start : start + length]

    def _fetch(self, block: int) -> bytes:
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self.size)

        def fetch() -> bytes:
            data: bytes = self._filesystem.cat_file(self._path, start=start, end=end)
            if len(data) != end - start:
                raise OSError(f"received {len(data)} bytes of {end - start}")
            return data

        return with_retries(fetch, f"{shown(self.location)} cannot be read at byte {start}")

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "fingerprint": self._fingerprint, "is_kept": self._is_kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["location"], state["fingerprint"], is_kept=state["is_kept"])  # type: ignore[misc]


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
