"""The cache folder: fingerprints of files, and cached blocks of remote files.

A block is stored in ``<cache folder>/blocks/<file>/<block>``. <file> is a hash of the URL and the file's
fingerprint, so a changed file never uses old blocks. All processes of a machine share the blocks. A block is
written under a temporary name and renamed; it is valid if its size is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.errors import DataError, OptionError
from plsc.storage.publish import replacing
from plsc.storage.retry import with_retries
from plsc.storage.urls import base_name, is_url, open_filesystem, shown

_NOBODY = 65534  # to whom NFS maps root


def cache_folder(*parts: str) -> Path:
    """Return a folder below ``$PLSC_CACHE_DIR``, else ``$XDG_CACHE_HOME/plsc``, else ``~/.cache/plsc``.

    Creates it with mode 700 if missing, because cached data may be private. Raises DataError if that fails.
    """
    root = os.environ.get("PLSC_CACHE_DIR")
    if not root:
        root = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "plsc")
    folder = Path(root).expanduser().joinpath(*parts)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be created ({error.strerror}); "
            "set PLSC_CACHE_DIR to a writable folder"
        ) from error
    for place in (Path(root).expanduser(), folder):  # whose owner could replace what is in it
        if place.stat().st_uid not in (os.geteuid(), 0, _NOBODY):
            raise DataError(f"the cache folder {place} is another user's; set PLSC_CACHE_DIR to your own")
    return folder


def folder_for(kind: str, url: str) -> Path:
    """Return the cache path for a URL, ending in the URL's last part; its parent folder is created.

    kind: of the content, such as ``checkpoints``.
    """
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return cache_folder(kind, digest) / base_name(shown(url))


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


def fingerprint_of(location: str | Path) -> Fingerprint:
    """Return the fingerprint of a local file or fsspec URL; DataError if missing or not a regular file."""
    if not is_url(location):
        return local_fingerprint(Path(location))
    url = str(location)
    filesystem, inside = open_filesystem(url)
    info: dict[str, Any] = with_retries(lambda: filesystem.info(inside), f"{shown(url)} cannot be looked up")
    size = info.get("size")
    if info.get("type") not in (None, "file") or not isinstance(size, int) or size < 0:
        raise DataError(f"{shown(url)} is not a plain file of known size")
    found = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    return Fingerprint(size, found.strip('"'))


def local_fingerprint(path: Path, descriptor: int | None = None) -> Fingerprint:
    """Return the fingerprint of a local file, or of the open file `descriptor`."""
    try:
        status = path.stat() if descriptor is None else os.fstat(descriptor)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file")
    # Tools that unpack or copy set the modification time; nothing sets the time of the last change.
    return Fingerprint(status.st_size, f"{status.st_mtime_ns}-{status.st_ctime_ns}")


BLOCK_BYTES = 4 * 2**20
_DEFAULT_LIMIT = 16 * 2**30


class BlockCache:
    """The cached blocks of one remote file.

    The blocks of all files together stay below ``$PLSC_CACHE_BYTES`` (default 16 GiB; 0 disables the cache).
    Each time a process has written 1/64 of the limit, it removes the least recently used blocks until an
    eighth is free. On a full disk nothing is cached and reading continues.
    """

    def __init__(self, url: str, fingerprint: Fingerprint, *, is_kept: bool = True) -> None:
        self._limit = cache_limit() if is_kept else 0
        self._size = fingerprint.size
        key = hashlib.sha256(f"{url}\n{fingerprint.size}\n{fingerprint.version}".encode()).hexdigest()[:32]
        self._root: Path | None = None
        # Without a version, a changed file could not be detected.
        if self._limit > 0 and fingerprint.version:
            with contextlib.suppress(DataError):
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
        if self._written > self._limit // 64:
            self._written = 0
            remove_oldest(self._root, self._limit)


def cache_limit() -> int:
    """Return ``$PLSC_CACHE_BYTES``, or 16 GiB; OptionError if it is not an integer of 0 or more."""
    text = os.environ.get("PLSC_CACHE_BYTES", "")
    if text and not text.isdecimal():
        raise OptionError(f"PLSC_CACHE_BYTES is {text!r}; expected a number of bytes (0 disables the cache)")
    return int(text) if text else _DEFAULT_LIMIT


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
