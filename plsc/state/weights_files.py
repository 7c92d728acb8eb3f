"""Open, save and close the file of class weights of a run (`head.weights_file`) with its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from plsc.checkpoint.all_ranks import on_every_rank
from plsc.checkpoint.load import OpenCheckpoint, StoredTensor
from plsc.checkpoint.manifest import CLASS_OPTIMIZER, CLASS_WEIGHTS, Role
from plsc.checkpoint.rollback import mark_of
from plsc.checkpoint.weights_file import WeightsFile
from plsc.errors import CheckpointError
from plsc.heads import Head
from plsc.parallel.world import World
from plsc.run.classes import OpenedCheckpoint

_ROWS = 2**16  # class weights that are copied at a time


def file_of(head: Head) -> WeightsFile | None:
    """Return the file of the class weights; None if they are in memory."""
    return head.file if isinstance(head.file, WeightsFile) else None


@contextlib.contextmanager
def opened_file(head: Head, world: World, checkpoint: OpenedCheckpoint | None) -> Iterator[None]:
    """Open the file at the state of a checkpoint, or a new one, and close it at the end; a collective.

    If the checkpoint itself has class weights (`plsc checkpoint copy`), a new file is filled with them.

    Raises CheckpointError on all ranks if a folder cannot be used, or does not have that state.
    """
    file = file_of(head)
    if file is None:
        yield
        return
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
    with OpenCheckpoint(*checkpoint) as stored:
        _fill(file, stored.select((CLASS_WEIGHTS, CLASS_OPTIMIZER), world.rank, world.size))
    file.begin(mark)
    file.forget(mark)


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
