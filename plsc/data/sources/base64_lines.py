"""Read lines of ``<base64>TAB<label>`` in any number of files, such as the parts of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from plsc.data.files import Shards, read_file_list
from plsc.data.lines import MAX_LINE_BYTES, Buffers, LineReader, decode_base64
from plsc.data.sources.base import IndexedSource
from plsc.data.sources.index_store import load_or_build
from plsc.errors import DataError
from plsc.storage.blocks import BytesFile
from plsc.storage.urls import base_name, shown

KIND = "base64-3"
_BLOCK = 4 * 2**20


class Base64Source(IndexedSource):
    """The samples of the files that ``file_list`` names, in its order, in a local folder or at an fsspec URL.

    All files are read once, to index the lines and labels; the index is stored (`index_store`). Blank lines
    are ignored. Compressed files have no random access; `plsc data partition` can read them.

    Args:
        files: paths or URLs to use instead of those in the list.
        allowed: as of `located`.

    Raises:
        DataError: names file and line of a missing label, a label that is not an integer of 0 or more, or,
            when a sample is read, invalid base64.
    """

    _most_stored = MAX_LINE_BYTES

    def __init__(
        self,
        data_dir: str | Path,
        file_list: str = "file_list.txt",
        files: Sequence[str] | None = None,
        *,
        allowed: Sequence[str] = (),
    ) -> None:
        self.locations = list(files) if files else read_file_list(data_dir, file_list, allowed=allowed)
        self._files = Shards(self.locations, str(data_dir))
        index = load_or_build(self.locations, KIND, self._build)
        self._offsets, self._lengths = index["offsets"], index["lengths"]
        self._labels, self._lines = index["labels"], index["lines"]
        self._firsts = index["firsts"]

    def name(self, index: int) -> str:
        """Return ``part_3.txt:12``: the file and the line."""
        file = self._file_numbers(np.array([index])).item()
        return f"{base_name(shown(self.locations[file]))}:{self._lines[index]}"

    @property
    def lines_per_file(self) -> np.ndarray:
        """Number of samples per file, int64; ranks that each read a part need equal numbers."""
        return np.diff(self._firsts)

    def _file_numbers(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._firsts, indices, side="right") - 1

    def _image_in(self, stored: bytes) -> bytes:
        return decode_base64(stored)

    def _build(self) -> dict[str, np.ndarray]:
        """Read all files; return the place, base64 length, label and line number of each sample."""
        buffers = Buffers(1, _BLOCK)
        found: list[tuple[np.ndarray, ...]] = []
        firsts = [0]  # first sample of each file
        for number, location in enumerate(self.locations):
            stream = BytesFile(self._files[number])
            reader = LineReader(stream, base_name(shown(location)), buffers)
            firsts.append(firsts[-1])
            for lines in reader:
                lengths = (lines.tabs - lines.starts).astype(np.uint32)
                numbers = lines.numbers.astype(np.uint32)
                found.append((lines.starts + reader.base, lengths, lines.labels, numbers))
                firsts[-1] += len(lines)
                buffers.give_back(lines.data)
        if not firsts[-1]:
            raise DataError(
                f"the files of {shown(self.locations[0])} and others contain no samples; expected lines of "
                "'<base64>TAB<label>'"
            )
        names = ("offsets", "lengths", "labels", "lines")
        columns = map(np.concatenate, zip(*found, strict=True))
        return {**dict(zip(names, columns, strict=True)), "firsts": np.array(firsts, np.int64)}
