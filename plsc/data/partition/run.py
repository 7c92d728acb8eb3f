"""A partition from its options to the published folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.data.partition import manifest as manifests
from plsc.data.partition import remote
from plsc.data.partition.buckets import Bucket, Spread
from plsc.data.partition.by_buckets import Sorter, Spreader, bits_for, fitting_buckets
from plsc.data.partition.counts import Counts
from plsc.data.partition.indexing import Index, TooManyLines
from plsc.data.partition.inputs import Input, list_inputs
from plsc.data.partition.options import PartitionOptions
from plsc.data.partition.order import lines_per_rank
from plsc.data.partition.padding import Padding, warning_of_repeats
from plsc.data.partition.parallel import pool_of
from plsc.data.partition.parts import Parts
from plsc.data.partition.progress import Progress
from plsc.data.partition.space import Space
from plsc.data.partition.survey import survey
from plsc.data.partition.within_memory import fits, gather, index_inputs
from plsc.errors import DataError
from plsc.storage.publish import SAVING, Workspace, staged
from plsc.storage.urls import base_name, is_url, parent_of, shown

_SYNCERS = 2  # one may wait for a part to be on the disk while the other starts the next
_EXPANSION = 4  # how much larger compressed inputs are taken to be, until they have been read


def partition(options: PartitionOptions) -> dict[str, Any]:
    """Shuffle the lines of the inputs and write them to nranks files of equal line count.

    Returns the manifest, which also stands in the output folder. That folder appears under its name when all
    of it is written, or not at all; inputs are only read. Raises DataError (a bad line, a file missing, an
    output that exists, a disk that is full) and OptionError.
    """
    inputs = list_inputs(options.data_dir, options.file_list)
    _refuse_existing(options.output)
    if options.dry_run:
        return survey(options, inputs)
    with Progress() as progress, _full_disk_told(options.output), ExitStack() as stack:
        workspace, temporary = _claim(options, stack)
        if workspace.cleaned:
            progress.say(f"removed what a run that was stopped had left in {workspace.path}")
        if options.engine == "spark":
            manifest = _run_on_spark(options, inputs, workspace, progress)
        else:
            manifest = _write(options, inputs, workspace.path, temporary, progress)
            _check_unchanged(inputs)
            if is_url(options.output):
                remote.publish(workspace.path, options.output, manifest, progress)
            else:
                workspace.publish(Path(options.output), is_synced=not options.no_sync)
    if options.delete_inputs:
        for one in inputs:
            remote.open_store(parent_of(one.location)).delete(base_name(one.location))
    return manifest


def _write(
    options: PartitionOptions,
    inputs: list[Input],
    folder: Path,
    temporary: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Write the parts, their list and the manifest into `folder`, which is not published yet."""
    with pool_of(_SYNCERS) as syncer:
        target = _Target(options, folder, progress, syncer)
        found = _index_if_it_fits(options, inputs, folder, progress)
        if found is not None:
            index, counts = found
            parts, padding = target.open(counts)
            gather(index, inputs, options.seed, parts, padding, options.budget.copiers)
        else:
            buckets, counts = _spread(options, inputs, folder, temporary, progress)
            parts, padding = target.open(counts)
            fitting = list(fitting_buckets(buckets, temporary, options.seed, options.budget))
            Sorter(options.seed, parts, padding, options.budget).run(fitting)
        parts.finish()
    _tell(counts, options.nranks, progress)
    manifest = manifests.build(options, counts, parts, len(padding))
    manifests.write(folder, manifest)
    return manifest


def _run_on_spark(
    options: PartitionOptions, inputs: list[Input], workspace: Workspace, progress: Progress
) -> dict[str, Any]:
    """Let the executors write the parts where they will stay, then add the manifest and publish."""
    from plsc.data.partition import spark  # an extra

    def finish(target: str) -> dict[str, Any]:
        counts, parts, padding = spark.write(options, inputs, target)
        _check_unchanged(inputs)
        _tell(counts, options.nranks, progress)
        for stray in workspace.path.glob(f"{SAVING}part_*"):
            stray.unlink()  # of a task that was killed, and run again elsewhere
        manifest = manifests.build(options, counts, parts, padding)
        manifests.write(workspace.path, manifest)
        return manifest

    if not is_url(options.output):
        manifest = finish(str(workspace.path))
        workspace.publish(Path(options.output))
        return manifest
    with staged(options.output, remote.open_store) as target:
        manifest = finish(target)
        last = [manifests.FILE_LIST, manifests.NAME]
        remote.put(workspace.path, target, last, progress)
    return manifest


def _check_unchanged(inputs: list[Input]) -> None:
    for one in inputs:
        one.check_unchanged()


def _index_if_it_fits(
    options: PartitionOptions, inputs: list[Input], folder: Path, progress: Progress
) -> tuple[Index, Counts] | None:
    budget, total = options.budget, expected_bytes(inputs)
    if not fits(inputs, budget.total, budget.workers):
        return None
    Space(folder, None).check(total, 0)
    progress.begin("reading", total)
    with contextlib.suppress(TooManyLines):
        return index_inputs(inputs, budget.total, budget.workers, options.skip_bad, progress)
    return None


def _spread(
    options: PartitionOptions,
    inputs: list[Input],
    folder: Path,
    temporary: Path,
    progress: Progress,
) -> tuple[list[Bucket], Counts]:
    budget, total = options.budget, expected_bytes(inputs)
    space = Space(folder, temporary)
    space.check(total, budget.workers * budget.bucket)
    progress.begin("reading", total)
    with Spread(temporary, options.seed, bits_for(total, budget)) as spread:
        spreader = Spreader(spread, budget, temporary, options.skip_bad, progress, space)
        return spread.buckets, spreader.run(inputs)


@dataclass(frozen=True)
class _Target:
    """Where the parts go, once it is known how many lines there are."""

    options: PartitionOptions
    folder: Path
    progress: Progress
    syncer: Executor

    def open(self, counts: Counts) -> tuple[Parts, Padding]:
        """Return the parts and what pads them. Raises DataError if there is nothing to write."""
        nranks = self.options.nranks
        if counts.lines == 0:
            raise DataError(
                f"the files of {self.options.file_list} hold no samples; expected lines of "
                "'<base64>TAB<label>'"
            )
        self.progress.begin("writing", sum(one.content_bytes for one in counts.inputs))
        each = lines_per_rank(counts.lines, nranks)
        syncer = None if self.options.no_sync else self.syncer
        parts = Parts(self.folder, nranks, each, self.progress.add, syncer)
        return parts, Padding(self.options.seed, counts.lines, nranks)


def expected_bytes(inputs: list[Input]) -> int:
    """Return how many bytes of lines there will be; exact when no input is compressed."""
    return sum(one.size * (_EXPANSION if one.compression else 1) for one in inputs)


def _tell(counts: Counts, nranks: int, progress: Progress) -> None:
    if warning := warning_of_repeats(counts.lines, nranks):
        progress.say(warning)
    if counts.blanks:
        progress.say(f"{counts.blanks} blank lines were left out")
    for message in counts.messages:
        progress.say(f"skipped: {message}")
    if counts.skipped > len(counts.messages):
        progress.say(f"skipped: {counts.skipped - len(counts.messages)} more lines")


def _claim(options: PartitionOptions, stack: ExitStack) -> tuple[Workspace, Path]:
    """Return the folder that becomes the output, and one for temporary files."""
    output = options.output
    digest = hashlib.sha256(output.encode()).hexdigest()[:16]
    if is_url(output):
        parent = Path(options.tmp_dir or tempfile.gettempdir()).absolute()
        workspace = stack.enter_context(Workspace(parent, f"output_{digest}"))
    else:
        workspace = stack.enter_context(Workspace(Path(output).parent, Path(output).name))
        parent = Path(options.tmp_dir).absolute() if options.tmp_dir else workspace.path.parent
    buckets = stack.enter_context(Workspace(parent, f"buckets_{digest}"))
    return workspace, buckets.path


def _refuse_existing(output: str) -> None:
    exists = (
        remote.exists(output)
        if is_url(output)
        else Path(output).exists() or Path(output).is_symlink()
    )
    if exists:
        raise DataError(
            f"{shown(output)} exists already and is not overwritten; take it away or choose another "
            "--output_dir"
        )


@contextmanager
def _full_disk_told(output: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"the disk is full ({error.strerror}) while {shown(output)} was written; what was written is "
                "removed again. Free some space or choose another --output_dir or --tmp_dir"
            ) from error
        raise DataError(f"{shown(output)} cannot be written: {error.strerror or error}") from error
