"""Verify that an output has the lines of its inputs and the padding, with equal numbers per part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from plsc.data.lines import Lines
from plsc.data.partition.inputs import InputCount, list_inputs, map_lines, pool_of, progress_bar, read_counted
from plsc.data.partition.options import PartitionOptions
from plsc.data.partition.order import ALGORITHM, lines_per_rank, padding_lines
from plsc.data.partition.run import FORMAT, MANIFEST
from plsc.errors import DataError
from plsc.storage.blocks import streamed
from plsc.storage.regular import parse_json
from plsc.storage.urls import join, located, shown

_MODULUS = 2**128
_MOST_MANIFEST = 256 * 2**20  # bytes

File = tuple[str, Callable[[], AbstractContextManager[Any]]]
"""Name and how to open it."""


def verify(options: PartitionOptions) -> dict[str, Any]:
    """Check the output against the inputs; return its manifest.

    Raises DataError that names the damaged part, the changed input, or the mismatch.
    """
    output = options.output
    location = join(output, MANIFEST)
    with streamed(location, output) as file:
        data = file.read(_MOST_MANIFEST)
    try:
        manifest = parse_json(data)
        seed, lines, each = (manifest[key] for key in ("seed", "lines", "lines_per_rank"))
        wanted = (FORMAT, ALGORITHM, options.nranks, options.nranks, lines_per_rank(lines, options.nranks))
        there = (manifest["format"], manifest["algorithm"], manifest["nranks"], len(manifest["parts"]), each)
        places = [located(part["name"], output) for part in manifest["parts"]]
        parts = [(each, int(part["size"]), part["checksum"]) for part in manifest["parts"]]
        known = [(one["lines"], int(one["content_bytes"]), one["checksum"]) for one in manifest["inputs"]]
    except (DataError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{shown(location)} is not the manifest of a partition: {error!r}") from error
    if there != wanted:
        raise DataError(
            f"{shown(location)}: format, algorithm, --nranks, parts and lines per part are {there}; "
            f"expected {wanted}"
        )
    files: list[File] = [
        (f"{shown(output)}/{place}", partial(streamed, join(output, place), output)) for place in places
    ]
    written = _digest(options, "reading parts", files, parts, {}, False)
    inputs = list_inputs(options.data_dir, options.file_list, options.allowed)
    numbers, times = np.unique(padding_lines(seed, lines, options.nranks), return_counts=True)
    extra = dict(zip(numbers.tolist(), times.tolist(), strict=True))
    files = [(one.name, one.open) for one in inputs]
    skip_bad = bool(manifest.get("skipped_lines"))
    if written != _digest(options, "reading inputs", files, known, extra, skip_bad):
        raise DataError(
            f"the lines of {shown(output)} differ from its inputs and padding; run the partition again"
        )
    return manifest


def _digest(
    options: PartitionOptions,
    what: str,
    files: Iterable[File],
    known: list[tuple[int, int, str]],
    extra: dict[int, int],
    skip_bad: bool,
) -> int:
    """Return the sum of a 128-bit hash (BLAKE2b) of each line, which does not depend on their order.

    known: lines, bytes and checksum that each file must have. extra: additional count of each line number,
    counted over all files.
    """
    budget, total, first = options.budget, 0, 0
    buffers = budget.buffers(budget.workers + 1)
    wanted = np.array(sorted(extra), dtype=np.int64)

    def hash_lines(lines: Lines, first: int) -> int:
        hashes, view = 0, lines.data.data
        for start, end in zip(lines.starts.tolist(), lines.ends.tolist(), strict=True):
            hashes += _hash_line(view[start:end])
        low, high = np.searchsorted(wanted, [first, first + len(lines)])
        for number in wanted[low:high].tolist():
            start, end = int(lines.starts[number - first]), int(lines.ends[number - first])
            hashes += extra[number] * _hash_line(view[start:end])
        return hashes

    with progress_bar(what, sum(size for _, size, _ in known)) as progress, pool_of(budget.workers) as pool:
        for number, (name, open_file) in enumerate(files):
            count = InputCount()
            with open_file() as stream:
                samples = read_counted(stream, name, count, buffers, skip_bad, progress.update)
                total += sum(map_lines(samples, first, pool, buffers, hash_lines))
            first += count.lines
            found = count.lines, count.content_bytes, f"{count.checksum:016x}"
            if [found] != known[number : number + 1]:
                raise DataError(
                    f"{name} is damaged, or was changed or listed since the partition: lines, bytes and "
                    f"checksum are {found}; expected {known[number : number + 1]}"
                )
    return total % _MODULUS


def _hash_line(data: memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "big")
