"""Class weights in files (`head.weights_file`) and checkpoints: open them at one, copy them into one."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from plsc.checkpoint.load import OpenCheckpoint, StoredTensor, check_checksums, check_files
from plsc.checkpoint.manifest import (
    CLASS_OPTIMIZER,
    CLASS_WEIGHTS,
    MANIFEST_NAME,
    Entry,
    FileInfo,
    Manifest,
    OpenedCheckpoint,
    Role,
    TensorInfo,
    bytes_of,
    read_manifest,
    shard_name,
    write_shard,
)
from plsc.checkpoint.rollback import mark_of
from plsc.checkpoint.save import check_destination
from plsc.checkpoint.weights_file import WeightsFile, rank_folder
from plsc.errors import CheckpointError
from plsc.parallel.failure import on_every_rank
from plsc.parallel.world import World
from plsc.storage.publish import publishing_folder

_ROWS = 2**16  # class weights that are copied at a time


@contextmanager
def opened_at(file: WeightsFile, world: World, checkpoint: OpenedCheckpoint | None) -> Iterator[None]:
    """Open the files of all ranks at the state of a checkpoint, or new ones, and close them at the end.

    If the checkpoint itself has class weights (from `copy_complete`), new files are filled with them. Raises
    CheckpointError on all ranks if a folder cannot be used, or does not have that state.
    """
    with file:
        on_every_rank(world, "open the class weights", lambda: _open(file, world, checkpoint))
        yield


def _open(file: WeightsFile, world: World, checkpoint: OpenedCheckpoint | None) -> None:
    if checkpoint is None:
        file.open()
        return
    mark = mark_of(checkpoint[1].step, checkpoint[1].run_id)
    is_complete = Role(CLASS_WEIGHTS, "weight").key in checkpoint[1].tensors
    if file.has(mark) or not is_complete:
        file.open(mark)
        return
    file.open()
    stored = OpenCheckpoint(*checkpoint).select((CLASS_WEIGHTS, CLASS_OPTIMIZER), world.rank, world.size)
    _fill(file, stored)  # without a mark: that of a copy with other classes is the same


def _fill(file: WeightsFile, stored: dict[Role, StoredTensor]) -> None:
    """Write the class weights and states of a checkpoint to a new file."""
    weight = Role(CLASS_WEIGHTS, "weight")
    tensors = {}
    for name, column in file.columns.items():
        role = weight if name == "weight" else Role(CLASS_OPTIMIZER, name, weight.key)
        found = stored.get(role)
        if found is None or (found.dtype, found.shape[1:]) != (column.dtype, column.shape):
            raise CheckpointError(
                f"the checkpoint has no {role.key} of {column.dtype} {list(column.shape)} per class; use the "
                "embedding size, data types and optimizer of the class weights that were saved"
            )
        tensors[name] = found
    first = file.classes.start
    for rows in file.pieces(_ROWS):
        file.hold(rows)
        values = {
            name: torch.empty(len(rows), *column.shape, dtype=column.dtype)
            for name, column in file.columns.items()
        }
        for name, value in values.items():
            tensors[name].read_into(value, first + int(rows[0]))
        file.write(rows, values)


def copy_complete(source: Path, destination: Path, weights_file: Path) -> Manifest:
    """Copy a checkpoint with its class weights, so that it needs no files; return the new manifest.

    The files are set back to the state of the checkpoint, as when it is resumed. They must not be in use.

    weights_file: the folder of `head.weights_file`, with the files of all ranks.

    Raises:
        CheckpointError: a part is missing or damaged; nothing is published.
        OptionError: the destination cannot be created, or a run uses the files.
    """
    check_destination(source, destination)
    manifest = read_manifest(source)
    check_files(source, manifest)
    check_checksums(source, manifest, sorted(manifest.files))
    tensors, files = dict(manifest.tensors), dict(manifest.files)
    with publishing_folder(destination) as temporary:
        for name in manifest.files:
            shutil.copyfile(source / name, temporary / name)
        for rank, file in _files_of(manifest, weights_file):
            path = temporary / shard_name(rank, "weights")
            infos, files[path.name] = _write(file, manifest, path)
            tensors |= infos
        result = dataclasses.replace(manifest, tensors=tensors, files=files)
        (temporary / MANIFEST_NAME).write_text(result.to_json(), encoding="utf-8")
    return result


def _files_of(manifest: Manifest, folder: Path) -> Iterator[tuple[int, WeightsFile]]:
    """Yield the rank and file of all class weights of a checkpoint that are not in itself."""
    if Role(CLASS_WEIGHTS, "weight").key not in manifest.tensors:
        for rank, (start, stop) in enumerate(manifest.head.class_ranges):
            if start < stop or not rank:
                path = rank_folder(folder, rank)
                yield rank, WeightsFile.existing(path, range(start, stop), manifest.emb_size)


def _write(file: WeightsFile, manifest: Manifest, path: Path) -> tuple[dict[str, TensorInfo], FileInfo]:
    weight, class_num = Role(CLASS_WEIGHTS, "weight"), manifest.head.class_num
    with file:
        file.open(mark_of(manifest.step, manifest.run_id))
        infos, entries = {}, []
        for name, column in file.columns.items():
            role = weight if name == "weight" else Role(CLASS_OPTIMIZER, name, weight.key)
            kind = str(column.dtype).removeprefix("torch.")
            infos[role.key] = TensorInfo((class_num, *column.shape), kind, True, role)
            of_rank = (len(file.classes), *column.shape)
            entries.append(
                Entry(role.key, column.dtype, of_rank, file.classes.start, partial(_chunks, file, name))
            )
        return infos, write_shard(path, entries)


def _chunks(file: WeightsFile, name: str) -> Iterator[memoryview]:
    for rows in file.pieces(_ROWS):
        yield bytes_of(file.read(rows, name)).numpy().data
