"""Find the files of a dataset: one file, a pattern, a folder of shards, or file_list.txt; and read them."""

from __future__ import annotations

import glob
import os
import posixpath
import re
import threading
import unicodedata
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.native import read_ranges
from plsc.errors import DataError, naming
from plsc.storage.blocks import Bytes, LocalBytes, open_bytes, streamed, text_lines
from plsc.storage.regular import check_inside
from plsc.storage.retry import with_retries
from plsc.storage.urls import base_name, exists, is_url, join, local_path, located, open_filesystem, shown

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_SHARDS = 1_000_000
_MOST_OPEN = 64
_MAX_LINE_BYTES = 8192  # of a file_list.txt
_LONG_NAME = 1024
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
        files = _numbered(location, found)
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


def _numbered(location: str, found: re.Match[str]) -> list[str]:
    first, last = int(found[1]), int(found[2])
    last = min(last, first + _MAX_SHARDS)
    width = len(found[1])
    before, after = location[: found.start()], location[found.end() :]
    return [f"{before}{number:0{width}d}{after}" for number in range(first, last + 1)]


def _matching(pattern: str) -> list[str]:
    if not is_url(pattern):
        return glob.glob(pattern)  # noqa: PTH207 - the pattern may be absolute
    filesystem, inside = open_filesystem(pattern)
    found = with_retries(lambda: filesystem.glob(inside), f"{shown(pattern)} cannot be listed")
    return [filesystem.unstrip_protocol(name) for name in found]


def _is_folder(location: str) -> bool:
    if not is_url(location):
        return Path(location).is_dir()
    filesystem, inside = open_filesystem(location)
    return with_retries(lambda: bool(filesystem.isdir(inside)), f"{shown(location)} cannot be looked up")


def read_file_list(
    data_dir: str | Path,
    file_list: str = "file_list.txt",
    allowed: Sequence[str] = (),
    *,
    must_exist: bool = True,
) -> list[str]:
    """Return the paths or URLs of the files that `file_list` names, in its order.

    A line is one location, which may contain blanks, relative to `data_dir` (`located`). Surrounding blanks,
    blank lines, CRLF and a byte order mark are accepted.

    Args:
        data_dir: local folder or fsspec URL.
        file_list: name in `data_dir`, or a path or URL.
        allowed: as of `located`.
        must_exist: check that each file exists.

    Raises:
        DataError: the list is missing, empty, too long, or names a file twice or a missing file.
    """
    data_dir = local_path(str(data_dir))
    listing = _below(data_dir, file_list)
    folder = None if "/" in file_list else data_dir
    if not is_url(file_list) and not is_url(listing) and not os.path.exists(listing):  # noqa: PTH110
        if not os.path.exists(file_list):  # noqa: PTH110 - False for a name that is too long
            raise DataError(
                f"{listing} does not exist; create it, with the name of one data file per line, or convert "
                "the dataset with plsc data convert"
            )
        listing, folder = file_list, None
    paths: dict[str, None] = {}
    with streamed(listing, folder) as file:
        for number, _, line in text_lines(file, shown(listing), _MAX_LINE_BYTES):
            if not (name := line.decode("utf-8", "surrogateescape").strip()):
                continue
            with naming("{}:{}".format, shown(listing), number):
                path = _below(data_dir, located(name, data_dir, allowed, listing))
                check_inside(path, data_dir)
                if path in paths or (must_exist and not exists(path)):
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


def folder_of(location: str, data_dir: str) -> str | None:
    """Return the folder that links of a listed file must not leave: `data_dir`; None for others and URLs."""
    folder = local_path(data_dir)
    return folder if location.startswith(join(folder, "")) and not is_url(folder) else None


def _below(folder: str, name: str) -> str:
    return name if is_url(name) else posixpath.join(folder, name)


class Shards:
    """Many files, of which the 64 last used are open. Thread-safe and picklable.

    data_dir: folder of the list that names the files, as of `folder_of`.
    """

    def __init__(self, locations: Sequence[str], data_dir: str | None = None) -> None:
        self.locations, self._data_dir = list(locations), data_dir
        self._open: OrderedDict[int, Bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, shard: int) -> Bytes:
        """Return the bytes of a file; DataError if it is missing."""
        with self._lock:
            found = self._open.get(shard)
            if found is None:
                location, data_dir = self.locations[shard], self._data_dir
                folder = None if data_dir is None else folder_of(location, data_dir)
                found = self._open[shard] = open_bytes(location, folder)
                if len(self._open) > _MOST_OPEN:  # a thread that still reads the file keeps it open
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(shard)
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
        return {"locations": self.locations, "data_dir": self._data_dir}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class PathTable:
    """A list of paths as one byte array with offsets.

    Ten million paths as Python strings take over a gigabyte, and reading them in forked workers copies that
    memory, because each use writes a reference count. Here each path takes its length plus eight bytes, and
    reading writes nothing.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("q", [0])

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
