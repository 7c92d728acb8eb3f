"""Lines of ``<base64>TAB<label>`` in any number of files: the parts of a partition, or any list."""

from __future__ import annotations

import binascii
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pybase64

from plsc.data.file_list import read_file_list
from plsc.data.lines import Buffers, LineReader
from plsc.data.sources.base import IndexedSource
from plsc.data.sources.index_store import load_or_build
from plsc.data.sources.shards import Shards
from plsc.errors import DataError
from plsc.storage.blocks import BytesFile
from plsc.storage.urls import base_name, shown

KIND = "base64-1"
_BLOCK = 4 * 2**20
_COMPRESSED = (".gz", ".zst")


class Base64Source(IndexedSource):
    """The samples of the files that ``file_list`` names, in its order: a local folder or an fsspec URL.

    ``files``: their paths or URLs, instead of what the list names.

    All files are read through once, to find the lines and their labels; the index is kept (`index_store`).
    Blank lines are passed over, `blank_lines` counts them. Raises DataError that names file and line for a
    line without a label, or with one that is not a whole number of 0 or more, and, when a sample is read, for
    one that is not base64. Compressed files have no random access: `plsc data partition` reads them.
    """

    def __init__(
        self,
        data_dir: str | Path,
        file_list: str = "file_list.txt",
        files: Sequence[str] | None = None,
    ) -> None:
        self.locations = list(files) if files else read_file_list(data_dir, file_list)
        for location in self.locations:
            if location.lower().endswith(_COMPRESSED):
                raise DataError(
                    f"{shown(location)} is compressed, its lines cannot be read in any order; unpack it, or "
                    "run plsc data partition, which reads it and writes plain parts"
                )
        self._files = Shards(self.locations)
        index = load_or_build(self.locations, KIND, self._build)
        self._starts, self._lengths, self._labels = (
            index["starts"],
            index["lengths"],
            index["labels"],
        )
        self._firsts: list[int] = index["firsts"].tolist()
        self._blanks, self._first_blanks = index["blanks"], index["first_blanks"]

    def name(self, index: int) -> str:
        """Return ``part_3.txt:12``: the file and the line."""
        file = self._file(index)
        low, high = self._first_blanks[file : file + 2].tolist()
        before = int(np.searchsorted(self._blanks[low:high], index, side="right"))
        line = index - self._firsts[file] + before + 1
        return f"{base_name(shown(self.locations[file]))}:{line}"

    @property
    def blank_lines(self) -> int:
        """How many lines were passed over."""
        return len(self._blanks)

    @property
    def lines_per_file(self) -> np.ndarray:
        """Samples of each file, int64: what ranks that read a part each must agree on."""
        return np.diff(self._firsts)

    def _stored_at(self, index: int) -> bytes:
        file = self._files[self._file(index)]
        return file.read_at(self._starts.item(index), self._lengths.item(index))

    def _stored_many(self, indices: np.ndarray) -> Iterator[bytes | None]:
        shards = np.searchsorted(self._firsts, indices, side="right") - 1
        return self._files.read_many(shards, self._starts[indices], self._lengths[indices])

    def _image_in(self, stored: bytes) -> bytes:
        try:  # the checking decoder is the fast one
            return pybase64.b64decode(stored, validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(
                f"the text before the tab is not base64 ({error}); fix the line", kind="base64"
            ) from None

    def _file(self, index: int) -> int:
        return bisect_right(self._firsts, index) - 1

    def _build(self) -> dict[str, np.ndarray]:
        """Read all files: places and lengths of the base64, labels, and where blank lines were left out."""
        builder = _Builder()
        for number, location in enumerate(self.locations):
            builder.read(BytesFile(self._files[number]), base_name(shown(location)))
        if not builder.firsts[-1]:
            raise DataError(
                f"the files of {shown(self.locations[0])} and others hold no samples; expected lines of "
                "'<base64>TAB<label>'"
            )
        return builder.arrays()


class _Builder:
    """Collects the index of one file after another. `blanks` are the samples before each blank line."""

    def __init__(self) -> None:
        self._starts, self._lengths, self._labels = [], [], []  # type: ignore[var-annotated]
        self._blanks: list[np.ndarray] = []
        self.firsts, self.first_blanks = [0], [0]
        self._buffers = Buffers(1, _BLOCK)

    def read(self, stream: BytesFile, name: str) -> None:
        """Add a file."""
        reader = LineReader(stream, name, self._buffers)
        count, blanks, last_line = self.firsts[-1], self.first_blanks[-1], 0
        for lines in reader:
            starts, tabs = lines.starts + reader.base, lines.tabs + reader.base
            labels, numbers = lines.labels, lines.numbers
            self._buffers.give_back(lines.data)
            self._starts.append(starts)
            self._lengths.append((tabs - starts).astype(np.uint32))
            self._labels.append(labels)
            # Where the line number grows by more than one, blank lines lie before the sample.
            gaps = np.diff(numbers, prepend=last_line) - 1
            self._blanks.append(np.repeat(np.arange(count, count + len(starts)), gaps))
            blanks += int(gaps.sum())
            last_line = int(numbers[-1]) if len(numbers) else last_line
            count += len(starts)
        behind = reader.blanks - (blanks - self.first_blanks[-1])
        self._blanks.append(np.full(behind, count))
        self.firsts.append(count)
        self.first_blanks.append(blanks + behind)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the index of all files that were read."""
        return {
            "starts": np.concatenate(self._starts),
            "lengths": np.concatenate(self._lengths),
            "labels": np.concatenate(self._labels),
            "firsts": np.array(self.firsts, dtype=np.int64),
            "blanks": np.concatenate(self._blanks).astype(np.int64),
            "first_blanks": np.array(self.first_blanks, dtype=np.int64),
        }
