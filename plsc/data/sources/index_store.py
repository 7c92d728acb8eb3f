"""Store indexes of data files next to the data. They are built once, memory-mapped, and validated on use.

An index is a safetensors file of named arrays, such as the offset and label of every record. Its metadata are
the kind of the index, the names and fingerprints of the data files, and a CRC-32 of the arrays. Nothing in it
can run code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import mmap
import operator
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from plsc.data.native import crc32
from plsc.errors import DataError
from plsc.storage.blocks import fingerprint_of
from plsc.storage.cache import cache_folder
from plsc.storage.publish import replacing
from plsc.storage.regular import open_regular
from plsc.storage.urls import base_name, is_url, shown

Arrays = Mapping[str, np.ndarray]

_DTYPES = {"U8": "|u1", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8", "F32": "<f4", "F64": "<f8"}


class MappedArray(np.ndarray):
    """A read-only array in an index file; its pages are shared by all processes that use it.

    It is pickled as the names of file and array; a worker process maps the file again. Slices and copies are
    pickled with their values.
    """

    where: tuple[str, str, str] | None = None  # path, name, CRC-32 of the index

    def __reduce__(self) -> Any:
        return (_map_again, self.where) if self.where is not None else super().__reduce__()


def load_or_build(
    files: Sequence[str | Path], kind: str, build: Callable[[], Arrays]
) -> dict[str, np.ndarray]:
    """Return the index of `files`: from its index file if that is valid and current, else from ``build()``.

    The index file is ``.<name>.<kind>.plsc-index`` next to the first file; in the cache folder if the data
    are remote or their folder is not writable. Whom a data file's mode keeps out cannot read it. It is
    rebuilt when a file's name, size or fingerprint changed, or when it is damaged. Several processes may
    build it concurrently: each publishes the same content by a rename. If it cannot be stored anywhere, or a
    file has no version in its store, the arrays stay in memory.

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
    versions = [[name, s.size, s.version] for name, s in zip(names, fingerprints, strict=True)]
    identity = {"kind": kind, "files": json.dumps(versions)}
    is_versioned = all(fingerprint.version for fingerprint in fingerprints)
    places = _places(files, kind) if is_versioned else []
    there = [Path(file).stat() for file in files if not is_url(file)]
    owners = {0, os.geteuid(), *(status.st_uid for status in there[:1])}
    for place in places:
        found = _load(place, identity, owners)
        if found is not None:
            return found
    arrays = {name: np.ascontiguousarray(array) for name, array in build().items()}
    if [fingerprint_of(file) for file in files] != fingerprints:
        raise DataError(f"{names[0]} or others changed while being indexed; start again when complete")
    mode = functools.reduce(operator.and_, (status.st_mode for status in there), 0o666)
    for place in places:
        with contextlib.suppress(DataError, OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            _save(place, identity, arrays, mode)
            found = _load(place, identity, owners)
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
    with contextlib.suppress(DataError, OSError):
        places.append(cache_folder("index") / f"{digest}.{name}.plsc-index")
    return places


def _digest(names: Iterable[str], length: int) -> str:
    return hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()[:length]


def _save(path: Path, identity: dict[str, str], arrays: Arrays, mode: int) -> None:
    with replacing(path) as temporary:
        temporary.touch(mode | 0o200)
        temporary.write_bytes(save(dict(arrays), {**identity, "crc32": _crc(arrays)}))


def _load(path: Path, identity: dict[str, str], owners: Container[int]) -> dict[str, np.ndarray] | None:
    """Return the arrays of an index file, or None if it is missing, outdated, damaged or of another user."""
    try:
        about, arrays, owner = _map(path)
        is_current = owner in owners and about == {**identity, "crc32": _crc(arrays)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return arrays if is_current else None


def _map(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray], int]:
    with open_regular(path, path.parent) as file:
        owner = os.fstat(file.fileno()).st_uid
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8:start])
    about, arrays = header.pop("__metadata__"), {}
    for name, part in header.items():
        dtype, (begin, end) = np.dtype(_DTYPES[part["dtype"]]), part["data_offsets"]
        flat = np.frombuffer(mapped, dtype, (end - begin) // dtype.itemsize, start + begin)
        arrays[name] = array = flat.reshape(part["shape"]).view(MappedArray)
        array.where = (str(path), name, about["crc32"])
    return about, arrays, owner


def _map_again(path: str, name: str, crc: str) -> np.ndarray:
    about, arrays, _ = _map(Path(path))
    if about["crc32"] != crc:
        raise DataError(f"the index {path} changed while in use; start again")
    return arrays[name]


def _crc(arrays: Arrays) -> str:
    """Return the CRC-32 of all names, types, shapes and values."""
    crc = 0
    for name, array in sorted(arrays.items()):
        crc = crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)
        crc = crc32(array.reshape(-1).view(np.uint8).data, crc)
    return str(crc)
