"""Open, save and close the files of class weights of a run (`head.weights_file`) with its checkpoints."""

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
from plsc.heads.joint import Heads
from plsc.parallel.world import World
from plsc.run.classes import OpenedCheckpoint

_ROWS = 2**16  # class weights that are copied at a time


def files_of(heads: Heads) -> dict[str, WeightsFile]:
    """Return the files of class weights by the names of their heads."""
    return {name: head.file for name, head in heads.by_name.items() if isinstance(head.file, WeightsFile)}


@contextlib.contextmanager
def opened_files(heads: Heads, world: World, checkpoint: OpenedCheckpoint | None) -> Iterator[None]:
    """Open the files at the state of a checkpoint, or new ones, and close them at the end; a collective.

    If the checkpoint itself has class weights (`plsc checkpoint copy`), new files are filled with them.

    Raises CheckpointError on all ranks if a folder cannot be used, or does not have that state.
    """
    files = files_of(heads)

    def open_all() -> None:
        for name, file in files.items():
            if checkpoint is None:
                file.open()
                continue
            mark = mark_of(checkpoint[1].step, checkpoint[1].run_id)
            is_complete = Role(CLASS_WEIGHTS, "weight", name).key in checkpoint[1].tensors
            if file.has(mark) or not is_complete:
                file.open(mark)
                continue
            file.open()
            with OpenCheckpoint(*checkpoint) as stored:
                _fill(file, stored.select((CLASS_WEIGHTS, CLASS_OPTIMIZER), world.rank, world.size), name)
            file.begin(mark)
            file.forget(mark)

    with contextlib.ExitStack() as stack:
        for file in files.values():
            stack.enter_context(file)
        if files:
            on_every_rank(world, "open the class weights", open_all)
        yield


def _fill(file: WeightsFile, stored: dict[Role, StoredTensor], of: str) -> None:
    """Write the class weights and states of a checkpoint to new files."""
    weight = Role(CLASS_WEIGHTS, "weight", of)
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
