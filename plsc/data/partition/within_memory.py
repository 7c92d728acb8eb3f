"""The way for sets that fit the memory: an index of all lines, which are then copied in the new order.

Copying takes the lines from the mapped files, that is from the system's cache of them, where reading has put
them.
"""

from __future__ import annotations

import numpy as np

from plsc.data.native.partition import CopyError, LinePlaces, truncation_caught
from plsc.data.partition.counts import Counts
from plsc.data.partition.indexing import BLOCK_BYTES, Index, Indexer
from plsc.data.partition.inputs import Input
from plsc.data.partition.memory import BYTES_A_LINE
from plsc.data.partition.order import line_keys
from plsc.data.partition.padding import Padding
from plsc.data.partition.parallel import map_in_order
from plsc.data.partition.parts import Parts, Run
from plsc.data.partition.progress import Progress
from plsc.errors import DataError

_SPARE = 8 * 2**20
_MOST_FILES = 512  # mapped at once: each keeps a file open


def fits(inputs: list[Input], memory: int, workers: int) -> bool:
    """Whether the inputs fit the memory as a whole; their index may still turn out too large."""
    room = memory - _SPARE - workers * 2 * BLOCK_BYTES
    is_plain = len(inputs) <= _MOST_FILES and all(one.is_plain for one in inputs)
    return is_plain and sum(one.size for one in inputs) <= room


def index_inputs(
    inputs: list[Input], memory: int, workers: int, skip_bad: bool, progress: Progress
) -> tuple[Index, Counts]:
    """Find and check all lines. Raises DataError for a bad one, TooManyLines if the index grows too large."""
    room = (memory - _SPARE - sum(one.size for one in inputs)) // BYTES_A_LINE
    return Indexer(workers, room, skip_bad, progress.add).run(inputs)


def gather(
    index: Index, inputs: list[Input], seed: int, parts: Parts, padding: Padding, copiers: int
) -> None:
    """Write all lines to the parts in the order of their keys, then the padding.

    Raises DataError if an input is not what it was when it was indexed.
    """
    order = np.argsort(line_keys(seed, np.arange(len(index.starts)))).astype(np.int64)
    sizes = index.ends - index.starts
    lengths = sizes[order] + 1
    runs = parts.claim(0, lengths)
    for run in runs:
        padding.note(run, order, lengths)
    lines = LinePlaces(index.starts, sizes, index.memories, index.files)

    def write(task: Run) -> None:
        try:
            parts.write(task, lines, order)
        except CopyError as error:
            name = inputs[int(index.files[error.line])].name
            raise DataError(
                f"{name} changed while it was read; start again when it is whole"
            ) from error

    with truncation_caught():
        map_in_order(copiers, write, _side_by_side(runs, lengths, copiers))
    padding.copy(parts)


def _side_by_side(runs: list[Run], lengths: np.ndarray, copiers: int) -> list[Run]:
    """Cut the runs into tasks, so ordered that threads write different files: one file admits one writer."""
    tasks = []
    for first in range(0, len(runs), copiers):
        rows = [run.cut(lengths) for run in runs[first : first + copiers]]
        for column in range(max(map(len, rows))):
            tasks += [row[column] for row in rows if column < len(row)]
    return tasks
