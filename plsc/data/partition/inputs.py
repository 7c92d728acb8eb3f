"""Read the inputs of a partition, local or remote, in bounded memory, and count."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import numpy as np

from plsc.data.files import folder_of, read_file_list
from plsc.data.lines import Buffers, LineReader, Lines, Stream, is_base64
from plsc.data.partition.parts import checksum
from plsc.errors import DataError
from plsc.storage.blocks import Fingerprint, fingerprint_of, streamed
from plsc.storage.urls import is_url, shown

LEAST = 32 * 2**20  # bytes of memory
BYTES_PER_LINE = 112  # of memory for its number, key, position and order, including temporary copies
MOST_MESSAGES = 20
_HEAVY = 64  # bytes: the line numbers of shorter lines take more memory than the lines
Result = TypeVar("Result")


@dataclass(frozen=True)
class Budget:
    """Shares of the memory, in bytes.

    block: half a reader's buffer. There are workers + 1 buffers. With the shortest possible lines (4 bytes)
    the line numbers of one buffer take up to 35 blocks. bucket: the memory of a bucket after it is read,
    including its line numbers; each worker reads one bucket at a time.
    """

    total: int
    workers: int

    @property
    def block(self) -> int:
        """Bytes read at a time."""
        share = self.total // (16 * (self.workers + 3))
        return max(2**18, min(4 * 2**20, share // 2**18 * 2**18))

    @property
    def bucket(self) -> int:
        """Bytes of memory per bucket."""
        return max(2**20, int(0.75 * self.total) // self.workers)

    def buffers(self, count: int) -> Buffers:
        """Return buffers for a reader; a line longer than a block may take half of the memory."""
        return Buffers(count, self.block, self.total // 2)


@dataclass(frozen=True)
class Input:
    """An input file, its fingerprint at the time it was listed, and its folder, as of `folder_of`."""

    location: str
    fingerprint: Fingerprint
    folder: str | None

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.fingerprint.size

    @property
    def name(self) -> str:
        """Name for messages."""
        return shown(self.location)

    def open(self) -> BufferedReader:
        """Open the file; errors of reading it have its name."""
        return streamed(self.location, self.folder)

    def check_unchanged(self) -> None:
        """Raise DataError if the file changed since it was listed."""
        if fingerprint_of(self.location) != self.fingerprint:
            raise DataError(f"{self.name} changed after it was listed, so lines are missing; start again")


def list_inputs(data_dir: str, file_list: str, allowed: Sequence[str] = ()) -> list[Input]:
    """Return the files that `file_list` names, in its order. Arguments and errors as of read_file_list.

    A file that is listed under two names, whose lines would count twice, is also an error.
    """
    locations = read_file_list(data_dir, file_list, allowed=allowed)
    inputs = [Input(one, fingerprint_of(one), folder_of(one, data_dir)) for one in locations]
    seen: dict[tuple[int, int], Input] = {}
    for one in (one for one in inputs if not is_url(one.location)):
        status = Path(one.location).stat()
        other = seen.setdefault((status.st_dev, status.st_ino), one)
        if other is not one:
            raise DataError(f"{one.name} is the same file as {other.name}; remove one from {file_list}")
    return inputs


@dataclass
class InputCount:
    """Counts of inputs: samples, blank and skipped lines, bytes and checksum of the content.

    messages: about the first bad lines that were skipped. others: pieces that fail `is_base64`.
    """

    lines: int = 0
    blanks: int = 0
    skipped: int = 0
    content_bytes: int = 0
    checksum: int = 0
    others: int = 0
    messages: list[str] = field(default_factory=list)

    def see(self, piece: np.ndarray, offset: int) -> None:
        """Add a piece of the content to the byte count, the checksum and `others`."""
        self.content_bytes += len(piece)
        self.others += not is_base64(piece)
        self.checksum = (self.checksum + checksum(piece, offset)) % 2**64

    def add(self, more: InputCount) -> None:
        """Add the counts of another piece, or of another input."""
        for name in ("lines", "blanks", "skipped", "content_bytes", "others"):
            setattr(self, name, getattr(self, name) + getattr(more, name))
        self.checksum = (self.checksum + more.checksum) % 2**64
        self.messages = (self.messages + more.messages)[:MOST_MESSAGES]


def total_of(counts: list[InputCount]) -> InputCount:
    """Return the sum of the counts of all inputs."""
    total = InputCount()
    for one in counts:
        total.add(one)
    return total


def read_counted(
    stream: Stream,
    name: str,
    count: InputCount,
    buffers: Buffers,
    skip_bad: bool,
    on_bytes: Callable[[int], object] | None = None,
    start: int = 0,
) -> Iterator[Lines]:
    """Yield the samples of a stream as LineReader does, and add them to `count`.

    on_bytes: called with the size of each piece that was read.
    """

    def see(piece: np.ndarray, offset: int) -> bool:
        count.see(piece, offset)
        if on_bytes is not None:
            on_bytes(len(piece))
        return count.others > 0

    for lines in LineReader(stream, name, buffers, see, skip_bad, start):
        count.lines += len(lines)
        count.blanks += lines.blanks
        count.skipped += len(lines.skipped)
        count.messages = (count.messages + lines.skipped)[:MOST_MESSAGES]
        yield lines
        del lines  # as in LineReader, to free the memory


def map_lines(
    samples: Iterable[Lines],
    first: int,
    pool: Executor,
    buffers: Buffers,
    work: Callable[[Lines, int], Result],
) -> Iterator[Result]:
    """Yield the results of work(lines, index of the first line), in order, computed by threads of the pool.

    first: index of the first sample. The data of lines are given back to `buffers`.
    """
    under_way: deque[Future[Result]] = deque()

    def run(lines: Lines, number: int) -> Result:
        try:
            return work(lines, number)
        finally:
            buffers.give_back(lines.data)

    for some in samples:
        under_way.append(pool.submit(run, some, first))
        first += len(some)
        # Wait for work that takes more memory than a buffer: line numbers of short lines, or a long line.
        is_heavy = len(some) * _HEAVY > buffers.block_bytes or len(some.data) > 2 * buffers.block_bytes
        del some
        while under_way and (is_heavy or under_way[0].done()):
            yield under_way.popleft().result()
    for future in under_way:
        yield future.result()


@contextmanager
def pool_of(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A thread pool that, when the block fails, starts no more work and waits for running work."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="partition")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
