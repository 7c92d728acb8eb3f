"""Pack a folder into one archive, and unpack it with a checksum.

The archive is a pax tar in a zstd stream, which `tar --zstd -xf` also reads. Its last member,
``.plsc-sha256``, is the SHA-256, in digits, of the name, size and content of all members before it, in order.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tarfile import TarInfo
from typing import IO, Any, NamedTuple

import pyarrow as pa

from plsc.data.sources.base import printable
from plsc.data.sources.tar import DEEPEST, read_members
from plsc.errors import DataError
from plsc.storage.blocks import fingerprint_of, streamed
from plsc.storage.disk import open_regular, publishing, publishing_folder
from plsc.storage.urls import local_folder, shown

CHECKSUM = ".plsc-sha256"
_CHUNK = 2**20
_MOST_RATIO = 100  # bytes of the content per byte of the archive


class Packed(NamedTuple):
    """The content of an archive: number of files, and their bytes."""

    files: int
    content_bytes: int


def pack(folder: str | Path, destination: str) -> Packed:
    """Write all files and folders below a local folder into one archive, ``.tar.zst``, local or remote.

    The archive appears when it is complete; existing files are not overwritten. Only one chunk of a file is
    in memory at a time. Raises DataError for a link, pipe or device, for a file that changes while packing,
    and if the archive cannot be written.
    """
    root = local_folder(folder, "the folder to pack")
    _check_suffix(destination)
    done, whole = Packed(0, 0), hashlib.sha256()
    with (
        publishing(destination) as file,
        pa.CompressedOutputStream(pa.PythonFile(file, mode="w"), "zstd") as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as archive,
    ):
        for path in _files_below(root):
            name = path.relative_to(root).as_posix()
            if name == CHECKSUM:
                raise DataError(f"{path}: this name is reserved for the checksum; rename the file")
            if path.is_dir():
                archive.addfile(_entry(name, path.stat(), tarfile.DIRTYPE))
                whole.update(_head(name, "folder"))
                continue
            size = _add(archive, name, path, whole)
            done = Packed(done.files + 1, done.content_bytes + size)
        digest, entry = whole.hexdigest().encode(), tarfile.TarInfo(CHECKSUM)
        entry.size = len(digest)
        archive.addfile(entry, io.BytesIO(digest))
    return done


def unpack(location: str, folder: str | Path, max_bytes: int | None = None) -> Packed:
    """Extract an archive of `pack`, local or remote, into a new local folder.

    The folder appears after the checksum was compared. Links, devices and names that lead out of the folder
    are refused. Raises DataError.

    max_bytes: most bytes of all files; by default 100 times those of the archive.
    """
    _check_suffix(location)
    done, whole = Packed(0, 0), hashlib.sha256()
    size = fingerprint_of(location).size
    with (
        streamed(location) as file,
        pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd") as decompressed,
        publishing_folder(folder) as target,
    ):
        title, compared = shown(location), False
        most = _MOST_RATIO * size if max_bytes is None else max_bytes
        stream = _ForwardReader(decompressed, title, most + _MOST_RATIO * size)
        for member in read_members(stream, title, has_end=False):
            if compared:
                compared = False
                break
            content = _content(stream, member, title)
            if member.name == CHECKSUM:
                if next(content, b"") != whole.hexdigest().encode():
                    raise DataError(f"{title} is damaged: its checksum is another one; download it again")
                compared = True
            elif member.isdir():
                (target / member.name).mkdir(member.mode & 0o777 | 0o700, parents=True, exist_ok=True)
                whole.update(_head(member.name, "folder"))
            else:
                if done.content_bytes + member.size > most:
                    raise DataError(f"{title} has over {most} bytes; if you trust it, pass --max_bytes")
                path = target / member.name
                whole.update(_head(member.name, member.size))
                path.parent.mkdir(parents=True, exist_ok=True)
                mode = member.mode & 0o777  # and no more than the umask allows
                with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as extracted:
                    for data in content:
                        whole.update(data)
                        extracted.write(data)
                done = Packed(done.files + 1, done.content_bytes + member.size)
        if not compared:
            raise DataError(f"{title} has no checksum at its end; it is not from plsc data pack")
    return done


def _check_suffix(location: str) -> None:
    if not location.endswith((".tar.zst", ".tzst")):
        raise DataError(f"{shown(location)}: expected a name that ends in .tar.zst")


def _files_below(folder: Path, levels: int = DEEPEST) -> Iterator[Path]:
    """Yield all folders and files, sorted; a folder comes before its content."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path = Path(entry.path)
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()) or not levels:
            raise DataError(
                f"{printable(entry.path)} is a link, a pipe or a device, or in over {DEEPEST} nested folders"
            )
        yield path
        if entry.is_dir():
            yield from _files_below(path, levels - 1)


def _entry(name: str, status: os.stat_result, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    """Return a header without user and group, which may not exist on another machine."""
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.size = 0 if kind == tarfile.DIRTYPE else status.st_size
    entry.mtime = int(status.st_mtime)
    entry.mode = stat.S_IMODE(status.st_mode) & 0o777
    return entry


def _add(archive: tarfile.TarFile, name: str, path: Path, whole: Any) -> int:
    """Add a file to the archive and to the hash; return its size."""
    try:
        with open_regular(path, path.parent) as file:  # a link may have replaced it since it was checked
            status = os.fstat(file.fileno())
            whole.update(_head(name, status.st_size))
            reader: Any = _HashingReader(file, whole)
            archive.addfile(_entry(name, status), reader)
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
                raise DataError(f"{printable(str(path))} has changed while it was packed; pack again")
    except OSError as error:
        reason = error.strerror or "it became shorter"
        raise DataError(f"{printable(str(path))} cannot be packed: {reason}") from error
    return status.st_size


class _HashingReader:
    def __init__(self, file: IO[bytes], whole: Any) -> None:
        self._file, self._whole = file, whole

    def read(self, length: int) -> bytes:
        data = self._file.read(length)
        self._whole.update(data)
        return data


def _head(name: str, size: int | str) -> bytes:
    """Return what the checksum has of a member before its content."""
    return f"{name}\0{size}\0".encode("utf-8", "surrogateescape")


class _ForwardReader:
    """A decompressed stream as a file that can seek forwards; errors become DataError."""

    def __init__(self, stream: Any, title: str, most: int) -> None:
        self._stream, self._title, self._most = stream, title, most
        self._position = 0

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        """Read up to a position, or to the end."""
        while self._position < position and self.read(min(_CHUNK, position - self._position)):
            pass

    def read(self, length: int) -> bytes:
        """Return the next `length` bytes, fewer at the end."""
        try:
            data: bytes = self._stream.read(length)
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{self._title} cannot be read, or is damaged ({reason})") from error
        self._position += len(data)
        if self._position > self._most:
            raise DataError(f"{self._title} has over {self._most} bytes; if you trust it, pass --max_bytes")
        return data


def _content(stream: _ForwardReader, member: TarInfo, title: str) -> Iterator[bytes]:
    left = member.size
    while left:
        data = stream.read(min(_CHUNK, left))
        if not data:
            raise DataError(f"{title} is truncated in '{printable(member.name)}'; download it again")
        left -= len(data)
        yield data
