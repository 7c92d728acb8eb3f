"""Read LMDB environments with the keys ``num-samples``, ``image-000000001``.. and ``label-000000001``.."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from plsc.data.sources.columns import LabelReader, NamedLabelSource
from plsc.errors import DataError
from plsc.storage.blocks import streamed
from plsc.storage.urls import base_name
from plsc.version import install


class LmdbSource(NamedLabelSource):
    """A local LMDB folder or file, in the layout common for text recognition datasets.

    Keys count from 1, with 9 digits. Images are encoded. Labels are strings: integers, or class names as in
    `RowSource`. The lmdb library maps the file and does not validate it: unlike with other formats, a
    manipulated file can crash the process. Raises DataError for a missing entry, and if ``lmdb`` is not
    installed.
    """

    def __init__(self, location: str | Path, *, label_map: str | Path | None = None) -> None:
        self._path = Path(location)  # the library reads only local files
        file, folder = (self._path / "data.mdb", self._path) if self._path.is_dir() else (self._path, None)
        streamed(file, folder).close()  # LMDB would wait for a pipe, and follow links
        with self._begin() as transaction:
            text = transaction.get(b"num-samples") or b""
            entries = transaction.stat()["entries"]
            if not text.isdigit() or len(text) > 18 or not 0 < int(text) <= entries:
                raise DataError(
                    f"{location}: 'num-samples' is {text[:40]!r}, but there are {entries} entries; expected "
                    "the number of samples"
                )
            count = int(text)
            labels = LabelReader(names_wanted=label_map is not None)
            found = [transaction.get(b"label-%09d" % (i + 1)) or b"" for i in range(count)]
        labels.extend(found, lambda i: f"{location} label-{i + 1:09d}")
        self._set_labels(labels.arrays(), label_map)

    def name(self, index: int) -> str:
        """Return ``train.lmdb:image-000000013``."""
        return f"{base_name(str(self._path))}:image-{index + 1:09d}"

    def _stored_at(self, index: int) -> bytes:
        with self._begin() as transaction:
            image: bytes | None = transaction.get(b"image-%09d" % (index + 1))
        return image or b""

    def _begin(self) -> Any:
        return _environment(os.getpid(), str(self._path.absolute())).begin(buffers=False)


@functools.lru_cache(maxsize=16)
def _environment(process: int, path: str) -> Any:
    """Open an environment: the library allows one per process, and none inherited by a fork."""
    try:
        import lmdb
    except ImportError as error:
        raise DataError(f"{path} needs the package lmdb; run {install('lmdb')}") from error
    is_folder = Path(path).is_dir()
    return lmdb.open(path, subdir=is_folder, readonly=True, lock=False, readahead=False, create=False)
