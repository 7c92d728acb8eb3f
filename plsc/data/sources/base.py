"""The protocol of all sources, the bases of those that read stored images, Datasets of torch, and a cache."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import posixpath
import re
import tempfile
import threading
import traceback
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch

from plsc.data.alignment import Landmarks
from plsc.data.class_names import ClassNames
from plsc.data.decode import (
    IMAGE_SUFFIXES,
    MAX_FILE_BYTES,
    Image,
    ImageShape,
    check_image_bytes,
    decode_into,
)
from plsc.data.files import PathTable, Shards
from plsc.data.native import read_files
from plsc.errors import DataError, add_note, naming, printable
from plsc.storage.disk import open_regular
from plsc.storage.urls import (
    base_name,
    is_url,
    open_filesystem,
    parent_of,
    place_of,
    shown,
    unique_name,
    with_retries,
)

IMAGE_START = re.compile(  # strict, because a list must not publish a private text file
    rb"\xff\xd8\xff|\x89PNG|GIF8|BM.{13}\0{3}|II\*\0|MM\0\*|RIFF.{4}WEBP|P[1-6]\s|....ftyp", re.DOTALL
)

logger = logging.getLogger(__name__)


class Source(Protocol):
    """An indexed dataset of labelled images. It must be picklable: worker processes get a copy."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image, int]:
        """Return the image, encoded or decoded, and its label; DataError if it cannot be read."""
        ...

    def name(self, index: int) -> str:
        """Return the location of the sample for messages, such as ``images/a.jpg (label.txt:12)``."""
        ...

    def labels(self) -> np.ndarray:
        """Return all labels, int64 [N], if possible without reading the images."""
        ...


class IndexedSource:
    """Base of sources with known labels and stored samples.

    A format implements `name`, and sets `_files`, `_offsets` and `_lengths`, which locate the samples (and
    implements `_file_numbers` if there are several files); or it implements `_stored_at`. `_image_in`
    extracts the image from the stored bytes.

    class_names: the name of each label from 0; None if labels are only numbers, or come from a label map.
    """

    _labels: np.ndarray  # int64 [N]
    _files: Shards
    _offsets: np.ndarray  # int64 [N], in bytes, as are _lengths
    _lengths: np.ndarray
    _most_stored = MAX_FILE_BYTES
    class_names: dict[int, str] | None = None

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        label = self._labels.item(index)  # IndexError after the last
        return self._image_at(index, None), label

    def read_many(self, indices: np.ndarray) -> Iterator[tuple[Image, int] | DataError]:
        """Yield ``self[index]``, or its error, for each index, int64 [n], with far fewer system calls."""
        labels = self._labels[indices].tolist()
        for index, label, stored in zip(indices.tolist(), labels, self._stored_many(indices), strict=False):
            result: tuple[Image, int] | DataError
            try:
                result = self._image_at(index, stored), label
            except DataError as error:
                result = error
            yield result

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the location of the sample for messages."""

    def labels(self) -> np.ndarray:
        """Return all labels, int64 [N]."""
        return self._labels

    def renumber(self, numbers: np.ndarray) -> None:
        """Replace each label by ``numbers[label]``; numbers: int64 [labels]."""
        self._labels = numbers[self._labels]

    def _image_at(self, index: int, stored: bytes | None) -> Image:
        """Return the image of a sample; DataError, which names it, if it cannot be read.

        stored: its stored bytes, if they have been read already.
        """
        with naming(self.name, index):
            image = self._image_in(self._stored_at(index) if stored is None else stored)
            check_image_bytes(len(image))
        return image

    def _stored_at(self, index: int) -> bytes:
        """Return the stored bytes of a sample; DataError, which need not name it, if they cannot be read."""
        file, length = self._file_numbers(np.array([index])).item(), self._lengths.item(index)
        if length > self._most_stored:
            check_image_bytes(length)  # before memory is allocated
        return self._files[file].read_at(self._offsets.item(index), length)

    def _stored_many(self, indices: np.ndarray) -> Iterator[bytes | None]:
        """Yield the stored bytes of each sample; None for those that only `_stored_at` reads or reports."""
        if not hasattr(self, "_files"):
            return itertools.repeat(None)
        files = self._file_numbers(indices)
        return self._files.read_many(files, self._offsets[indices], self._lengths[indices])

    def _file_numbers(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of the file that contains each sample, int64 [n]."""
        return np.zeros(len(indices), np.int64)

    def _image_in(self, stored: bytes) -> bytes:
        return stored


class FileSource(IndexedSource):
    """Base of sources of image files below one folder or URL, each with a label.

    Links must not lead out of the folder, unless `may_leave`: the user has listed the files.
    With landmarks (`add_landmarks`), images are `plsc.data.alignment.Face`: they are aligned when decoded.
    """

    landmarks: Landmarks | None = None

    def __init__(
        self, root: Path | str, paths: PathTable, labels: np.ndarray, may_leave: bool = False
    ) -> None:
        self.root = root  # a string if it is a URL
        self._root = os.fsencode(root if isinstance(root, str) else root.resolve())
        self._folder = None if may_leave else self._root
        self._paths = paths
        self._labels = labels

    def add_landmarks(self, location: str | None, folder: str | None = None) -> None:
        """Align the images by a landmarks file, `Landmarks`, with paths as in this source; None: do nothing.

        folder: the folder of a relative `location`; by default that of the images.
        """
        if location is not None:
            self.landmarks = Landmarks(place_of(folder or str(self.root), location), self._paths)

    def check_landmarks(self) -> None:
        """Raise DataError if there is a landmarks file that lacks some of the images."""
        missing = [] if self.landmarks is None else self.landmarks.missing().tolist()
        if missing:
            raise DataError(
                f"{len(missing):,} of {len(self):,} images have no line in the landmarks file, such as "
                f"{self.name(missing[0])}"
            )

    def _image_at(self, index: int, stored: bytes | None) -> Image:
        image = super()._image_at(index, stored)
        if self.landmarks is None or not isinstance(image, bytes):
            return image
        with naming(self.name, index):
            return self.landmarks.face(index, image)

    def _stored_at(self, index: int) -> bytes:
        return read_image(os.fsdecode(self._paths[index]), os.fsdecode(self._root), self._folder)

    def _stored_many(self, indices: np.ndarray) -> Iterator[bytes | None]:
        if isinstance(self.root, str):
            return itertools.repeat(None)
        return read_files(self._root, *self._paths.arrays(), indices, may_leave=self._folder is None)

    def paths(self) -> list[str]:
        """Return the path of each image below `root`, normalised."""
        names = (os.fsdecode(self._paths[index]) for index in range(len(self)))
        return [name if is_url(name) else posixpath.normpath(name) for name in names]

    def path(self, index: int) -> str:
        """Return the path or URL of the image file."""
        return place_of(str(self.root), os.fsdecode(self._paths[index]))

    def name(self, index: int) -> str:
        """Return the path below the folder; of a URL, `unique_name`."""
        return unique_name(printable(self._paths[index]))


def read_image(name: str, root: str = "", folder: bytes | str | None = None) -> bytes:
    """Return the bytes of an image below `root`, at an absolute path or at a URL (`located`).

    folder: that which links in a path below `root` must not leave. Raises DataError if it cannot be read.
    """
    if is_url(name):
        root, name = parent_of(name), base_name(name)
    if name.startswith("/") or not is_url(root):
        image = read_image_file(posixpath.join(root, name), None if name.startswith("/") else folder)
        if name.startswith("/"):
            check_start(image)
        return image
    filesystem, inside = open_filesystem(root)  # without the name, which may look like a chain

    def read() -> bytes | None:
        try:
            return bytes(filesystem.cat_file(posixpath.join(inside, name), start=0, end=MAX_FILE_BYTES + 1))
        except FileNotFoundError:
            return None

    found = with_retries(read, f"{shown(root)}: the image cannot be read")
    if found is None:
        raise DataError(f"the image file is missing; add {name} or remove its entry", kind="missing")
    return found


def check_start(image: bytes) -> None:
    """Raise DataError unless a file starts as images do: an error must not show private text of others."""
    if not IMAGE_START.match(image):
        raise DataError("the file is not an image", kind="undecodable")


def read_image_file(path: bytes | str | Path, folder: bytes | str | None) -> bytes:
    """Return a file's bytes; DataError if it is missing, empty, over 64 MiB, or refused by `open_regular`.

    The size is checked first, so that a huge (or sparse) file is never read.
    """
    try:
        with open_regular(path, folder, buffering=0) as file:
            check_image_bytes(os.fstat(file.fileno()).st_size)
            data: bytes = file.readall()
            return data
    except OSError as error:
        kind = "missing" if isinstance(error, FileNotFoundError) else "unreadable"
        place = printable(path if isinstance(path, bytes) else str(path))[:1000]
        raise DataError(f"the image file {place} is {kind}: {error.strerror}", kind=kind) from error


def check_labels(source: Source, class_num: int) -> None:
    """Raise DataError naming the first sample whose label is outside 0..class_num - 1."""
    labels = source.labels()
    bad = np.flatnonzero((labels < 0) | (labels >= class_num))
    if len(bad) == 0:
        return
    first = int(bad[0])
    raise DataError(
        f"label {labels[first]} at {source.name(first)} is outside 0..{class_num - 1} ({len(bad)} of "
        f"{len(labels)} samples are); fix it, or set head.class_num to {labels.max() + 1}"
    )


def class_names_of(source: Source) -> ClassNames | None:
    """Return the class names of a source whose labels have names; None if labels are only numbers."""
    names = getattr(source, "class_names", None)
    return None if names is None else ClassNames.of([*names.values()])


class Ignored:
    """Counts what a listing of images leaves out: hidden names, and files of types that are not read."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}  # by kind: a number and an example
        self._last = ""

    def add(self, path: str, kind: str | None = None) -> None:
        """Count a path, of a kind; by default its suffix. A path that repeats the last one is not counted."""
        kind = kind or posixpath.splitext(path)[1].lower() or "without a suffix"
        count, example = self._found.get(kind, (0, path))
        self._found[kind] = count + (path != self._last), example
        self._last = path

    def __str__(self) -> str:
        found = sorted(self._found.items(), key=lambda item: -item[1][0])
        told = [f"{count:,} {kind} (such as {printable(example)})" for kind, (count, example) in found[:5]]
        if others := sum(count for _, (count, _) in found[5:]):
            told.append(f"{others:,} others")
        return f"not read as images: {', '.join(told)}" if told else ""

    def report(self, where: str) -> None:
        """Log what was left out, such as ``12 .heic (such as a/1.heic), 1 hidden (such as __MACOSX)``."""
        if self._found and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
            logger.warning(f"{shown(where)}: {self}")


def is_image(name: str) -> bool:
    """Return whether a name has the suffix of an image type that can be decoded."""
    return name.lower().endswith(IMAGE_SUFFIXES)


# Datasets of torch.


class TorchDatasetSource:
    """Wrap a dataset with ``len()`` and ``[index] -> (image, label)``.

    The image is a Pillow image, a uint8 array [H, W, C], or a tensor [C, H, W], uint8 or float (taken as
    normalised). Anything else raises DataError. An OSError, which image loaders raise for a bad file, becomes
    a DataError with the line of the dataset's code. Other exceptions are bugs of the dataset; they are raised
    with a note that names the sample.
    """

    def __init__(self, dataset: Any, title: str = "dataset") -> None:
        self.dataset = dataset
        self.title = title
        self._labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        try:
            item = self.dataset[index]
        except OSError as error:
            reason = " ".join(str(error).split())
            place = _place_in_dataset(error)
            raise DataError(f"{self.name(index)}: cannot be read ({reason}){place}") from error
        except Exception as error:
            add_note(error, f"while reading {self.name(index)}")
            raise
        if not isinstance(item, (tuple, list)) or len(item) != 2:  # a dictionary, say
            raise DataError(f"{self.name(index)}: expected (image, label), got {type(item).__name__}")
        return item[0], whole_number(item[1], self.name(index))

    def name(self, index: int) -> str:
        """Return ``dataset[12]``."""
        return f"{self.title}[{index}]"

    def labels(self) -> np.ndarray:
        """Return all labels, int64 [N].

        Taken from the dataset's ``targets`` or ``labels`` if that is a flat list of N integers and no
        ``target_transform`` changes them. Otherwise every item is read once, including its image, which takes
        as long as an epoch; the result is cached.
        """
        if self._labels is None:
            self._labels = self._declared_labels()
        if self._labels is None:
            numbers = (self[index][1] for index in range(len(self)))
            self._labels = np.fromiter(numbers, dtype=np.int64, count=len(self))
        return self._labels

    def _declared_labels(self) -> np.ndarray | None:
        if getattr(self.dataset, "target_transform", None) is not None:
            return None
        for attribute in ("targets", "labels"):
            declared = getattr(self.dataset, attribute, None)
            if declared is None or callable(declared):
                continue
            try:
                values = np.asarray(declared)
            except (ValueError, TypeError, RuntimeError):
                continue
            if values.shape == (len(self),) and np.issubdtype(values.dtype, np.integer):
                return values.astype(np.int64)
        return None


def whole_number(label: Any, name: str) -> int:
    """Return a label as an integer; DataError, with the sample's name, if it is not one."""
    try:
        return operator.index(label)  # accepts int, numpy integer, integer tensor of one element
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"{name}: the label must be an integer, got {type(label).__name__}", kind="label"
        ) from None


def _place_in_dataset(error: Exception) -> str:
    """Return the location in the dataset's code, because the user does not see the traceback."""
    frames = traceback.extract_tb(error.__traceback__)[1:2]  # the first frame is in plsc
    return "".join(f" at {frame.filename}:{frame.lineno}" for frame in frames)


class SampleCache:
    """Cache bytes by sample index in an unnamed file, which disappears when the process ends for any reason.

    It is in `folder`, or with None in memory. It takes at most `limit` bytes, and 16 bytes of memory per
    sample. When the disk is full, no more samples are added. Thread-safe. Entries are never evicted: every
    epoch reads every sample once in a new order, so all are equally useful.
    """

    def __init__(self, folder: Path | None, limit: int, num_samples: int) -> None:
        if folder is None:
            self._file: IO[bytes] = os.fdopen(os.memfd_create("plsc-cache"), "w+b")
        else:
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

    def __init__(self, source: Source, cache: SampleCache, image_shape: ImageShape, decoded: bool) -> None:
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
