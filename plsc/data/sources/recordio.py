"""RecordIO files of images, ``.rec`` with or without its ``.idx``, also in insightface's layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plsc.data.recordio import image_of, unframe
from plsc.data.sources.base import IndexedSource
from plsc.data.sources.index_store import load_or_build
from plsc.data.sources.limits import check_image_bytes
from plsc.data.sources.ranges import read_from
from plsc.data.sources.recordio_index import insightface_images, read_idx, scan
from plsc.errors import DataError
from plsc.storage.blocks import open_bytes
from plsc.storage.urls import base_name, exists, shown


class RecordIOSource(IndexedSource):
    """Images of a ``.rec`` file: a local path or an fsspec URL.

    The order is that of the ``.idx`` beside it, or of the file when there is none. A record with several
    labels has the first as its class. In insightface's layout record 0 holds no image but the number of
    the first record that is none; the records from there on, one a person, are left out.

    The file is read through once, to find records and labels; the index is kept (`index_store`). Raises
    DataError that names the record for a file that is damaged, truncated, or no RecordIO, for an .idx that
    does not fit it, and for a label that is no whole number of 0 or more.
    """

    def __init__(self, location: str | Path) -> None:
        self.location = str(location)
        self._title = base_name(shown(self.location))
        self._data = open_bytes(self.location)
        idx = self.location.removesuffix(".rec") + ".idx"
        files = [self.location, idx] if exists(idx) else [self.location]
        index = load_or_build(files, "recordio-1", lambda: self._build(files))
        self._offsets, self._lengths = index["offsets"], index["lengths"]
        self._labels, self._keys = index["labels"], index["keys"]

    def name(self, index: int) -> str:
        """Return ``train.rec record 12``, with the number from the .idx where there is one."""
        return f"{self._title} record {self._keys[index]}"

    def _stored_at(self, index: int) -> bytes:
        length = self._lengths.item(index)
        check_image_bytes(length)
        return self._data.read_at(self._offsets.item(index), length)

    def _stored_many(self, indices: np.ndarray) -> Iterator[bytes | None]:
        return read_from(
            [self._data] * len(indices), self._offsets[indices], self._lengths[indices]
        )

    def _image_in(self, stored: bytes) -> bytes:
        return image_of(unframe(stored))

    def _build(self, files: list[str]) -> dict[str, np.ndarray]:
        records = scan(self._data)
        if len(files) > 1:
            keys, rows = read_idx(open_bytes(files[1]), records.offsets)
        else:
            keys = rows = np.arange(len(records.offsets))
        chosen = insightface_images(records, keys, rows, shown(self.location))
        if chosen is not None:
            keys, rows = keys[chosen], rows[chosen]
        if len(rows) == 0:
            raise DataError(f"{shown(self.location)} holds no image records")
        labels = records.labels[rows]
        bad = np.flatnonzero(~((labels >= 0) & (labels == np.floor(labels)) & (labels < 2**62)))
        if len(bad):
            raise DataError(
                f"{shown(self.location)} record {keys[bad[0]]}: the label is {labels[bad[0]]:g} "
                f"({len(bad)} such records); expected a whole number of 0 or more"
            )
        return {
            "offsets": records.offsets[rows],
            "lengths": records.lengths[rows],
            "labels": labels.astype(np.int64),
            "keys": keys.astype(np.int64),
        }
