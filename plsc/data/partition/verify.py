"""Whether an output holds what its inputs hold: the same lines, the padding, as many in each part."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np

from plsc.data.line_reader import Buffers, LineReader, LongLine, Stream
from plsc.data.lines import Lines
from plsc.data.partition import manifest as manifests
from plsc.data.partition.checksum import checksum
from plsc.data.partition.inputs import list_inputs
from plsc.data.partition.memory import Budget
from plsc.data.partition.options import PartitionOptions
from plsc.data.partition.order import padding_lines
from plsc.data.partition.parallel import pool_of
from plsc.data.partition.progress import Progress
from plsc.errors import DataError
from plsc.storage.blocks import streamed
from plsc.storage.urls import exists, join, shown

_MODULUS = 2**128


class Digest:
    """Reads lines and sums a 128-bit hash (BLAKE2b) of each: a digest that does not depend on their order.

    `extra` maps the number of a line, counted over all files that are read, to how many times more it counts.
    """

    def __init__(
        self, budget: Budget, extra: dict[int, int], skip_bad: bool, progress: Progress
    ) -> None:
        self.total = 0
        self.lines = 0
        self._budget = budget
        self._buffers = Buffers(budget.workers + 1, budget.block)
        self._extra = extra
        self._wanted = np.array(sorted(extra), dtype=np.int64)
        self._skip_bad = skip_bad
        self._progress = progress

    def add(self, stream: Stream, name: str) -> tuple[int, int, int]:
        """Read a file; return (lines, bytes, checksum)."""
        before, total = self.lines, 0

        def on_bytes(piece: np.ndarray, offset: int) -> None:
            nonlocal total
            total = (total + checksum(piece, offset)) % 2**64
            self._progress.add(len(piece))

        reader = LineReader(stream, name, self._buffers, on_bytes, self._skip_bad)
        with pool_of(self._budget.workers) as pool:
            under_way: deque[Future[int]] = deque()
            for lines in reader:
                first = self.lines
                if isinstance(lines, LongLine):
                    self.lines += 1
                    self.total += _hash_file(lines) * (1 + self._extra.get(first, 0))
                    continue
                self.lines += len(lines)
                under_way.append(pool.submit(self._hash, lines, first))
                while under_way and under_way[0].done():
                    self.total += under_way.popleft().result()
            self.total = (self.total + sum(future.result() for future in under_way)) % _MODULUS
        return self.lines - before, reader.offset, total

    def _hash(self, lines: Lines, first: int) -> int:
        total = 0
        view = lines.data.data
        try:
            for start, end in zip(lines.starts.tolist(), lines.ends.tolist(), strict=True):
                total += _hash_line(view[start:end])
            low, high = np.searchsorted(self._wanted, [first, first + len(lines)])
            for number in self._wanted[low:high].tolist():
                start, end = int(lines.starts[number - first]), int(lines.ends[number - first])
                total += self._extra[number] * _hash_line(view[start:end])
        finally:
            self._buffers.give_back(lines.data)
        return total


def verify(options: PartitionOptions) -> dict[str, Any]:
    """Check the output against the inputs; return its manifest.

    Raises DataError that names the part that is damaged, the input that has changed, or what does not agree.
    """
    output = options.output
    location = join(output, manifests.NAME)
    if not exists(location):
        raise DataError(
            f"{shown(location)} does not exist: there is no output to verify; make it first, without verify, "
            "or name it by output_dir"
        )
    with streamed(location) as file:
        manifest = manifests.parse(manifests.read_limited(file), shown(location))
    if manifest["nranks"] != options.nranks:
        raise DataError(
            f"{shown(output)} has {manifest['nranks']} parts, expected {options.nranks}; "
            f"pass --nranks {manifest['nranks']}"
        )
    with Progress() as progress:
        written = _digest_parts(options, manifest, progress)
        expected = _digest_inputs(options, manifest, progress)
    if written != expected:
        raise DataError(
            f"the lines of {shown(output)} are not those of its inputs and their padding; partition again"
        )
    return manifest


def _digest_parts(options: PartitionOptions, manifest: dict[str, Any], progress: Progress) -> int:
    digest = Digest(options.budget, {}, False, progress)
    progress.begin("reading parts", sum(part["size"] for part in manifest["parts"]))
    for part in manifest["parts"]:
        name = f"{shown(options.output)}/{part['name']}"
        with streamed(join(options.output, part["name"])) as file:
            lines, size, total = digest.add(file, name)
        if lines != manifest["lines_per_rank"]:
            raise DataError(f"{name} has {lines} lines, expected {manifest['lines_per_rank']}")
        if (size, total) != (part["size"], int(part["checksum"], 16)):
            raise DataError(f"{name} is damaged: its size or checksum is not the manifest's")
    return digest.total


def _digest_inputs(options: PartitionOptions, manifest: dict[str, Any], progress: Progress) -> int:
    inputs = list_inputs(options.data_dir, options.file_list)
    if len(inputs) != len(manifest["inputs"]):
        raise DataError(
            f"{options.file_list} names {len(inputs)} files, {len(manifest['inputs'])} were partitioned"
        )
    padding = padding_lines(manifest["seed"], manifest["lines"], manifest["nranks"])
    numbers, times = np.unique(padding, return_counts=True)
    extra = dict(zip(numbers.tolist(), times.tolist(), strict=True))
    digest = Digest(options.budget, extra, bool(manifest.get("skipped_lines")), progress)
    progress.begin("reading inputs", sum(one["content_bytes"] for one in manifest["inputs"]))
    for one, known in zip(inputs, manifest["inputs"], strict=True):
        with one.open() as stream:
            found = digest.add(stream, one.name)
        if found != (known["lines"], known["content_bytes"], int(known["checksum"], 16)):
            raise DataError(
                f"{one.name} is not what was partitioned ({known['name']}, {known['lines']} lines): it has "
                "changed since, or the list names other files now"
            )
    return digest.total


def _hash_line(data: memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "big")


def _hash_file(line: LongLine) -> int:
    line.file.seek(0)
    state = hashlib.blake2b(digest_size=16)
    left = line.length
    while left:
        piece = line.file.read(min(left, 2**20))
        state.update(piece)
        left -= len(piece)
    return int.from_bytes(state.digest(), "big")
