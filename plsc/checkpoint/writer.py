"""Writes a rank's part of a checkpoint for torch.distributed.checkpoint, one tensor after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from plsc.checkpoint.manifest import FileInfo
from plsc.checkpoint.shard_file import Entry, tensor_chunks, write_shard


class ShardWriter(dcp.StorageWriter):
    """Writes `folder / name`; afterwards `written` holds its size and checksum, if there was anything.

    torch's own safetensors writer serialises a rank's whole part in memory first, and its file would have
    to be read again for the checksum. torch's reader reads what this one writes.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self.written: dict[str, FileInfo] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Raises OSError such as a full disk."""
        entries = [_entry(item, planner) for item in plan.items]
        if entries:
            self.written[self._path.name] = write_shard(self._path, entries)
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                WriteResult(item.index, entry.size, None)
                for item, entry in zip(plan.items, entries, strict=True)
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the manifest is written by `plsc.checkpoint.save`."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return that any will do; none is used."""
        return True


def _entry(item: WriteItem, planner: SavePlanner) -> Entry:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is no tensor")
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return Entry(
        item.index.fqn,
        tensor.dtype,
        tuple(tensor.shape),
        tuple(item.tensor_data.chunk.offsets),
        tensor_chunks(tensor),
    )
