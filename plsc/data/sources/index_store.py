"""Store indexes of data files next to the data. They are built once, memory-mapped, and validated on use.

An index is a set of named arrays, such as the offset and label of every record. Its file has the magic, the
length and CRC-32 of a JSON header, the header, then the raw arrays, each aligned to 64 bytes. The header
has the names and fingerprints of the data files, and the dtype, shape, offset and CRC-32 of each array.
Nothing in it can run code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plsc.errors import DataError
from plsc.storage.cache import Fingerprint, cache_folder, fingerprint_of
from plsc.storage.publish import replacing
from plsc.storage.regular import open_regular
from plsc.storage.urls import base_name, is_url, shown

Arrays = Mapping[str, np.ndarray]

_MAGIC = b"PLSCIDX1"
_FRAME = struct.Struct("<8sII")  # magic, length and CRC-32 of the header
_MAX_HEADER = 64 * 2**20
_ALIGNMENT = 64
_CRC_CHUNK = 16 * 2**20
_DTYPES = ("|u1", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8")


class MappedArray(np.ndarray):
    """A read-only array in an index file; its pages are shared by all processes that use it.

    It is pickled as file name and offset; a worker process maps the file again. Slices and copies are pickled
    with their values.
    """

    where: tuple[Any, ...] | None = None

    def __reduce__(self) -> Any:
        return (_map_again, self.where) if self.where is not None else super().__reduce__()


def load_or_build(
    files: Sequence[str | Path], kind: str, build: Callable[[], Arrays]
) -> dict[str, np.ndarray]:
    """Return the index of `files`: from its index file if that is valid and current, else from ``build()``.

    The index file is ``.<name>.<kind>.plsc-index`` next to the first file; in the cache folder if the data
    are remote or their folder is not writable. It is rebuilt when a file's name, size or fingerprint changed,
    or when it is damaged. Several processes may build it concurrently: each publishes the same content by a
    rename. If it cannot be stored anywhere, or a file has no version in its store, the arrays stay in memory.

    Args:
        files: local paths or fsspec URLs, in order.
        kind: content and version of the index, such as ``base64-1``; after a blank, any text with all options
            that it depends on. The header has the text, the name of the file a hash of it.
        build: returns named arrays, C-contiguous, of uint8, or of 32- or 64-bit integers or floats.

    Raises:
        DataError: a data file is missing, or changed while being read.
    """
    names = _names(files)
    fingerprints = [fingerprint_of(file) for file in files]
    identity = [[name, s.size, s.version] for name, s in zip(names, fingerprints, strict=True)]
    is_versioned = all(fingerprint.version for fingerprint in fingerprints)
    places = _places(files, kind) if is_versioned else []
    owners = {0, os.geteuid(), *(Path(file).stat().st_uid for file in files[:1] if not is_url(file))}
    for place in places:
        found = _load(place, kind, identity, owners)
        if found is not None:
            return found
    arrays = {name: np.ascontiguousarray(array) for name, array in build().items()}
    _check_unchanged(files, fingerprints)
    for place in places:
        with contextlib.suppress(DataError, OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            _save(place, kind, identity, arrays)
            found = _load(place, kind, identity, owners)
            if found is not None:
                return found
    return arrays


def _names(files: Sequence[str | Path]) -> list[str]:
    """Return the files' names below their common folder, so that the folder may be moved with its index."""
    if any(is_url(file) for file in files):
        return [shown(str(file)) for file in files]  # without secrets
    paths = [Path(file).absolute() for file in files]
    folder = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(folder).as_posix() for path in paths]


def _places(files: Sequence[str | Path], kind: str) -> list[Path]:
    first = str(files[0])
    digest = _digest((str(f) if is_url(f) else str(Path(f).absolute()) for f in files), 16)
    what, _, options = kind.partition(" ")
    name = f"{base_name(shown(first))[:100]}.{what}{f'-{_digest([options], 16)}' if options else ''}"
    places = []
    if not is_url(files[0]):
        # Lists of several files may differ in more than the first name.
        of_list = "" if len(files) == 1 else f".{_digest(_names(files), 8)}"
        places.append(Path(first).absolute().parent / f".{name}{of_list}.plsc-index")
    with contextlib.suppress(DataError):
        places.append(cache_folder("index") / f"{digest}.{name}.plsc-index")
    return places


def _digest(names: Iterable[str], length: int) -> str:
    return hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()[:length]


def _check_unchanged(files: Sequence[str | Path], before: list[Fingerprint]) -> None:
    for file, fingerprint in zip(files, before, strict=True):
        if fingerprint_of(file) != fingerprint:
            raise DataError(f"{file} changed while being indexed; start again when it is complete")


def _save(path: Path, kind: str, identity: list[list[Any]], arrays: Arrays) -> None:
    parts, offset = [], 0
    for name, array in arrays.items():
        entry = {"name": name, "dtype": array.dtype.str, "shape": array.shape, "offset": offset}
        parts.append({**entry, "crc32": _crc(_bytes_of(array))})
        offset = _aligned(offset + array.nbytes)
    header = json.dumps({"kind": kind, "files": identity, "arrays": parts}).encode("utf-8")
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(_FRAME.pack(_MAGIC, len(header), zlib.crc32(header)))
        file.write(header)
        start = _aligned(_FRAME.size + len(header))
        for array, part in zip(arrays.values(), parts, strict=True):
            file.write(b"\0" * (start + part["offset"] - file.tell()))
            file.write(_bytes_of(array))


def _load(
    path: Path, kind: str, identity: list[list[Any]], owners: Container[int]
) -> dict[str, np.ndarray] | None:
    """Return the arrays of an index file, or None if it is missing, outdated, damaged or of another user."""
    try:
        with open_regular(path, path.parent) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in owners:
                return None
            length = status.st_size
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # ValueError: an empty file
        return None
    try:
        header, start, header_crc = _read_header(mapped)
        if header["kind"] != kind or header["files"] != identity:
            return None
        found: dict[str, np.ndarray] = {}
        for part in header["arrays"]:
            name, dtype, shape = str(part["name"]), part["dtype"], tuple(part["shape"])
            where = (str(path), start + part["offset"], dtype, shape, header_crc)
            array = _view(mapped, length, *where[1:4])
            if _crc(_bytes_of(array)) != part["crc32"]:
                return None
            array.where = where
            found[name] = array
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    return found


def _read_header(mapped: mmap.mmap) -> tuple[dict[str, Any], int, int]:
    """Return (header, offset of the arrays, CRC-32 of the header); ValueError if it is damaged."""
    if len(mapped) < _FRAME.size:
        raise ValueError("too short")
    magic, length, crc = _FRAME.unpack_from(mapped)
    if magic != _MAGIC or length > min(_MAX_HEADER, len(mapped) - _FRAME.size):
        raise ValueError("not an index")
    text = mapped[_FRAME.size : _FRAME.size + length]
    if zlib.crc32(text) != crc:
        raise ValueError("damaged header")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("no header")
    return header, _aligned(_FRAME.size + length), crc


def _view(mapped: mmap.mmap, length: int, offset: int, dtype: str, shape: Any) -> MappedArray:
    sizes = [offset, *shape]
    if dtype not in _DTYPES or not all(type(n) is int and 0 <= n <= length for n in sizes):
        raise ValueError("bad array")
    count = 1
    for n in shape:
        count *= n
    if offset + count * np.dtype(dtype).itemsize > length:
        raise ValueError("an array ends outside the file")
    if count == 0:
        return np.zeros(shape, dtype).view(MappedArray)
    return MappedArray(shape, dtype, buffer=mapped, offset=offset)


def _map_again(path: str, offset: int, dtype: str, shape: tuple[int, ...], crc: int) -> MappedArray:
    try:
        with open_regular(path) as file:
            length = os.fstat(file.fileno()).st_size
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if _read_header(mapped)[2] != crc:
            raise ValueError("another index replaced it")
        array = _view(mapped, length, offset, dtype, shape)
    except (OSError, ValueError) as error:
        raise DataError(f"the index {path} changed while in use ({error})") from error
    array.where = (path, offset, dtype, shape, crc)
    return array


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _crc(data: memoryview) -> int:
    crc = 0
    for start in range(0, len(data), _CRC_CHUNK):
        crc = zlib.crc32(data[start : start + _CRC_CHUNK], crc)
    return crc


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
