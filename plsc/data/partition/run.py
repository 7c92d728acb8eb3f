"""Run a partition: from its options to the published folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.data.partition import local
from plsc.data.partition.inputs import (
    Input,
    InputCount,
    list_inputs,
    pool_of,
    progress_bar,
    read_counted,
    total_of,
)
from plsc.data.partition.options import PartitionOptions
from plsc.data.partition.order import ALGORITHM, lines_per_rank, padding_lines
from plsc.data.partition.parts import Parts, part_names
from plsc.errors import DataError
from plsc.storage.publish import SAVING, Workspace, refuse_existing
from plsc.storage.store import staged
from plsc.storage.urls import base_name, is_url, local_path, parent_of, shown

if TYPE_CHECKING:
    from plsc.storage.store import Store

logger = logging.getLogger(__name__)
MANIFEST = "manifest.json"
FILE_LIST = "file_list.txt"
FORMAT = "plsc-partition-1"
_EXPANSION = 4  # assumed compression ratio of compressed inputs, until they have been read
_SILENCE = 300.0  # seconds without progress before the upload of a large piece is abandoned


def partition(options: PartitionOptions) -> dict[str, Any]:
    """Shuffle the lines of the inputs and write them to nranks files with equal numbers of lines.

    Returns the manifest, which is also in the output folder. The folder is published atomically. Inputs are
    only deleted with ``delete_inputs``. Raises DataError (bad line, missing file, existing output, full disk)
    and OptionError.
    """
    inputs = list_inputs(options.data_dir, options.file_list, options.allowed)
    _refuse_existing(options.output)
    if options.dry_run:
        return _dry_run(options, inputs)
    with _output_named(options.output), ExitStack() as stack:
        workspace, temporary = _claim(options, stack)
        if workspace.cleaned:
            logger.warning(f"removed the files of an earlier, interrupted run in {workspace.path}")
        if options.engine == "spark":
            manifest = _run_on_spark(options, inputs, workspace)
        else:
            manifest = _write(options, inputs, workspace.path, temporary)
            _check_unchanged(inputs)
            if is_url(options.output):
                names = [part["name"] for part in manifest["parts"]]
                names += [FILE_LIST, MANIFEST]
                with staged(options.output, _open_store, names) as target:
                    _upload(workspace.path, target, names)
            else:
                workspace.publish(Path(options.output), is_synced=not options.no_sync)
    if options.delete_inputs and manifest["skipped_lines"]:
        logger.warning("the inputs are not deleted: lines of them were skipped, and are in no output")
        return manifest
    for one in inputs if options.delete_inputs else ():
        if _is_inside(one.location, options.data_dir):
            one.check_unchanged()
            _open_store(parent_of(one.location)).delete(base_name(one.location))
        else:
            logger.warning(f"{one.name} is not deleted: it is outside {shown(options.data_dir)}")
    return manifest


def _is_inside(location: str, folder: str) -> bool:
    if is_url(location):
        return location.startswith(f"{folder.rstrip('/')}/")
    return Path(location).resolve().is_relative_to(Path(local_path(folder)).resolve())


def _dry_run(options: PartitionOptions, inputs: list[Input]) -> dict[str, Any]:
    """Read and check all lines without writing; return the counts of a manifest."""
    buffers, counts = options.budget.buffers(1), []
    with progress_bar("reading", None) as progress:
        for one in inputs:
            counts.append(InputCount())
            with one.open() as stream:
                for lines in read_counted(
                    stream, one.name, counts[-1], buffers, options.skip_bad, progress.update
                ):
                    buffers.give_back(lines.data)
    total = _report(counts, options)
    return _counts_of(options, total) | {"content_bytes": total.content_bytes}


def _write(options: PartitionOptions, inputs: list[Input], folder: Path, temporary: Path) -> dict[str, Any]:
    """Write the parts, their list and the manifest to `folder`, which is not published yet."""
    budget = options.budget
    expected = sum(one.size * (_EXPANSION if one.compression else 1) for one in inputs)
    with pool_of(budget.workers) as pool:
        loaded: local.Loaded | None = None
        buckets: list[local.Bucket] = []
        with progress_bar("reading", expected) as progress:
            if local.fits(inputs, budget):
                with contextlib.suppress(local.TooManyLines):
                    loaded, counts = local.map_inputs(inputs, options, progress.update, pool)
            if loaded is None:
                buckets, counts = local.distribute_inputs(
                    inputs, options, expected, temporary, progress.update
                )
        lines = _report(counts, options).lines
        padding = padding_lines(options.seed, lines, options.nranks)
        with progress_bar("writing", sum(one.content_bytes for one in counts)) as progress:
            each = lines_per_rank(lines, options.nranks)
            names = part_names(options.nranks, options.output_name)
            parts = Parts([folder / name for name in names], each, progress.update)
            writer = local.Writer(options.seed, parts, padding)
            if loaded is not None:
                writer.write([loaded], pool)
            else:
                local.write_buckets(buckets, writer, options.seed, budget, pool)
            writer.pad()
    manifest = _manifest(options, inputs, counts, parts.sizes, parts.checksums)
    _write_manifest(folder, manifest)
    return manifest


def _run_on_spark(options: PartitionOptions, inputs: list[Input], workspace: Workspace) -> dict[str, Any]:
    """Let the Spark executors write the parts to their final place, then add the manifest and publish."""
    from plsc.data.partition import spark  # optional extra

    def finish(target: str) -> dict[str, Any]:
        counts, sizes, checksums = spark.write(options, inputs, target)
        _check_unchanged(inputs)
        _report(counts, options)
        for stray in workspace.path.glob(f"{SAVING}{options.output_name or 'part_'}*"):
            stray.unlink()  # left by a killed task that was repeated elsewhere
        manifest = _manifest(options, inputs, counts, sizes, checksums)
        _write_manifest(workspace.path, manifest)
        return manifest

    if not is_url(options.output):
        manifest = finish(str(workspace.path))
        workspace.publish(Path(options.output))
        return manifest
    names = [*part_names(options.nranks, options.output_name), FILE_LIST, MANIFEST]
    with staged(options.output, _open_store, names) as target:
        manifest = finish(target)
        _upload(workspace.path, target, [FILE_LIST, MANIFEST])
    return manifest


def _counts_of(options: PartitionOptions, total: InputCount) -> dict[str, int]:
    each = lines_per_rank(total.lines, options.nranks)
    return {
        "seed": options.seed,
        "nranks": options.nranks,
        "lines": total.lines,
        "lines_per_rank": each,
        "padding_lines": each * options.nranks - total.lines,
        "blank_lines": total.blanks,
        "skipped_lines": total.skipped,
    }


def _manifest(
    options: PartitionOptions,
    inputs: list[Input],
    counts: list[InputCount],
    sizes: list[int],
    checksums: list[int],
) -> dict[str, Any]:
    """Return the manifest. counts: of the inputs; sizes, checksums: of the parts (see parts.checksum)."""
    return {
        "format": FORMAT,
        "algorithm": ALGORITHM,
        **_counts_of(options, total_of(counts)),
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
            for name, size, checksum in zip(
                part_names(options.nranks, options.output_name), sizes, checksums, strict=True
            )
        ],
    }


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    names = [part["name"] for part in manifest["parts"]]
    (folder / FILE_LIST).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _check_unchanged(inputs: list[Input]) -> None:
    for one in inputs:
        one.check_unchanged()


def _report(counts: list[InputCount], options: PartitionOptions) -> InputCount:
    """Log skipped lines, and a warning if most lines of the parts are padding. Return the sum of the counts.

    Raises DataError if there are no samples.
    """
    total, nranks = total_of(counts), options.nranks
    if total.lines == 0:
        raise DataError(
            f"the files of {options.file_list} contain no samples; expected lines of '<base64>TAB<label>'"
        )
    each = lines_per_rank(total.lines, nranks)
    repeats = each * nranks - total.lines
    if repeats > total.lines:
        logger.warning(
            f"{repeats} of the {each * nranks} lines of the parts are repeats of the {total.lines} input "
            "lines; use a smaller --nranks to repeat fewer"
        )
    if total.blanks:
        logger.warning(f"skipped: {total.blanks} blank lines")
    for message in total.messages:
        logger.warning(f"skipped: {message}")
    if total.skipped > len(total.messages):
        logger.warning(f"skipped: {total.skipped - len(total.messages)} more lines")
    return total


def _claim(options: PartitionOptions, stack: ExitStack) -> tuple[Workspace, Path]:
    """Return the workspace of the output, and a folder for temporary files."""
    output = options.output
    digest = hashlib.sha256(output.encode()).hexdigest()[:16]
    if is_url(output):
        parent = Path(options.tmp_dir or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        workspace = stack.enter_context(Workspace(parent, f"output_{digest}", 0o700))
    else:
        workspace = stack.enter_context(Workspace(Path(output).parent, Path(output).name))
        parent = Path(options.tmp_dir).absolute() if options.tmp_dir else workspace.path.parent
    buckets = stack.enter_context(Workspace(parent, f"buckets_{digest}", 0o700))
    return workspace, buckets.path


def _refuse_existing(output: str) -> None:
    if is_url(output):
        store = _open_store(output)
        if not store.can_rename:
            store.make_folder()  # fails early if the bucket does not exist
    refuse_existing(output)


def _open_store(url: str) -> Store:
    from plsc.storage.store import Store  # imports fsspec

    return Store(url, silence=_SILENCE)


def _upload(folder: Path, target: str, names: list[str]) -> None:
    store = _open_store(target)
    with progress_bar("uploading", sum((folder / one).stat().st_size for one in names)) as progress:

        def on_bytes(count: int) -> None:
            progress.update(count)

        for one in names:
            store.put(folder / one, one, on_bytes)


@contextmanager
def _output_named(output: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{shown(output)} cannot be written ({error.strerror or error}); nothing was published. "
            "--output_dir and --tmp_dir choose another disk"
        ) from error
