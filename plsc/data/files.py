"""Find the files of a dataset (a file, a pattern, a folder of shards, file_list.txt); read and index them.

An index is a safetensors file of named arrays, such as the offset and label of every record, in the cache
folder. It is built once, memory-mapped, and validated on use. Its metadata are the kind of the index, the
names and fingerprints of the data files, and a CRC-32 of the arrays. Nothing in it can run code.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import mmap
import os
import posixpath
import re
import threading
import unicodedata
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from plsc.data.native import crc32, read_ranges
from plsc.errors import DataError, naming
from plsc.storage.blocks import (
    Bytes,
    Fingerprint,
    LocalBytes,
    fingerprint_of,
    open_bytes,
    streamed,
    text_lines,
)
from plsc.storage.disk import check_inside, open_regular, replacing
from plsc.storage.urls import (
    base_name,
    cache_folder,
    exists,
    find_matching,
    is_url,
    join,
    local_path,
    located,
    open_filesystem,
    shown,
    with_retries,
)

Arrays = Mapping[str, np.ndarray]
_DTYPES = {"U8": "|u1", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8", "F32": "<f4", "F64": "<f8"}
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_SHARDS = 1_000_000
_MOST_OPEN = 64
_MAX_LINE_BYTES = 8192  # of a file_list.txt
_LONG_NAME = 1024
_UNUSUAL = b":%\\\0\r\n\t"  # in paths that `located` examines; the others are many. URL clients drop \n, \t
MAX_LABEL_DIGITS = 18  # such numbers fit int64
# Hidden names, and those that Windows, macOS, Android, file system checks and network drives add to folders.
_HIDDEN = re.compile(
    r"\..*|__macosx|icon\r|network trash folder|temporary items|lost\+found|lost\.dir|found\.\d{3}"
    r"|\$(recycle\.bin|windows\.~\w\w)|(?-i:RECYCLER)|system volume information|desktop\.ini"
    r"|(eh)?thumbs(_vista)?\.db|@(eadir|tmp|sharebin|recently-snapshot|__thumb)|[@#](syno)?recycle"
    r"|[@#~]snapshot|_gsdata_",
    re.IGNORECASE | re.DOTALL,
)


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, ``.name``, or has a name of an operating system."""
    return _HIDDEN.fullmatch(name) is not None


def hidden_part(path: str) -> str | None:
    """Return a path up to its first hidden part; None if there is none."""
    parts = path.split("/")
    return next(("/".join(parts[:n]) for n, part in enumerate(parts, 1) if is_hidden(part)), None)


def shard_files(location: str | Path, suffix: str) -> list[str]:
    """Return the files of a location, in the order of their samples.

    A location is the path or URL of a file; a range such as ``train-{000..099}.tar``; a pattern such as
    ``train-*.tar``; or a folder, meaning its files that end in `suffix`. Matches are sorted by name, without
    hidden ones (`is_hidden`) and those in a hidden folder that a wildcard matched. Raises DataError if
    nothing is found or the range is invalid.
    """
    location = str(location)
    fixed = -1  # number of folders that the user wrote, which may be hidden; -1: all
    if found := _RANGE.search(location):
        first, last = int(found[1]), min(int(found[2]), int(found[1]) + _MAX_SHARDS)
        before, after, width = location[: found.start()], location[found.end() :], len(found[1])
        files = [f"{before}{number:0{width}d}{after}" for number in range(first, last + 1)]
    elif any(sign in base_name(location) for sign in "*?["):
        files = _matching(location)
        fixed = re.split(r"[*?[]", location)[0].count("/")
    elif location.lower().endswith(suffix) and not _is_folder(location):
        return [location]
    else:
        files = _matching(join(glob.escape(location), "*"))
        files = [file for file in files if file.lower().endswith(suffix)]
    files = sorted(file for file in files if not hidden_part("/".join(file.split("/")[fixed:])))
    if not files:
        raise DataError(f"{shown(location)}: no file ends in {suffix}, or a range is not ascending")
    return files


def _matching(pattern: str) -> list[str]:
    return find_matching(pattern) if is_url(pattern) else glob.glob(pattern)  # noqa: PTH207 - may be absolute


def _is_folder(location: str) -> bool:
    if not is_url(location):
        return Path(location).is_dir()
    if location.lower().startswith("http"):  # a client may read the file to look for links
        return False
    filesystem, inside = open_filesystem(location)
    return with_retries(lambda: bool(filesystem.isdir(inside)), f"{shown(location)} cannot be looked up")


def read_file_list(
    data_dir: str | Path,
    file_list: str = "file_list.txt",
    allowed: Sequence[str] = (),
) -> list[str]:
    """Return the paths or URLs of the files that `file_list` names, in its order.

    A line is one location, which may contain blanks, relative to `data_dir` (`located`). Surrounding blanks,
    blank lines, CRLF and a byte order mark are accepted.

    Args:
        data_dir: local folder or fsspec URL.
        file_list: name in `data_dir`, or a path or URL.
        allowed: as of `located`.

    Raises:
        DataError: the list is missing, empty, too long, or names a file twice or a missing file.
    """
    data_dir = local_path(str(data_dir))
    listing = _below(data_dir, file_list)
    folder = None if "/" in file_list else data_dir
    if not is_url(file_list) and not is_url(listing) and not os.path.exists(listing):  # noqa: PTH110
        if not os.path.exists(file_list):  # noqa: PTH110 - False for a name that is too long
            raise DataError(f"{listing} does not exist; create it, with the name of one data file per line")
        listing, folder = file_list, None
    paths: dict[str, None] = {}
    with streamed(listing, folder) as file:
        for number, _, line in text_lines(file, shown(listing), _MAX_LINE_BYTES):
            if not (name := line.decode("utf-8", "surrogateescape").strip()):
                continue
            with naming("{}:{}".format, shown(listing), number):
                path = _below(data_dir, located(name, data_dir, allowed, listing))
                check_inside(path, data_dir)
                if path in paths or not exists(path):
                    raise DataError(f"it names {name}, which is not in {shown(data_dir)}, or named before")
            paths[path] = None
    if not paths:
        raise DataError(f"{shown(listing)} names no files; expected one name per line")
    return list(paths)


def name_key(name: str) -> str:
    """Return a name as it is compared with others: composed (NFC), because macOS decomposes the same text.

    One of over 1024 characters is compared as written: composing it could take quadratic time.
    """
    return name if name.isascii() or len(name) > _LONG_NAME else unicodedata.normalize("NFC", name)


def ranked(names: Collection[str]) -> tuple[list[str], dict[str, int]]:
    """Return the distinct names, sorted by `name_key`, and the rank of each of `names`.

    Names with the same `name_key` share a rank; the first of them is kept, as it was written.
    """
    kept: dict[str, str] = {}
    for name in sorted(names, key=name_key):
        kept.setdefault(name_key(name), name)
    ranks = {key: rank for rank, key in enumerate(kept)}
    return [*kept.values()], {name: ranks[name_key(name)] for name in names}


def parse_label(label: bytes) -> int:
    """Return an integer of 0 or more from its digits; DataError describes a bad label."""
    if not label.isdigit() or len(label) > MAX_LABEL_DIGITS:
        raise DataError(f"a label must be an integer of 0 or more, of at most {MAX_LABEL_DIGITS} digits")
    return int(label)


def listed_path(path: bytes, folder: str, allowed: Sequence[str] = (), listing: str = "") -> bytes:
    """Return a path of a list of lines, as `located`; DataError if it may not be opened."""
    if path[:1] != b"/" and b".." not in path and path.translate(None, _UNUSUAL) == path:
        return path
    return os.fsencode(located(os.fsdecode(path), folder, allowed, listing))


def folder_of(location: str, data_dir: str) -> str | None:
    """Return the folder that links of a listed file must not leave: `data_dir`; None for others and URLs."""
    folder = local_path(data_dir)
    return folder if location.startswith(join(folder, "")) and not is_url(folder) else None


def _below(folder: str, name: str) -> str:
    return name if is_url(name) else posixpath.join(folder, name)


class Shards:
    """Many files, of which the 64 last used are open. Thread-safe and picklable.

    Each is as it was at first: whoever opens one that was replaced since, whose offsets are others, gets a
    DataError. data_dir: folder of the list that names the files, as of `folder_of`.
    """

    def __init__(
        self,
        locations: Sequence[str],
        data_dir: str | None = None,
        fingerprints: Sequence[Fingerprint] | None = None,
    ) -> None:
        self.locations, self._data_dir = list(locations), data_dir
        self.fingerprints = fingerprints or [fingerprint_of(one) for one in self.locations]
        self._open: OrderedDict[int, Bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, shard: int) -> Bytes:
        """Return the bytes of a file; DataError if it is missing."""
        with self._lock:
            found = self._open.get(shard)
            if found is None:
                location, data_dir, known = self.locations[shard], self._data_dir, self.fingerprints[shard]
                folder = None if data_dir is None else folder_of(location, data_dir)
                found = self._open[shard] = open_bytes(location, folder, known)
                if len(self._open) > _MOST_OPEN:  # a thread that still reads the file keeps it open
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(shard)
                if isinstance(found, LocalBytes):
                    found.check()
            return found

    def read_many(
        self, shards: np.ndarray, offsets: np.ndarray, lengths: np.ndarray
    ) -> Iterator[bytes | None]:
        """Yield lengths[i] bytes at offsets[i] of the file shards[i], int64 [n], with few system calls.

        None stands for ranges that are remote or could not be read; read them one by one.
        """
        for start in range(0, len(shards), _MOST_OPEN):
            some = slice(start, start + _MOST_OPEN)
            chosen = shards[some].tolist()
            try:
                opened = {shard: self[shard] for shard in dict.fromkeys(chosen)}
            except DataError:
                yield from [None] * len(chosen)
                continue
            descriptors = {
                shard: file.fileno() if isinstance(file, LocalBytes) else -1 for shard, file in opened.items()
            }
            numbers = np.array([descriptors[shard] for shard in chosen], np.int32)
            yield from read_ranges(numbers, offsets[some], lengths[some])

    def __getstate__(self) -> dict[str, Any]:
        return {
            "locations": self.locations,
            "data_dir": self._data_dir,
            "fingerprints": self.fingerprints,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class PathTable:
    """A list of paths as one byte array with offsets.

    Ten million paths as Python strings take over a gigabyte, and reading them in forked workers copies that
    memory, because each use writes a reference count. Here each path takes its length plus eight bytes, and
    reading writes nothing.
    """

    def __init__(self, text: np.ndarray | None = None, ends: np.ndarray | None = None) -> None:
        """Start with no path, or with the `arrays` of a table, which then cannot grow."""
        self._text: Any = bytearray() if text is None else text
        self._ends: Any = array("q", [0]) if ends is None else ends

    def append(self, path: bytes) -> None:
        """Append a path."""
        self._text += path
        self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of all paths, uint8, and where each ends in them, int64 [paths + 1], from 0.

        These are views of the table's memory: do not append while they are in use.
        """
        return np.frombuffer(self._text, np.uint8), np.frombuffer(self._ends, np.int64)

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._text[self._ends[index] : self._ends[index + 1]])


# Indexes.


class MappedArray(np.ndarray):
    """A read-only array in an index file; its pages are shared by all processes that use it.

    It is pickled as the names of file and array; a worker process maps the file again. Slices and copies are
    pickled with their values.
    """

    where: tuple[str, str, str] | None = None  # path, name, CRC-32 of the index

    def __reduce__(self) -> Any:
        return (_map_again, self.where) if self.where is not None else super().__reduce__()


def load_or_build(shards: Shards, kind: str, build: Callable[[], Arrays]) -> dict[str, np.ndarray]:
    """Return the index of files: from its index file if that is valid and current, else from ``build()``.

    The index file is ``index/<hash>.<name>.<kind>`` in the cache folder, never beside the data: whoever wrote
    these could have written an index with other paths. It is rebuilt when a file's name, size or fingerprint
    changed, or when it is damaged. Several processes may build it concurrently: each publishes the same
    content by a rename. If it cannot be stored, or a file has no version in its store, the arrays stay in
    memory.

    Args:
        shards: the files: local paths or fsspec URLs, in order.
        kind: content and version of the index, such as ``base64-1``; after a blank, any text with all options
            that it depends on. The header has the text, the name of the file a hash of it.
        build: returns named arrays, C-contiguous, of uint8, or of 32- or 64-bit integers or floats.

    Raises:
        DataError: a data file is missing, or changed while being read.
    """
    names = [shown(one) if is_url(one) else str(Path(one).absolute()) for one in shards.locations]
    versions = [[name, s.size, s.version] for name, s in zip(names, shards.fingerprints, strict=True)]
    identity = {"kind": kind, "files": json.dumps(versions)}
    place = _place(names, kind) if all(one.version for one in shards.fingerprints) else None
    if place and (found := _load(place, identity)) is not None:
        return found
    arrays = {name: np.ascontiguousarray(array) for name, array in build().items()}
    if [fingerprint_of(one) for one in shards.locations] != shards.fingerprints:
        raise DataError(f"{names[0]} or others changed while being indexed; start again when complete")
    if place:
        with contextlib.suppress(DataError, OSError):
            with replacing(place) as temporary:
                temporary.touch(0o600)
                temporary.write_bytes(save(arrays, {**identity, "crc32": _crc(arrays)}))
            if (found := _load(place, identity)) is not None:
                return found
    return arrays


def _place(names: Sequence[str], kind: str) -> Path | None:
    what, _, options = kind.partition(" ")
    text = "\n".join([*names, options]).encode("utf-8", "surrogateescape")
    with contextlib.suppress(DataError, OSError):
        name = f"{hashlib.sha256(text).hexdigest()[:32]}.{base_name(names[0])[:40]}.{what}"
        return cache_folder("index") / name
    return None


def _load(path: Path, identity: dict[str, str]) -> dict[str, np.ndarray] | None:
    """Return the arrays of an index file, or None if it is missing, outdated, damaged or of another user."""
    try:
        about, arrays, owner = _map(path)
        is_current = owner == os.geteuid() and about == {**identity, "crc32": _crc(arrays)}
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
    for name, values in sorted(arrays.items()):
        crc = crc32(f"{name} {values.dtype.str} {values.shape}".encode(), crc)
        crc = crc32(values.reshape(-1).view(np.uint8).data, crc)
    return str(crc)
