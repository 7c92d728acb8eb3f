"""The files of the ranks, while they are written: who writes where, their sizes and checksums."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.data.native.partition import LinePlaces, start_writeback
from plsc.data.partition.copying import copy_lines, put
from plsc.data.partition.files import open_direct, read_exactly
from plsc.storage.publish import sync

_TASK_BYTES = 2**24  # of a run that is cut up: what one thread writes in a few milliseconds
_CHUNK_BYTES = 2**18
_DIRECT_BYTES = 2**20  # of a run from which on it is written past the system's cache
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Run:
    """Lines [begin, end) of those at hand go to a part, one after another: `size` bytes from `offset` on."""

    rank: int
    offset: int
    size: int
    begin: int
    end: int

    def cut(self, lengths: np.ndarray) -> list[Run]:
        """Return the run in pieces that several threads can share. lengths: as those given to `claim`."""
        ends = np.cumsum(lengths[self.begin : self.end])
        pieces, begin, offset = [], 0, 0
        while begin < len(ends):
            end = int(np.searchsorted(ends, offset + _TASK_BYTES))
            end = min(end + 1, len(ends))
            size = int(ends[end - 1]) - offset
            pieces.append(
                Run(self.rank, self.offset + offset, size, self.begin + begin, self.begin + end)
            )
            begin, offset = end, offset + size
        return pieces


def part_names(nranks: int) -> list[str]:
    """Return the names of the parts: part_0.txt and so on, all as long as the last one's."""
    width = len(str(nranks - 1))
    return [f"part_{rank:0{width}d}.txt" for rank in range(nranks)]


class Parts:
    """One file a rank, each with `lines_each` lines. Several threads may write runs at once.

    Long runs are written past the system's cache where it can be: the parts have to be on the disk anyway
    before they are published, and a copy of them in the cache takes as long to make as the shuffle itself.
    on_bytes is called with the number of bytes after each write. syncer: a pool that brings to the disk what
    is written, while more is written; without one, all goes to the cache and is left there.
    """

    def __init__(
        self,
        folder: Path,
        nranks: int,
        lines_each: int,
        on_bytes: Callable[[int], None],
        syncer: Executor | None,
    ) -> None:
        self.paths = [folder / name for name in part_names(nranks)]
        self.lines_each = lines_each
        self.sizes = [0] * nranks
        self.checksums = [0] * nranks
        self._lengths = [
            0
        ] * nranks  # of the files, as far as they were made longer ahead of writing
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
            size = int(ends[end] - ends[begin])
            runs.append(Run(rank, self.sizes[rank], size, begin, end))
            self.sizes[rank] += size
            begin = end
        return runs

    def write(self, run: Run, lines: LinePlaces, order: np.ndarray) -> None:
        """Write a run of the lines at hand, which are `order` (int64) of `lines`.

        Raises CopyError for a line that is not where it should be, OSError if the part cannot be written.
        """
        with self._opened(run.rank) as handle, self._direct(run) as direct:
            if direct >= 0:
                self._extend(run.rank, handle)
            total = copy_lines(lines, order[run.begin : run.end], handle, run.offset, direct)
        self._count(run, total, direct >= 0)

    def copy_line(self, run: Run, source: int, offset: int, length: int) -> None:
        """Write a run of one line, which lies in an open file, piece by piece."""
        total = 0
        with self._opened(run.rank) as handle:
            for begin in range(0, length, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, length - begin)
                total += put(handle, read_exactly(source, size, offset + begin), run.offset + begin)
        self._count(run, total, False)

    def finish(self) -> None:
        """Wait until all parts are on the disk. Raises OSError if that fails."""
        for future in self._syncs:
            future.result()

    def _count(self, run: Run, total: int, is_direct: bool) -> None:
        self._on_bytes(run.size)
        rank = run.rank
        with self._lock:
            self.checksums[rank] = (self.checksums[rank] + total) & _MASK
            self._missing[rank] -= run.end - run.begin
            is_whole = self._missing[rank] == 0
        if self._syncer is None:
            return
        if is_whole:
            self._syncs.append(self._syncer.submit(sync, self.paths[rank]))
        elif not is_direct:
            self._syncs.append(self._syncer.submit(self._begin_sync, run))

    def _begin_sync(self, run: Run) -> None:
        with self._opened(run.rank) as handle:
            start_writeback(handle, run.offset, run.size)

    def _extend(self, rank: int, handle: int) -> None:
        """Let the file be as long as it will be: writers that make it longer would take turns."""
        with self._lock:
            if self._lengths[rank] < self.sizes[rank]:
                self._lengths[rank] = self.sizes[rank]
                os.ftruncate(handle, self.sizes[rank])

    @contextmanager
    def _direct(self, run: Run) -> Iterator[int]:
        """Yield a handle that passes the cache by, -1 if there is none or the run is short."""
        is_chosen = self._syncer is not None and run.size >= _DIRECT_BYTES
        handle = open_direct(self.paths[run.rank]) if is_chosen else -1
        try:
            yield handle
        finally:
            if handle >= 0:
                os.close(handle)

    @contextmanager
    def _opened(self, rank: int) -> Iterator[int]:
        handle = os.open(self.paths[rank], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield handle
        finally:
            os.close(handle)
