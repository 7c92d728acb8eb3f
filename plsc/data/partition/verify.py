"""Verify that an output has the lines of its inputs and the padding, with equal numbers per part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from plsc.data.lines import Lines, Stream
from plsc.data.partition.inputs import InputCount, list_inputs, map_lines, pool_of, progress_bar, read_counted
from plsc.data.partition.options import Budget, PartitionOptions
from plsc.data.partition.order import ALGORITHM, lines_per_rank, padding_lines
from plsc.data.partition.run import FORMAT, MANIFEST
from plsc.errors import DataError
from plsc.storage.blocks import streamed
from plsc.storage.regular import parse_json
from plsc.storage.urls import exists, join, shown

_MODULUS = 2**128
_MOST_MANIFEST = 256 * 2**20  # bytes


class Digest:
    """Sum a 128-bit hash (BLAKE2b) of each line: a digest that does not depend on their order.

    extra: additional count of each line number, counted over all files read.
    """

    def __init__(
        self, budget: Budget, extra: dict[int, int], skip_bad: bool, on_bytes: Callable[[int], object]
    ) -> None:
        self.total = 0
        self._lines = 0
        self._workers = budget.workers
        self._buffers = budget.buffers(budget.workers + 1)
        self._extra = extra
        self._wanted = np.array(sorted(extra), dtype=np.int64)
        self._skip_bad = skip_bad
        self._on_bytes = on_bytes

    def add(self, stream: Stream, name: str) -> InputCount:
        """Read a file; return its counts."""
        count = InputCount()
        samples = read_counted(stream, name, count, self._buffers, self._skip_bad, self._on_bytes)
        with pool_of(self._workers) as pool:
            hashes = map_lines(samples, self._lines, pool, self._buffers, self._hash)
            self.total = (self.total + sum(hashes)) % _MODULUS
        self._lines += count.lines
        return count

    def _hash(self, lines: Lines, first: int) -> int:
        total = 0
        view = lines.data.data
        for start, end in zip(lines.starts.tolist(), lines.ends.tolist(), strict=True):
            total += _hash_line(view[start:end])
        low, high = np.searchsorted(self._wanted, [first, first + len(lines)])
        for number in self._wanted[low:high].tolist():
            start, end = int(lines.starts[number - first]), int(lines.ends[number - first])
            total += self._extra[number] * _hash_line(view[start:end])
        return total


def _hash_line(data: memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "big")


def verify(options: PartitionOptions) -> dict[str, Any]:
    """Check the output against the inputs; return its manifest.

    Raises DataError that names the damaged part, the changed input, or the mismatch.
    """
    output = options.output
    location = join(output, MANIFEST)
    if not exists(location):
        raise DataError(
            f"{shown(location)} does not exist; run the partition without --verify first, or pass another "
            "--output_dir"
        )
    with streamed(location, output) as file:
        manifest = _parsed(file.read(_MOST_MANIFEST), shown(location))
    if manifest["nranks"] != options.nranks:
        raise DataError(
            f"{shown(output)} has {manifest['nranks']} parts, expected {options.nranks}; "
            f"pass --nranks {manifest['nranks']}"
        )
    written = _digest_parts(options, manifest)
    expected = _digest_inputs(options, manifest)
    if written != expected:
        raise DataError(
            f"the lines of {shown(output)} differ from its inputs and padding; run the partition again"
        )
    return manifest


def _digest_parts(options: PartitionOptions, manifest: dict[str, Any]) -> int:
    total = sum(part["size"] for part in manifest["parts"])
    with progress_bar("reading parts", total) as progress:
        digest = Digest(options.budget, {}, False, progress.update)
        for part in manifest["parts"]:
            name = f"{shown(options.output)}/{part['name']}"
            with streamed(join(options.output, part["name"]), options.output) as file:
                found = digest.add(file, name)
            if found.lines != manifest["lines_per_rank"]:
                raise DataError(f"{name} has {found.lines} lines, expected {manifest['lines_per_rank']}")
            if (found.content_bytes, found.checksum) != (part["size"], int(part["checksum"], 16)):
                raise DataError(f"{name} is damaged: its size or checksum differs from the manifest")
    return digest.total


def _digest_inputs(options: PartitionOptions, manifest: dict[str, Any]) -> int:
    inputs = list_inputs(options.data_dir, options.file_list, options.allowed)
    if len(inputs) != len(manifest["inputs"]):
        raise DataError(
            f"{options.file_list} names {len(inputs)} files, but {len(manifest['inputs'])} were partitioned"
        )
    padding = padding_lines(manifest["seed"], manifest["lines"], manifest["nranks"])
    numbers, times = np.unique(padding, return_counts=True)
    extra = dict(zip(numbers.tolist(), times.tolist(), strict=True))
    skip_bad = bool(manifest.get("skipped_lines"))
    total = sum(one["content_bytes"] for one in manifest["inputs"])
    with progress_bar("reading inputs", total) as progress:
        digest = Digest(options.budget, extra, skip_bad, progress.update)
        for one, known in zip(inputs, manifest["inputs"], strict=True):
            with one.open() as stream:
                found = digest.add(stream, one.name)
            if (found.lines, found.content_bytes, found.checksum) != (
                known["lines"],
                known["content_bytes"],
                int(known["checksum"], 16),
            ):
                raise DataError(
                    f"{one.name} differs from the partitioned file {known['name']} ({known['lines']} lines); "
                    "either it or the file list has changed"
                )
    return digest.total


def _parsed(data: bytes, name: str) -> dict[str, Any]:
    """Parse a manifest and check the type of every entry. Raises DataError."""
    try:
        manifest = parse_json(data)
        _check(manifest)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{name} is not the manifest of a partition ({error})") from error
    if manifest["algorithm"] != ALGORITHM:
        raise DataError(
            f"{name} was made with {manifest['algorithm']!r}, but this version of plsc uses {ALGORITHM!r}"
        )
    return manifest


def _check(manifest: Any) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT!r}")
    for key in ("seed", "nranks", "lines", "lines_per_rank", "padding_lines"):
        _require(manifest[key], int, key)
    if not 1 <= manifest["nranks"] == len(manifest["parts"]) or manifest["lines"] < 1:
        raise ValueError("the counts contradict each other")
    if manifest["lines_per_rank"] != lines_per_rank(manifest["lines"], manifest["nranks"]):
        raise ValueError("the counts contradict each other")
    _require(manifest["algorithm"], str, "algorithm")
    for kind, numbers in (("inputs", ("size", "lines", "content_bytes")), ("parts", ("size",))):
        _require(manifest[kind], list, kind)
        for entry in manifest[kind]:
            _require(entry, dict, kind)
            for key in ("name", "checksum"):
                _require(entry[key], str, key)
            for key in numbers:
                _require(entry[key], int, key)
            int(entry["checksum"], 16)
    for entry in manifest["parts"]:
        if "/" in entry["name"] or "::" in entry["name"] or entry["name"] in ("", ".", ".."):
            raise ValueError(f"part {entry['name']!r} is not a plain file name")


def _require(value: Any, kind: type, key: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{key} should be {kind.__name__}, is {value!r:.40}")
