"""Save a checkpoint: write the ranks' data files to a hidden folder, then the manifest, then rename it.

Afterwards, delete old ones: those that are neither among the newest nor among the best by a metric.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plsc.checkpoint.manifest import (
    CLASS_NAMES,
    Entry,
    FileInfo,
    Manifest,
    Role,
    TensorInfo,
    checkpoints_in,
    entry_of,
    manifest_in,
    rank_of_shard,
    shard_name,
    write_shard,
)
from plsc.data.class_names import ClassNames
from plsc.errors import CheckpointError, OptionError, shown
from plsc.parallel.failure import on_every_rank
from plsc.parallel.world import World, host_copies
from plsc.storage.disk import MANIFEST_NAME, hidden_name
from plsc.storage.store import Store, publish, withdraw

BEST_NAME = "best.json"
_ADVICE = "nothing was published, and earlier checkpoints are intact"


@dataclass(frozen=True)
class ShardedTensor:
    """This rank's rows of a tensor whose rows are sharded over the ranks.

    Attributes:
        local: [local rows, ...]; may have no rows.
        rows: number of rows of the whole tensor.
        start: index of the first local row.
    """

    local: Tensor
    rows: int
    start: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (self.rows, *self.local.shape[1:])


Tensors = Mapping[Role, Tensor | ShardedTensor]


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one step on this rank. The manifest lacks only tensors and files."""

    tensors: Tensors
    manifest: Manifest

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensors."""
        return sum(local_of(value).nbytes for value in self.tensors.values())

    def copy_to_host(self) -> Snapshot:
        """Return a copy in host memory, which further training does not change.

        It needs as much host memory as this rank's state until it is written.
        """
        copied = host_copies(local_of(value).detach() for value in self.tensors.values())
        copies = {
            role: dataclasses.replace(value, local=copy) if isinstance(value, ShardedTensor) else copy
            for (role, value), copy in zip(self.tensors.items(), copied, strict=True)
        }
        return Snapshot(copies, self.manifest)


def local_of(value: Tensor | ShardedTensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return value.local if isinstance(value, ShardedTensor) else value


def info_of(role: Role, value: Tensor | ShardedTensor) -> TensorInfo:
    """Return the manifest's entry for a tensor."""
    dtype = str(local_of(value).dtype).removeprefix("torch.")
    return TensorInfo(tuple(value.shape), dtype, isinstance(value, ShardedTensor), role)


def class_name_tensors(names: ClassNames) -> dict[Role, Tensor]:
    """Return class names as tensors of a checkpoint."""
    text, ends = name_roles()
    return {text: torch.from_numpy(names.text), ends: torch.from_numpy(names.ends)}


def name_roles() -> tuple[Role, Role]:
    """Return the roles of the tensors of class names."""
    return Role(CLASS_NAMES, "bytes"), Role(CLASS_NAMES, "ends")


def save_checkpoint(
    save_dir: str | os.PathLike[str], name: str, snapshot: Snapshot, world: World, *, is_shared: bool = True
) -> Path:
    """Save to ``save_dir / name`` and return that path. Collective.

    Each rank writes one file: its rows of sharded tensors, and the whole tensors that no lower rank has.
    Tensors that differ between ranks need different keys. An older checkpoint of this name is replaced.

    Args:
        is_shared: all ranks use one file system. If False, each machine keeps the files of its own ranks.

    Raises:
        CheckpointError: on all ranks; nothing was published, and earlier checkpoints are intact.
        DistributedError: the connection to another rank was lost; the new checkpoint may or may not be
            published, and earlier checkpoints are intact.
    """
    folder = Path(save_dir) / name
    doing = f"save checkpoint {folder}"
    manifest = snapshot.manifest

    def begin() -> Path:
        hidden = folder.with_name(hidden_name(name))
        if world.is_main:
            _make(hidden, folder, manifest.run_id)
        return hidden

    def describe() -> dict[str, Any]:
        return {role.key: asdict(info_of(role, value)) for role, value in snapshot.tensors.items()}

    temporary = on_every_rank(world, doing, begin, _ADVICE)[0]
    is_owner = world.is_main
    try:
        is_owner = on_every_rank(
            world, doing, lambda: _is_owner(temporary, folder, manifest.run_id, world, is_shared), _ADVICE
        )[world.rank]
        infos = on_every_rank(world, doing, describe, _ADVICE)
        lower = {key for part in infos[: world.rank] for key in part}
        shard = temporary / shard_name(world.rank)
        files = on_every_rank(world, doing, lambda: _write(shard, snapshot, lower), _ADVICE)

        def finish() -> None:
            if is_owner:
                complete = dataclasses.replace(
                    manifest,  # its JSON is the same with dictionaries, which ranks exchange
                    tensors={key: info for part in reversed(infos) for key, info in part.items()},
                    files={name: FileInfo(**info) for part in files for name, info in part.items()},
                )
                # After all files: a folder with a manifest is complete, whenever the process dies.
                finish_folder(Store(folder.parent), temporary.name, name, complete, manifest.run_id)

        on_every_rank(world, doing, finish, _ADVICE)
    finally:
        if is_owner:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _make(temporary: Path, folder: Path, run_id: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_replaceable(Store(folder.parent), folder.name, run_id)
    temporary.mkdir()


def _is_owner(temporary: Path, folder: Path, run_id: str, world: World, is_shared: bool) -> bool:
    """Return whether this rank publishes the folder of its machine."""
    if world.is_main or temporary.is_dir():
        return world.is_main
    if is_shared:
        raise CheckpointError(
            f"{folder.parent} is not the folder that rank 0 uses; save to a file system that all machines "
            "share, or to a remote store (checkpoint.save_dir with a URL)"
        )
    if world.local_rank == 0:
        _make(temporary, folder, run_id)
        return True
    return False


def _write(path: Path, snapshot: Snapshot, lower: Collection[str]) -> dict[str, Any]:
    """Write this rank's file, unless it is empty. lower: keys of the tensors that lower ranks have."""
    entries = []
    for role, value in snapshot.tensors.items():
        if isinstance(value, ShardedTensor):
            is_mine = len(value.local) > 0 or value.rows == 0
            start = value.start
        else:
            is_mine, start = role.key not in lower, 0
        if is_mine:
            entries.append(entry_of(role.key, local_of(value), start))
    return {path.name: asdict(write_shard(path, entries))} if entries else {}


def finish_folder(store: Store, target: str, name: str, manifest: Manifest, run_id: str | None) -> None:
    """Write the manifest of a folder that has all data files, and publish the folder under `name`.

    Raises CheckpointError as `check_replaceable`: another process may have published since it began.
    """
    check_replaceable(store, name, run_id)
    store.write(f"{target}/{MANIFEST_NAME}", manifest.to_json().encode())
    if target != name:
        publish(store, target, name, lambda old: check_replaceable(store, old, run_id))
        return
    for old in set(store.names(name)) - {MANIFEST_NAME, *manifest.files}:
        store.delete(f"{name}/{old}")


def check_replaceable(store: Store, name: str, run_id: str | None = None) -> None:
    """Raise CheckpointError unless `name` is free or holds a checkpoint that may be replaced.

    With `run_id`, only a checkpoint of that run may be replaced. An empty folder may be, and in an
    object store one with only data files; files, links and folders with anything else never are, nor a
    damaged checkpoint, which does not tell whose it is.
    """
    is_link = store.is_link(name)
    inside = [] if is_link else store.names(name)
    is_free = all(file == MANIFEST_NAME or rank_of_shard(file) is not None for file in inside)
    if is_free and MANIFEST_NAME in inside:
        there = None
        with contextlib.suppress(CheckpointError):
            there = manifest_in(store, name).run_id
        is_free = run_id is None or there == run_id
    elif inside:
        is_free = is_free and not store.can_rename
    else:
        is_free = not is_link and (not store.exists(name) or store.size(name) is None)
    if not is_free:
        raise CheckpointError(
            f"{shown(store.child(name))} exists and is not a checkpoint of this run; move it away, or save "
            "elsewhere"
        )


def check_destination(source: Path, destination: Path) -> None:
    """Raise OptionError unless a new checkpoint can be in an existing folder, outside of `source`."""
    is_inside = destination.resolve().is_relative_to(source.resolve())
    if is_inside or not destination.absolute().parent.is_dir():  # a URL, too
        raise OptionError(
            f"{destination.parent} is not a folder, or inside the checkpoint {source}; write next to it"
        )


def write_shards(folder: Path, shards: Sequence[Sequence[Entry]]) -> dict[str, FileInfo]:
    """Write the data files of all ranks from one process; return their sizes and checksums by name.

    Raises CheckpointError, before anything is written, if the disk has too little space.
    """
    needed, free = sum(entry.size for some in shards for entry in some), shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(f"{folder} has {free} bytes free, but {needed} are needed")
    paths = [(folder / shard_name(rank), entries) for rank, entries in enumerate(shards) if entries]
    return {path.name: write_shard(path, entries) for path, entries in paths}


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep: the `last` newest, at least one, and the `top` best by a metric; -1: all.

    Attributes:
        monitor: name of the metric; checkpoints without it do not count as best. None: rank none. The lowest
            loss and the highest value of any other metric are the best.
    """

    last: int = 5
    top: int = 0
    monitor: str | None = None

    def ranking(self, checkpoints: Sequence[tuple[str, Manifest]]) -> list[tuple[str, float]]:
        """Return names and values of the checkpoints that have the metric, best first, then oldest first."""
        rated = [(name, manifest.metrics.get(self.monitor or "")) for name, manifest in checkpoints]
        known = [(name, value) for name, value in rated if value is not None]
        return sorted(known, key=lambda entry: entry[1] if self.monitor == "loss" else -entry[1])

    def kept(self, checkpoints: Sequence[tuple[str, Manifest]]) -> set[str]:
        """Return the names to keep. checkpoints: names and manifests, oldest first."""
        names = [name for name, _ in checkpoints]
        if min(self.last, self.top) < 0:
            return set(names)
        best = [name for name, _ in self.ranking(checkpoints)[: self.top]]
        return {*names[-max(1, self.last) :], *best}


def prune(
    store: Store, retention: Retention, run_id: str = "", protect: Collection[str] = ()
) -> tuple[str, float] | None:
    """Delete the checkpoints of a run that the retention does not keep; return name and value of the best.

    Call from one process. Checkpoints of other runs, those named in `protect`, linked folders and folders
    with other files are unchanged. If the process is killed, no partial checkpoint keeps a published name.
    Raises DataError if one cannot be deleted.
    """
    own = _of_run(store, run_id)
    stay = {*retention.kept(own), *protect}
    doomed = [
        name
        for name, manifest in own
        if name not in stay
        and not store.is_link(name)
        and all(
            file in (MANIFEST_NAME, *manifest.files) or rank_of_shard(file) is not None  # of a killed save
            for file in store.names(name)
        )
    ]
    best = next(iter(retention.ranking([one for one in own if one[0] not in doomed])), None)
    write_best(store, retention.monitor, best)  # before: after a kill, it names nothing that is deleted
    for name in doomed:
        withdraw(store, name)
    return best


def best_in(store: Store, retention: Retention, run_id: str) -> tuple[str, float] | None:
    """Return name and value of a run's best checkpoint; None if none has the metric."""
    return next(iter(retention.ranking(_of_run(store, run_id))), None)


def _of_run(store: Store, run_id: str) -> list[tuple[str, Manifest]]:
    return [(name, manifest) for name, manifest in checkpoints_in(store) if manifest.run_id == run_id]


def write_best(store: Store, metric: str | None, best: tuple[str, float] | None) -> None:
    """Write the best checkpoint's name to best.json, or delete the file if `best` is None."""
    if best is None:
        store.delete(BEST_NAME)
        return
    content = {"path": best[0], "metric": metric, "value": best[1]}
    store.write(BEST_NAME, (json.dumps(content) + "\n").encode())
