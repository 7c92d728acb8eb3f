"""A look at the inputs that writes nothing: --dry_run."""

from __future__ import annotations

from typing import Any

import numpy as np

from plsc.data.line_reader import Buffers, LineReader, LongLine
from plsc.data.partition.inputs import Input
from plsc.data.partition.options import PartitionOptions
from plsc.data.partition.order import lines_per_rank
from plsc.data.partition.padding import warning_of_repeats
from plsc.data.partition.progress import Progress
from plsc.errors import DataError


def survey(options: PartitionOptions, inputs: list[Input]) -> dict[str, Any]:
    """Read and check all lines; return the counts of a manifest. Raises DataError for a bad line."""
    buffers = Buffers(1, options.budget.block)
    lines = blanks = skipped = content = 0
    with Progress() as progress:
        progress.begin("reading", None)

        def on_bytes(piece: np.ndarray, _: int) -> None:
            progress.add(len(piece))

        for one in inputs:
            with one.open() as stream:
                reader = LineReader(
                    stream, one.name, buffers, on_bytes, options.skip_bad, keeps_long=False
                )
                for some in reader:
                    if isinstance(some, LongLine):
                        lines += 1
                    else:
                        lines += len(some)
                        buffers.give_back(some.data)
            blanks, skipped = blanks + reader.blanks, skipped + len(reader.skipped)
            content += reader.offset
    if lines == 0:
        raise DataError(f"the files of {options.file_list} hold no samples")
    if warning := warning_of_repeats(lines, options.nranks):
        progress.say(warning)
    each = lines_per_rank(lines, options.nranks)
    return {
        "seed": options.seed,
        "nranks": options.nranks,
        "lines": lines,
        "lines_per_rank": each,
        "padding_lines": each * options.nranks - lines,
        "blank_lines": blanks,
        "skipped_lines": skipped,
        "content_bytes": content,
    }
