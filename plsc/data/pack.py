"""Pack a folder into one archive, and unpack it with a checksum per file.

The archive is a pax tar in a zstd stream, which `tar --zstd -xf` also reads. Its last member,
``.plsc-sha256sums``, has a line ``<SHA-256>  <name>`` per file, in order, in the format of `sha256sum -c`.
Its comment has its own SHA-256: one flipped bit in the stream can change a name there and in its own header.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from tarfile import TarInfo
from typing import IO, Any, NamedTuple

import pyarrow as pa

from plsc.data.sources.base import printable
from plsc.data.sources.tar import DEEPEST, read_members
from plsc.errors import DataError
from plsc.storage.blocks import fingerprint_of, streamed
from plsc.storage.publish import publishing, publishing_folder
from plsc.storage.regular import open_regular
from plsc.storage.urls import local_folder, shown

SUMS = ".plsc-sha256sums"
_CHUNK = 2**20
_MOST_RATIO = 100  # bytes of the content per byte of the archive
_IN_MEMORY = 16 * 2**20  # bytes of checksums; more are kept in a temporary file


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
        tempfile.SpooledTemporaryFile(_IN_MEMORY) as sums,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as archive,
    ):
        for path in _files_below(root):
            name = path.relative_to(root).as_posix()
            if name == SUMS:
                raise DataError(f"{path}: this name is reserved for the checksums; rename the file")
            if path.is_dir():
                archive.addfile(_entry(name, path.stat(), tarfile.DIRTYPE))
                whole.update(_line_of("folder", name))
                continue
            digest, size = _add(archive, name, path)
            sums.write(line := _line_of(digest, name))
            whole.update(line)
            done = Packed(done.files + 1, done.content_bytes + size)
        entry = tarfile.TarInfo(SUMS)
        entry.size, entry.pax_headers = sums.tell(), {"comment": whole.hexdigest()}
        sums.seek(0)
        archive.addfile(entry, sums)
    return done


def unpack(location: str, folder: str | Path, max_bytes: int | None = None) -> Packed:
    """Extract an archive of `pack`, local or remote, into a new local folder.

    The folder appears after all checksums were compared. Links, devices and names that lead out of the folder
    are refused. Raises DataError.

    max_bytes: most bytes of all files; by default 100 times those of the archive.
    """
    _check_suffix(location)
    done, sums, whole = Packed(0, 0), hashlib.sha256(), hashlib.sha256()
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
            if member.name == SUMS:
                listed = hashlib.sha256()
                for data in content:
                    listed.update(data)
                is_whole = member.pax_headers.get("comment", whole.hexdigest()) == whole.hexdigest()
                if listed.digest() != sums.digest() or not is_whole:
                    raise DataError(f"{title} is damaged: files do not match checksums; download it again")
                compared = True
            elif member.isdir():
                (target / member.name).mkdir(parents=True, exist_ok=True)
                whole.update(_line_of("folder", member.name))
            else:
                if done.content_bytes + member.size > most:
                    raise DataError(f"{title} has over {most} bytes; if you trust it, pass --max_bytes")
                path, sha = target / member.name, hashlib.sha256()
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as extracted:
                    for data in content:
                        sha.update(data)
                        extracted.write(data)
                sums.update(line := _line_of(sha.hexdigest(), member.name))
                whole.update(line)
                done = Packed(done.files + 1, done.content_bytes + member.size)
        if not compared:
            raise DataError(f"{title} has no checksums at its end; it is not from plsc data pack")
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


def _add(archive: tarfile.TarFile, name: str, path: Path) -> tuple[str, int]:
    try:
        with open_regular(path, path.parent) as file:  # a link may have replaced it since it was checked
            status = os.fstat(file.fileno())
            reader: Any = _HashingReader(file)
            archive.addfile(_entry(name, status), reader)
    except OSError as error:
        reason = error.strerror or "it became shorter"
        raise DataError(f"{printable(str(path))} cannot be packed: {reason}") from error
    return reader.sha.hexdigest(), status.st_size


class _HashingReader:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha = hashlib.sha256()

    def read(self, length: int) -> bytes:
        data = self._file.read(length)
        self.sha.update(data)
        return data


def _line_of(digest: str, name: str) -> bytes:
    text = name.replace("\\", "\\\\").replace("\n", "\\n")
    mark = "\\" if text != name else ""  # sha256sum marks escaped names like this
    return f"{mark}{digest}  {text}\n".encode("utf-8", "surrogateescape")


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
