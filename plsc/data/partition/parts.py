"""The files of the ranks, while they are written: who writes where, their sizes and checksums."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.data.partition.checksum import checksum_of_words
from plsc.data.partition.files import read_exactly, write_all
from plsc.storage.sync import sync

_CHUNK_BYTES = 2**18  # written at once: put together, summed and written while it is in the cache
_CHUNK_LINES = 1024
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Run:
    """Lines [begin, end) of those at hand go to a part, one after another from byte `offset`."""

    rank: int
    offset: int
    begin: int
    end: int


def part_names(nranks: int) -> list[str]:
    """Return the names of the parts: part_0.txt and so on, all as long as the last one's."""
    width = len(str(nranks - 1))
    return [f"part_{rank:0{width}d}.txt" for rank in range(nranks)]


class Parts:
    """One file a rank, each with `lines_each` lines. Several threads may write runs at once.

    on_bytes is called with the number of bytes after each write. syncer: a pool in which each part that is
    complete is brought to the disk, while the others are written.
    """

    def __init__(
        self,
        folder: Path,
        nranks: int,
        lines_each: int,
        on_bytes: Callable[[int], None],
        syncer: Executor,
    ) -> None:
        self.paths = [folder / name for name in part_names(nranks)]
        self.lines_each = lines_each
        self.sizes = [0] * nranks
        self.checksums = [0] * nranks
        self._missing = [lines_each] * nranks
        self._on_bytes = on_bytes
        self._syncer = syncer
        self._syncs: list[Future[None]] = []
        self._lock = threading.Lock()

    def claim(self, position: int, lengths: np.ndarray) -> list[Run]:
        """Return the runs for lines of these lengths (int64 [n], newline included) from `position` on.

        Calls must come in the order of the positions: a part's bytes are given out one after another.
        """
        ends = np.concatenate([[0], np.cumsum(lengths)])
        runs, begin = [], 0
        while begin < len(lengths):
            rank, inside = divmod(position + begin, self.lines_each)
            end = min(len(lengths), begin + self.lines_each - inside)
            runs.append(Run(rank, self.sizes[rank], begin, end))
            self.sizes[rank] += int(ends[end] - ends[begin])
            begin = end
        return runs

    def write(
        self, run: Run, slices: Callable[[int, int], Sequence[memoryview]], lengths: np.ndarray
    ) -> None:
        """Write a run. slices(a, b) gives the bytes of lines [a, b), each closed by a newline."""
        ends = np.cumsum(lengths[run.begin : run.end])
        done, offset, total = 0, run.offset, 0
        with self._opened(run.rank) as handle:
            while done < len(ends):
                reach = int(ends[done - 1] if done else 0) + _CHUNK_BYTES
                stop = int(np.searchsorted(ends, reach, side="right"))
                stop = max(done + 1, min(stop, done + _CHUNK_LINES))
                for pieces in _in_chunks(slices(run.begin + done, run.begin + stop)):
                    count, part = self._put(handle, pieces, offset)
                    offset, total = offset + count, total + part
                done = stop
        self._count(run.rank, len(ends), total)

    def copy_line(self, run: Run, source: int, offset: int, length: int) -> None:
        """Write a run of one line, which lies in an open file, piece by piece."""
        total = 0
        with self._opened(run.rank) as handle:
            for begin in range(0, length, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, length - begin)
                piece = memoryview(read_exactly(source, size, offset + begin))
                total += self._put(handle, [piece], run.offset + begin)[1]
        self._count(run.rank, 1, total)

    def finish(self) -> None:
        """Wait until all parts are on the disk. Raises OSError if that fails."""
        for future in self._syncs:
            future.result()

    def _count(self, rank: int, lines: int, total: int) -> None:
        with self._lock:
            self.checksums[rank] = (self.checksums[rank] + total) & _MASK
            self._missing[rank] -= lines
            if self._missing[rank] == 0:
                self._syncs.append(self._syncer.submit(sync, self.paths[rank]))

    @contextmanager
    def _opened(self, rank: int) -> Iterator[int]:
        handle = os.open(self.paths[rank], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield handle
        finally:
            os.close(handle)

    def _put(self, handle: int, pieces: Sequence[memoryview], offset: int) -> tuple[int, int]:
        """Write the pieces at `offset`; return (their bytes, what they add to the checksum)."""
        lead = offset % 8
        # Zeros around bring the words of the file to where words of memory are.
        data = b"".join([b"\0" * lead, *pieces, b"\0" * 8])
        size = len(data) - 8
        words = np.frombuffer(data, dtype="<u8", count=-(-size // 8))
        write_all(handle, memoryview(data)[lead:size], offset)
        self._on_bytes(size - lead)
        return size - lead, checksum_of_words(words, offset // 8)


def _in_chunks(pieces: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    """Yield the pieces at once, but a line that is longer than a chunk cut up."""
    if len(pieces) > 2:
        yield pieces
        return
    for piece in pieces:
        for begin in range(0, len(piece), _CHUNK_BYTES):
            yield [piece[begin : begin + _CHUNK_BYTES]]
