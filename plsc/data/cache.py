"""Cache samples in memory or on a local disk, up to a limit, as they are first read.

Entries are never evicted: every epoch reads every sample once in a new order, so all are equally useful.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import numpy as np

from plsc.data.decode import Image, ImageShape, decode_into
from plsc.data.sources.base import Source
from plsc.errors import naming

_ENTRY_BYTES = 150  # largest overhead of a dict entry and a bytes object


class MemoryCache:
    """Cache bytes by sample index in this process; `limit` includes the overhead of Python objects.

    This class and `DiskCache` are thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._entries: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def get(self, index: int) -> bytes | None:
        """Return the bytes, or None if they are not cached."""
        return self._entries.get(index)

    def put(self, index: int, data: bytes) -> None:
        """Cache the bytes if the limit allows it."""
        needed = len(data) + _ENTRY_BYTES
        with self._lock:
            if index not in self._entries and self.used + needed <= self.limit:
                self._entries[index] = data
                self.used += needed


class DiskCache:
    """Cache samples in an unnamed file in `folder`, which disappears when the process ends for any reason.

    It takes at most `limit` bytes of disk, and 16 bytes of memory per sample. When the disk is full, no more
    samples are added.
    """

    def __init__(self, folder: Path, limit: int, num_samples: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as this
        self.limit = limit
        self.used = 0
        # Zero pages take no memory until they are written to.
        self._ends = np.zeros(num_samples, dtype=np.int64)  # 0: not cached
        self._lengths = np.zeros(num_samples, dtype=np.int64)
        self._lock = threading.Lock()

    def get(self, index: int) -> bytes | None:
        """Return the bytes, or None if they are not cached."""
        end = int(self._ends[index])
        if not end:
            return None
        length = int(self._lengths[index])
        try:
            data = os.pread(self._file.fileno(), length, end - length)
        except OSError:
            return None
        return data if len(data) == length else None

    def put(self, index: int, data: bytes) -> None:
        """Cache the bytes if the limit and the disk allow it."""
        with self._lock:
            if self._ends[index] or self.used + len(data) > self.limit:
                return
            start = self.used
            self.used += len(data)
        try:
            written = os.pwrite(self._file.fileno(), data, start)
        except OSError:
            written = -1
        if written != len(data):
            self.limit = 0
            return
        self._lengths[index] = len(data)
        self._ends[index] = start + len(data)  # written last: from now on `get` finds the entry


class CachedSource:
    """A source that reads each image from `source` once, while the cache has room.

    With ``decoded`` the cache holds pixels at the network's size, otherwise encoded bytes. Images that are
    neither encoded nor uint8 after decoding are not cached.
    """

    def __init__(
        self, source: Source, cache: MemoryCache | DiskCache, image_shape: ImageShape, decoded: bool
    ) -> None:
        self.source = source
        self.cache = cache
        self._labels = source.labels()
        self._decoded = decoded
        channels, height, width = image_shape
        self._size = (height, width, channels)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        kept = self.cache.get(index)
        if kept is not None:
            label = int(self._labels[index])
            if not self._decoded:
                return kept, label
            return np.frombuffer(kept, dtype=np.uint8).reshape(self._size), label
        image, label = self.source[index]
        if self._decoded:
            image = self._decode(image, index)
        if isinstance(image, bytes):
            self.cache.put(index, image)
        return image, label

    def name(self, index: int) -> str:
        """Return the name of a sample in the source."""
        return self.source.name(index)

    def labels(self) -> np.ndarray:
        """Return all labels, int64 [N]."""
        return self._labels

    def _decode(self, image: Image, index: int) -> Image:
        pixels = np.empty(self._size, dtype=np.uint8)
        with naming(self.name, index):
            floats = decode_into(image, pixels)
        if floats is not None:
            return floats
        self.cache.put(index, pixels.tobytes())
        return pixels
