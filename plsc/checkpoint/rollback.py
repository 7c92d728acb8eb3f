"""A rollback journal of pages, as in SQLite ("Atomic Commit In SQLite", section 3).

Pages change in place. Before the first change of a page after a checkpoint, its old bytes are appended to the
journal of that checkpoint; of a page that was never written, only its number. A journal is a sequence of
blocks, one per step: four uint32 (magic, number of old pages, number of new pages, CRC-32 of the rest), the
page numbers as int64, and the bytes of the old pages. All little-endian.

The page cache of the system keeps what a killed process wrote, so nothing is flushed here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plsc.data.native import crc32, move_bytes
from plsc.errors import CheckpointError

_MAGIC = 0x314C4E4A  # "JNL1"
_PREFIX = "journal-"
START = "000000000000-"
"""Mark of the state before the first checkpoint."""


def mark_of(step: int, run_id: str) -> str:
    """Return the mark of a checkpoint, which names its journal; marks sort by step."""
    return f"{step:012d}-{run_id}"


def step_of(mark: str) -> int:
    """Return the step of a mark."""
    return int(mark.partition("-")[0])


class Journal:
    """The journals in a folder, one per checkpoint; `append` writes to that of the last `begin`.

    page_bytes: size of a page. pages: their number.
    """

    def __init__(self, folder: Path, page_bytes: int, pages: int) -> None:
        self._folder, self._page_bytes, self._pages = folder, page_bytes, pages
        self._file, self._mark = -1, ""
        self._has = np.zeros(pages, dtype=bool)

    @property
    def is_open(self) -> bool:
        """Whether `begin` was called."""
        return self._file >= 0

    def marks(self) -> list[str]:
        """Return the marks of the checkpoints that have a journal, oldest first."""
        return sorted(path.name.removeprefix(_PREFIX) for path in self._folder.glob(f"{_PREFIX}*"))

    def begin(self, mark: str) -> None:
        """Start an empty journal, unless it is the current one."""
        if self._file >= 0 and self._mark == mark:
            return
        self.close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file, self._mark = os.open(self._path(mark), flags, 0o666), mark
        self._has[:] = False

    def lacks(self, number: np.ndarray) -> np.ndarray:
        """Return which of these pages are not in the current journal yet, and count them as appended."""
        missing = ~self._has[number]
        self._has[number] = True
        return missing

    def append(self, old: np.ndarray, data: np.ndarray, new: np.ndarray) -> None:
        """Append a block: numbers [n] and bytes [n, page_bytes] of old pages, and numbers of new ones.

        Raises OSError.
        """
        numbers = np.concatenate([old, new])
        if len(numbers):
            head = np.array([_MAGIC, len(old), len(new), _checksum(numbers, data)], dtype=np.uint32)
            for part in (head, numbers, data):
                move_bytes(lambda file, parts, _: os.writev(file, parts), self._file, part, 0)

    def blocks(self, mark: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield numbers [n] and old bytes [n, page_bytes] of each block, zeros for pages that were new.

        An incomplete last block is left out: the process was killed before it changed these pages. Raises
        CheckpointError for a damaged block.
        """
        path = self._path(mark)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while len(raw := file.read(16)) == 16:
                magic, old, new, crc = np.frombuffer(raw, np.uint32).tolist()
                if magic == _MAGIC and file.tell() + 8 * (old + new) + old * self._page_bytes > size:
                    return
                numbers = np.frombuffer(file.read(8 * (old + new)), np.int64)
                data = np.zeros((len(numbers), self._page_bytes), np.uint8)
                file.readinto(data[:old].reshape(-1).data)
                is_inside = ((numbers >= 0) & (numbers < self._pages)).all()
                if magic != _MAGIC or not is_inside or _checksum(numbers, data[:old]) != crc:
                    raise CheckpointError(
                        f"{path} has a damaged block before byte {file.tell()}; delete its folder, and "
                        "resume a copy from `plsc checkpoint copy` or start again"
                    )
                yield numbers, data

    def delete(self, mark: str) -> None:
        """Delete the journal of a checkpoint."""
        self._path(mark).unlink()

    def close(self) -> None:
        """Flush and close the current journal."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def _path(self, mark: str) -> Path:
        return self._folder / f"{_PREFIX}{mark}"


def _checksum(numbers: np.ndarray, data: np.ndarray) -> int:
    return crc32(data.reshape(-1).data, crc32(numbers.data))
