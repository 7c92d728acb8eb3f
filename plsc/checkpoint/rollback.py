"""A rollback journal of pages, as in SQLite ("Atomic Commit In SQLite", section 3).

Pages change in place. Before the first change of a page after a checkpoint, its old bytes are appended to the
journal of that checkpoint. Little-endian:

    uint64 [3]      magic, end of the last complete block, checksum
    uint32 [pages]  CRC-32 of each page at the checkpoint; 0: never written
    blocks          one per step: number of pages (int64), their numbers (int64), their bytes

The checksum is of the files' id, the mark of the checkpoint, the table, and the numbers in all blocks. After
the end may follow a block of a process that was killed before it changed these pages.

The page cache of the system keeps what a killed process wrote, so nothing is flushed here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from plsc.data.native import crc32, crc32_rows, move_bytes
from plsc.errors import CheckpointError
from plsc.storage.disk import open_regular

_MAGIC = 0x324C4E4A  # "JNL2"
_PREFIX = "journal-"
_MARK = re.compile(r"\d{12,}-[\w.-]*", re.ASCII)
NEW = "new"  # name of a file that is about to replace another one
START = "000000000000-"
"""Mark of the state before the first checkpoint."""


def mark_of(step: int, run_id: str) -> str:
    """Return the mark of a checkpoint, which names its journal; marks sort by step."""
    if not _MARK.fullmatch(mark := f"{step:012d}-{run_id}"):
        raise CheckpointError(f"the run id of a checkpoint is {run_id!r:.80}; expected letters and digits")
    return mark


def step_of(mark: str) -> int:
    """Return the step of a mark."""
    return int(mark.partition("-")[0])


def checksums_of(pages: np.ndarray) -> np.ndarray:
    """Return the CRC-32 of each page, uint32, never 0; pages: uint8 [n, bytes]."""
    return np.maximum(crc32_rows(pages), 1)


def replace_file(path: Path, *parts: np.ndarray) -> int:
    """Replace a file, or a link of that name, at once; return its descriptor. Raises OSError."""
    new, position = path.with_name(NEW), 0
    new.unlink(missing_ok=True)  # of a killed run
    file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    for part in parts:
        move_bytes(os.pwritev, file, part, position)
        position += part.nbytes
    new.replace(path)
    return file


def damaged(folder: Path, name: str, problem: str) -> CheckpointError:
    """Return an error about a file in a folder of class weights."""
    return CheckpointError(
        f"{folder / name} {problem}; delete {folder}, and resume a copy from `plsc checkpoint copy` or start "
        "again"
    )


class Journal:
    """The journals in a folder, one per checkpoint; `append` writes to that of the last `begin`.

    page_bytes: size of a page. pages: their number. key: the id of the files, once they are open.
    """

    def __init__(self, folder: Path, page_bytes: int, pages: int) -> None:
        self._folder, self._page_bytes, self._pages = folder, page_bytes, pages
        self.key = ""
        self._file, self._mark = -1, ""
        self._has = np.zeros(pages, dtype=bool)

    @property
    def is_open(self) -> bool:
        """Whether `begin` was called."""
        return self._file >= 0

    def marks(self) -> list[str]:
        """Return the marks of the checkpoints that have a journal, oldest first."""
        names = (path.name.removeprefix(_PREFIX) for path in self._folder.glob(f"{_PREFIX}*"))
        return sorted(filter(_MARK.fullmatch, names))

    def begin(self, mark: str, checksums: np.ndarray) -> None:
        """Start an empty journal, unless it is the current one; checksums: of the pages. Raises OSError."""
        if self._file >= 0 and self._mark == mark:
            return
        head = np.array([_MAGIC, 24 + checksums.nbytes, self._seed(mark, checksums)], np.uint64)
        file = replace_file(self._path(mark), head, checksums)
        self.close()
        self._file, self._mark, self._head = file, mark, head
        self._has[:] = False

    def lacks(self, number: np.ndarray) -> np.ndarray:
        """Return which of these pages are not in the current journal yet, and count them as appended."""
        missing = ~self._has[number]
        self._has[number] = True
        return missing

    def append(self, numbers: np.ndarray, data: np.ndarray) -> None:
        """Append a block: numbers int64 [n] and bytes [n, page_bytes] of old pages. Raises OSError."""
        if not len(numbers):
            return
        _, end, checksum = self._head.tolist()
        counted = np.concatenate([[len(numbers)], numbers])
        move_bytes(os.pwritev, self._file, counted, end)
        move_bytes(os.pwritev, self._file, data, end + counted.nbytes)
        self._head[1:] = end + counted.nbytes + data.nbytes, crc32(counted.data, checksum)
        move_bytes(os.pwritev, self._file, self._head, 0)

    def read(
        self, mark: str, undo: Callable[[np.ndarray, np.ndarray], object] = lambda *_: None
    ) -> np.ndarray:
        """Read and check the journal of a checkpoint; return the checksums of all pages at it.

        undo: called with the numbers [n] and old bytes [n, page_bytes] of each block. Raises OSError;
        CheckpointError if the journal is incomplete, damaged or of other files.
        """
        wrong = damaged(self._folder, _PREFIX + mark, "is incomplete, damaged or of other class weights")
        with open_regular(self._path(mark), self._folder) as file:
            end = os.fstat(file.fileno()).st_size

            def take(dtype: str, count: int) -> np.ndarray:
                if not 0 <= count * np.dtype(dtype).itemsize <= end - file.tell():
                    raise wrong
                return np.fromfile(file, dtype, count)

            magic, last, expected = take("<u8", 3).tolist()
            checksums = take("<u4", self._pages)
            checksum = self._seed(mark, checksums)
            is_sound, end = magic == _MAGIC and last <= end, last
            while is_sound and file.tell() < end:
                count = take("<i8", 1)
                numbers = take("<i8", int(count[0]))
                data = take("u1", len(numbers) * self._page_bytes).reshape(len(numbers), self._page_bytes)
                checksum = crc32(numbers.data, crc32(count.data, checksum))
                is_sound = ((numbers >= 0) & (numbers < self._pages)).all()
                is_sound = is_sound and (checksums_of(data) == checksums[numbers]).all()
                if is_sound:
                    undo(numbers, data)
            if not is_sound or checksum != expected:
                raise wrong
        return checksums

    def delete(self, mark: str) -> None:
        """Delete the journal of a checkpoint."""
        self._path(mark).unlink()

    def close(self) -> None:
        """Flush and close the current journal."""
        if self._file >= 0:
            file, self._file = self._file, -1
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def _path(self, mark: str) -> Path:
        return self._folder / f"{_PREFIX}{mark}"

    def _seed(self, mark: str, checksums: np.ndarray) -> int:
        return crc32(checksums.data, crc32(f"{self.key} {mark}".encode()))
