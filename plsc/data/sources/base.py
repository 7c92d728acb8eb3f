"""The protocol of all sources, and what the sources that read stored images share."""

from __future__ import annotations

import itertools
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from plsc.data.decode import MAX_FILE_BYTES, Image
from plsc.data.native import read_files, read_ranges
from plsc.errors import DataError
from plsc.storage.blocks import Bytes, LocalBytes

# Opening a named pipe without a writer would wait for ever; O_NONBLOCK does not.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


class Source(Protocol):
    """An indexed set of labelled images. It must be picklable: worker processes get a copy."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image, int]:
        """Return the image, encoded or not, and its label; DataError if it cannot be read."""
        ...

    def name(self, index: int) -> str:
        """Return where the sample is, for messages: ``images/a.jpg (label.txt:12)``."""
        ...

    def labels(self) -> np.ndarray:
        """Return all labels, int64 [N], if possible without reading the images."""
        ...


class IndexedSource:
    """A source whose labels are known; the base of those that read something stored for a sample.

    A format gives `name` and `_stored_at`, or `_image_at`; and `_stored_many`, if it can read many at once.
    class_names: the sorted names whose ranks are the labels; None if labels are numbers, or a label map gives
    them.
    """

    _labels: np.ndarray  # int64 [N]
    class_names: list[str] | None = None

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        if not 0 <= index < len(self._labels):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        try:
            return self._image_at(index), self._labels.item(index)
        except DataError as error:
            raise error.at(self.name(index)) from error

    def read_many(self, indices: np.ndarray) -> Iterator[tuple[bytes, int] | None]:
        """Yield what ``self[index]`` gives for each index, int64 [n], read by far fewer calls.

        None stands for a sample that has to be asked for by its index: that gives it, or says its fault.
        """
        labels = self._labels[indices].tolist()
        for label, stored in zip(labels, self._stored_many(indices), strict=False):
            try:
                yield None if stored is None else (self._image_in(stored), label)
            except DataError:
                yield None

    def name(self, index: int) -> str:
        """Return where the sample is, for messages."""
        raise NotImplementedError

    def labels(self) -> np.ndarray:
        """Return all labels, int64 [N]."""
        return self._labels

    def renumber(self, numbers: np.ndarray) -> None:
        """Give the samples of each label, as it is now, another one; numbers: int64 [labels]."""
        self._labels = numbers[self._labels]

    def _image_at(self, index: int) -> bytes:
        """Return the encoded image; DataError, which need not name the sample, if it cannot be had."""
        return self._image_in(self._stored_at(index))

    def _stored_at(self, index: int) -> bytes:
        """Return what is stored for a sample."""
        raise NotImplementedError

    def _stored_many(self, indices: np.ndarray) -> Iterator[bytes | None]:
        """Yield what is stored for each sample; None for what cannot be read together with others."""
        return itertools.repeat(None)

    def _image_in(self, stored: bytes) -> bytes:
        """Return the image in what is stored."""
        return stored


class FileSource(IndexedSource):
    """Image files below one folder, with a label each; the base of the sources that read files."""

    def __init__(self, root: Path, paths: PathTable, labels: np.ndarray) -> None:
        self.root = root
        self._root = os.fsencode(root)
        self._paths = paths
        self._labels = labels

    def _stored_at(self, index: int) -> bytes:
        return read_image_file(os.path.join(self._root, self._paths[index]))  # noqa: PTH118 - a hot path

    def _stored_many(self, indices: np.ndarray) -> Iterator[bytes | None]:
        return read_files(self._root, *self._paths.arrays(), indices)

    def path(self, index: int) -> Path:
        """Return the path of the image file."""
        return self.root / os.fsdecode(self._paths[index])

    def name(self, index: int) -> str:
        """Return the path below the folder."""
        return printable(self._paths[index])


def read_image_file(path: bytes | str | Path) -> bytes:
    """Return a file's bytes; DataError if it is missing, not a plain file, empty, or over 64 MiB.

    The size is asked first, so that a huge (or sparse) file is never read.
    """
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
        try:
            return _read_whole(descriptor)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise DataError(
            "the image file is missing; add it or take its entry out", kind="missing"
        ) from None
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror}); check the file") from error


def _read_whole(descriptor: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise DataError("is not a plain file; expected an image file")
    if status.st_size > MAX_FILE_BYTES:
        raise DataError(
            f"is {status.st_size} bytes, over the limit of {MAX_FILE_BYTES}; shrink it",
            kind="too large",
        )
    data = os.read(descriptor, status.st_size)
    while len(data) < status.st_size:  # a signal, or a network file system, may cut a read short
        more = os.read(descriptor, status.st_size - len(data))
        if not more:
            break
        data += more
    if not data:
        raise DataError("is empty (0 bytes); replace the file or take it out", kind="empty")
    return data


def check_labels(source: Source, class_num: int) -> None:
    """Raise DataError naming the first sample whose label is outside 0..class_num - 1."""
    labels = source.labels()
    bad = np.flatnonzero((labels < 0) | (labels >= class_num))
    if len(bad) == 0:
        return
    first = int(bad[0])
    advice = "fix the label"
    if labels.min() >= 0:
        advice = f"pass set_class_num({int(labels.max()) + 1}) or fix the line"
    raise DataError(
        f"label {labels[first]} at {source.name(first)} is outside 0..{class_num - 1} "
        f"({len(bad)} of {len(labels)} samples are); {advice}"
    )


def check_image_bytes(length: int) -> None:
    """Raise DataError, without the sample's name, for an image of 0 bytes or of over 64 MiB."""
    if length <= 0:
        raise DataError("the image is empty (0 bytes); replace it or take it out", kind="empty")
    if length > MAX_FILE_BYTES:
        raise DataError(
            f"the image has {length} bytes, over the limit of {MAX_FILE_BYTES}; shrink it",
            kind="too large",
        )


def read_from(
    files: Sequence[Bytes], offsets: np.ndarray, lengths: np.ndarray
) -> Iterator[bytes | None]:
    """Yield lengths[i] bytes at offsets[i] of files[i]; None for what is remote, or cannot be read so.

    The files stay open for as long as values come.
    """
    numbers = [file.fileno() if isinstance(file, LocalBytes) else -1 for file in files]
    yield from read_ranges(np.array(numbers, np.int32), offsets, lengths)


class PathTable:
    """A list of paths as one run of bytes and its offsets.

    Ten million paths as Python strings take over a gigabyte, and reading them in forked workers
    copies that memory again, because each use writes a reference count. Here they take their own
    length plus eight bytes each, and reading writes nothing.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("q", [0])

    def append(self, path: bytes) -> None:
        """Add a path at the end."""
        self._text += path
        self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of all paths, uint8, and where each ends in them, int64 [paths + 1], from 0.

        They are the table's own memory: nothing can be added to it while they are in use.
        """
        return np.frombuffer(self._text, np.uint8), np.frombuffer(self._ends, np.int64)

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._text[self._ends[index] : self._ends[index + 1]])


def printable(text: bytes | str) -> str:
    """Return a path as one line of text that any terminal can show."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
