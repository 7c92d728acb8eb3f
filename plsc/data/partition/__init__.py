"""Shuffle a dataset of base64 lines over all files, and split it into parts with equal numbers of lines.

`partition` reads from top to bottom: inputs.py lists and reads the files, local.py or spark.py shuffles their
lines in the order of parts.py, and the folder is published. `verify` checks an output.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np

from plsc.data.lines import Lines
from plsc.data.partition import local
from plsc.data.partition.inputs import (
    LEAST,
    Budget,
    Input,
    InputCount,
    list_inputs,
    map_lines,
    pool_of,
    read_counted,
    total_of,
)
from plsc.data.partition.parts import Parts, lines_per_rank, padding_lines, part_names
from plsc.errors import DataError, OptionError
from plsc.machine import Counter
from plsc.storage.blocks import streamed
from plsc.storage.disk import SAVING, FileName, Text, Workspace, read_record, refuse_existing
from plsc.storage.store import Store, staged
from plsc.storage.urls import is_url, join, shown

logger = logging.getLogger(__name__)
MANIFEST = "manifest.json"
FILE_LIST = "file_list.txt"
FORMAT = "plsc-partition-1"
ALGORITHM = "splitmix64-order-1"  # must change whenever the output for the same seed and lines changes
MOST_RANKS = 65_536
_LEAST_OF_WORKER = 16 * 2**20  # bytes; with less, a worker's fixed memory would exceed its share
_MODULUS = 2**128
_MOST_MANIFEST = 256 * 2**20  # bytes
_open_store = partial(
    Store, silence=300.0
)  # seconds: the upload of a large piece may report nothing for long


@dataclass(frozen=True)
class PartitionOptions:
    """The options that `plsc data partition --help` describes. OptionError for a wrong value."""

    data_dir: str
    nranks: int
    file_list: str = "file_list.txt"
    output_dir: str | None = None
    output_name: str | None = None
    seed: int = 0
    memory: int = 512 * 2**20
    workers: int | None = None
    tmp_dir: str | None = None
    engine: str = "local"
    master: str | None = None
    bad_lines: str = "stop"
    allowed: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_spark = self.engine == "spark"
        for name, is_valid, expected in (
            ("nranks", 1 <= self.nranks <= MOST_RANKS, f"1 to {MOST_RANKS}"),
            ("memory", self.memory >= LEAST, f"at least {LEAST // 2**20}M"),
            ("workers", self.workers is None or 1 <= self.workers <= 64, "1 to 64"),
            ("output_name", re.fullmatch(r"(\w[\w.-]*)?", self.output_name or ""), "letters, digits, _.-"),
            ("engine", is_spark or self.engine == "local", "local or spark"),
            ("master", is_spark or not self.master, "none without engine spark"),
            ("bad_lines", self.bad_lines in ("stop", "skip"), "stop or skip"),
        ):
            if not is_valid:
                raise OptionError(f"{name} is {getattr(self, name)!r}; expected {expected}")

    @property
    def output(self) -> str:
        """Folder or URL of the output."""
        given = self.output_dir or posixpath.join(self.data_dir, f"partition_{self.nranks}")
        return given if is_url(given) else str(Path(given).expanduser().absolute())

    @property
    def budget(self) -> Budget:
        """The memory, divided among the workers."""
        cores = len(os.sched_getaffinity(0))
        return Budget(self.memory, min(self.workers or min(8, cores), self.memory // _LEAST_OF_WORKER))

    @property
    def skip_bad(self) -> bool:
        """Whether invalid lines are skipped."""
        return self.bad_lines == "skip"


def partition(options: PartitionOptions) -> dict[str, Any]:
    """Shuffle the lines of the inputs and write them to nranks files with equal numbers of lines.

    Returns the manifest, which is also in the output folder. The folder is published atomically. Raises
    DataError (bad line, missing file, existing output, full disk) and OptionError.
    """
    inputs, output = list_inputs(options.data_dir, options.file_list, options.allowed), options.output
    if is_url(output) and not (store := _open_store(output)).can_rename:
        store.make_folder()  # fails early if the bucket does not exist
    refuse_existing(output)
    with _output_named(output), ExitStack() as stack:
        workspace, temporary = _claim(output, options.tmp_dir, stack)
        if options.engine == "spark":
            manifest = _run_on_spark(options, inputs, workspace)
        else:
            manifest = _write(options, inputs, workspace.path, temporary)
            for one in inputs:
                one.check_unchanged()
            if is_url(output):
                names = [*(part["name"] for part in manifest["parts"]), FILE_LIST, MANIFEST]
                with staged(output, _open_store, names) as target:
                    _upload(workspace.path, target, names)
            else:
                workspace.publish(Path(output))
    return manifest


def _write(options: PartitionOptions, inputs: list[Input], folder: Path, temporary: Path) -> dict[str, Any]:
    """Write the parts, their list and the manifest to `folder`, which is not published yet."""
    budget, seed, nranks, skip_bad = options.budget, options.seed, options.nranks, options.skip_bad
    expected = sum(one.size for one in inputs)
    spread = local.BucketWriter(temporary, seed, local.bits_for(expected, budget))
    with spread:
        counts = local.distribute(inputs, spread, budget, skip_bad, Counter("read", expected, "MB").add)
    lines = _report(counts).lines
    names = part_names(nranks, options.output_name)
    size = sum(one.content_bytes for one in counts)
    progress = Counter("written", size, "MB")
    with pool_of(budget.workers) as pool:
        parts = Parts([folder / name for name in names], lines_per_rank(lines, nranks), progress.add)
        writer = local.Writer(seed, parts, padding_lines(seed, lines, nranks))
        local.write_buckets(spread.buckets, writer, seed, budget, pool)
        writer.pad()
    return _write_manifest(folder, seed, inputs, counts, names, parts.sizes, parts.checksums)


def _run_on_spark(options: PartitionOptions, inputs: list[Input], workspace: Workspace) -> dict[str, Any]:
    """Let the Spark executors write the parts to their final place, then add the manifest and publish."""
    from plsc.data.partition import spark  # optional extra

    names, folder = part_names(options.nranks, options.output_name), workspace.path

    def finish(target: str) -> dict[str, Any]:
        with spark.session(options.master, options.memory, options.tmp_dir) as context:
            counts, sizes, checksums = spark.write(
                context, inputs, target, names, options.seed, options.skip_bad
            )
        for one in inputs:
            one.check_unchanged()
        _report(counts)
        for stray in folder.glob(f"{SAVING}{options.output_name or 'part_'}*"):
            stray.unlink()  # left by a killed task that was repeated elsewhere
        return _write_manifest(folder, options.seed, inputs, counts, names, sizes, checksums)

    if not is_url(options.output):
        manifest = finish(str(folder))
        workspace.publish(Path(options.output))
        return manifest
    with staged(options.output, _open_store, [*names, FILE_LIST, MANIFEST]) as target:
        manifest = finish(target)
        _upload(folder, target, [FILE_LIST, MANIFEST])
    return manifest


def _write_manifest(
    folder: Path,
    seed: int,
    inputs: list[Input],
    counts: list[InputCount],
    names: list[str],
    sizes: list[int],
    checksums: list[int],
) -> dict[str, Any]:
    """Write the manifest and the list of the parts, and return the manifest.

    counts: of the inputs; names, sizes, checksums: of the parts (see parts.checksum).
    """
    total, nranks = total_of(counts), len(names)
    each = lines_per_rank(total.lines, nranks)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "algorithm": ALGORITHM,
        "seed": seed,
        "nranks": nranks,
        "lines": total.lines,
        "lines_per_rank": each,
        "padding_lines": each * nranks - total.lines,
        "blank_lines": total.blanks,
        "skipped_lines": total.skipped,
        "inputs": [
            {
                "name": one.name,
                "size": one.size,
                "lines": count.lines,
                "content_bytes": count.content_bytes,
                "checksum": f"{count.checksum:016x}",
            }
            for one, count in zip(inputs, counts, strict=True)
        ],
        "parts": [
            {"name": name, "size": size, "checksum": f"{checksum:016x}"}
            for name, size, checksum in zip(names, sizes, checksums, strict=True)
        ],
    }
    (folder / FILE_LIST).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _report(counts: list[InputCount]) -> InputCount:
    """Log skipped lines; return the sum of the counts. Raises DataError if there are no samples."""
    total = total_of(counts)
    if total.lines == 0:
        raise DataError("the listed files contain no samples; expected lines of '<base64>TAB<label>'")
    if total.blanks:
        logger.warning(f"skipped: {total.blanks} blank lines")
    for message in total.messages:
        logger.warning(f"skipped: {message}")
    if total.skipped > len(total.messages):
        logger.warning(f"skipped: {total.skipped - len(total.messages)} more lines")
    return total


def _claim(output: str, tmp_dir: str | None, stack: ExitStack) -> tuple[Workspace, Path]:
    """Return the workspace of the output, and a folder for temporary files."""
    digest = hashlib.sha256(output.encode()).hexdigest()[:16]
    if is_url(output):
        parent = Path(tmp_dir or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        workspace = stack.enter_context(Workspace(parent, f"output_{digest}", 0o700))
    else:
        workspace = stack.enter_context(Workspace(Path(output).parent, Path(output).name))
        parent = Path(tmp_dir).absolute() if tmp_dir else workspace.path.parent
    buckets = stack.enter_context(Workspace(parent, f"buckets_{digest}", 0o700))
    return workspace, buckets.path


def _upload(folder: Path, target: str, names: list[str]) -> None:
    store = _open_store(target)
    progress = Counter("uploaded", sum((folder / name).stat().st_size for name in names), "MB")
    for name in names:
        store.put(folder / name, name, progress.add)


@contextmanager
def _output_named(output: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{shown(output)} cannot be written ({error.strerror or error}); nothing was published. "
            "--output_dir and --tmp_dir choose another disk"
        ) from error


# Verification.


class _Part(TypedDict):
    name: FileName
    size: int
    checksum: str


class _Counted(TypedDict):
    name: Text
    lines: int
    content_bytes: int
    checksum: str


class _Manifest(TypedDict):
    format: Literal["plsc-partition-1"]
    algorithm: Literal["splitmix64-order-1"]
    nranks: int
    seed: Annotated[int, (-(2**63), 2**63)]
    lines: Annotated[int, (1, 2**62)]
    lines_per_rank: int
    skipped_lines: int
    inputs: list[_Counted]
    parts: list[_Part]


def verify(options: PartitionOptions) -> dict[str, Any]:
    """Check that an output has the lines of its inputs and the padding; return its manifest.

    Raises DataError that names the damaged part, the changed input, or the mismatch.
    """
    output, nranks = options.output, options.nranks
    location = join(output, MANIFEST)
    with streamed(location, output) as file:
        data = file.read(_MOST_MANIFEST)
    manifest = read_record(_Manifest, data, shown(location), DataError, _MOST_MANIFEST)
    seed, lines, each = manifest["seed"], manifest["lines"], manifest["lines_per_rank"]
    found = manifest["nranks"], len(manifest["parts"]), each
    if found != (wanted := (nranks, nranks, lines_per_rank(lines, nranks))):
        raise DataError(f"{shown(location)}: nranks, parts and lines per part are {found}; expected {wanted}")
    names = [part["name"] for part in manifest["parts"]]
    files: list[File] = [
        (f"{shown(output)}/{name}", partial(streamed, join(output, name), output)) for name in names
    ]
    parts = [(each, part["size"], part["checksum"]) for part in manifest["parts"]]
    written = _digest(options.budget, "read of the parts", files, parts, {}, False)
    inputs = list_inputs(options.data_dir, options.file_list, options.allowed)
    numbers, times = np.unique(padding_lines(seed, lines, nranks), return_counts=True)
    extra = dict(zip(numbers.tolist(), times.tolist(), strict=True))
    files = [(one.name, one.open) for one in inputs]
    known = [(one["lines"], one["content_bytes"], one["checksum"]) for one in manifest["inputs"]]
    skip_bad = bool(manifest["skipped_lines"])
    if written != _digest(options.budget, "read of the inputs", files, known, extra, skip_bad):
        raise DataError(
            f"the lines of {shown(output)} differ from its inputs and padding; run the partition again"
        )
    return {**manifest}


File = tuple[str, Callable[[], AbstractContextManager[Any]]]
"""Name and how to open it."""


def _digest(
    budget: Budget,
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
    total = first = 0
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

    progress = Counter(what, sum(size for _, size, _ in known), "MB")
    with pool_of(budget.workers) as pool:
        for number, (name, open_file) in enumerate(files):
            count = InputCount()
            with open_file() as stream:
                samples = read_counted(stream, name, count, buffers, skip_bad, progress.add)
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
