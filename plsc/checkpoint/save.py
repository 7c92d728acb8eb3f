"""Save a checkpoint: a fresh folder, its manifest last, then its name."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from plsc.checkpoint.agree import on_every_rank
from plsc.checkpoint.manifest import FileInfo, TensorInfo
from plsc.checkpoint.remote import check_replaceable, check_space, finish_folder
from plsc.checkpoint.shard_file import Entry, entry_of, shard_name, write_shard
from plsc.checkpoint.snapshot import ShardedTensor, Snapshot, info_of, local_of
from plsc.errors import CheckpointError, OptionError
from plsc.parallel.world import World
from plsc.storage.publish import hidden_name
from plsc.storage.store import Store

_ADVICE = "nothing was published and earlier checkpoints are whole"


def save_checkpoint(
    save_dir: str | os.PathLike[str],
    name: str,
    snapshot: Snapshot,
    world: World,
    *,
    is_shared: bool = True,
) -> Path:
    """Save to ``save_dir / name`` and return that path. Collective.

    Every rank writes one file: its rows of sharded tensors, and the whole tensors that no lower rank has.
    What differs between ranks needs a key for each. An older checkpoint of the same name is replaced.
    is_shared: all ranks see one file system; without, every machine keeps the files of its own ranks.

    Raises:
        CheckpointError: on all ranks; nothing was published, earlier checkpoints are whole.
        DistributedError: another rank was lost; as far as this rank knows the same holds.
    """
    folder = Path(save_dir) / name
    doing = f"save checkpoint {folder}"
    manifest = snapshot.manifest

    def begin() -> Path:
        hidden = folder.with_name(hidden_name(name))
        if world.is_main:
            _make(hidden, folder, manifest.run_id)
        return hidden

    temporary = on_every_rank(world, doing, begin, _ADVICE)[0]
    is_owner = world.is_main
    try:
        is_owner = on_every_rank(
            world,
            doing,
            lambda: _is_owner(temporary, folder, manifest.run_id, world, is_shared),
            _ADVICE,
        )[world.rank]
        infos = on_every_rank(world, doing, lambda: _describe(snapshot), _ADVICE)
        lower = {key for part in infos[: world.rank] for key in part}
        shard = temporary / shard_name(world.rank, f"step{manifest.step}")
        files = on_every_rank(world, doing, lambda: _write(shard, snapshot, lower), _ADVICE)

        def finish() -> None:
            if is_owner:
                complete = dataclasses.replace(
                    manifest,
                    tensors={key: info for part in reversed(infos) for key, info in part.items()},
                    files={name: info for part in files for name, info in part.items()},
                )
                text = complete.to_json().encode()
                finish_folder(Store(folder.parent), temporary.name, name, text)

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
    """Return whether this rank is the one of its machine that publishes what lies there."""
    if world.is_main or temporary.is_dir():
        return world.is_main
    if is_shared:
        raise CheckpointError(
            f"{folder.parent} is not the folder that rank 0 sees; save to a file system that all machines "
            "share, or to a store (set_model_save_dir with a URL)"
        )
    if world.local_rank == 0:
        _make(temporary, folder, run_id)
        return True
    return False


def _describe(snapshot: Snapshot) -> dict[str, TensorInfo]:
    return {role.key: info_of(role, value) for role, value in snapshot.tensors.items()}


def _write(path: Path, snapshot: Snapshot, lower: Collection[str]) -> dict[str, FileInfo]:
    """Write this rank's file, if there is anything in it; lower: the keys that lower ranks have."""
    entries = []
    for role, value in snapshot.tensors.items():
        if isinstance(value, ShardedTensor):
            is_mine = not value.is_copy and (len(value.local) > 0 or value.rows == 0)
            start = value.start
        else:
            is_mine, start = role.key not in lower, 0
        if is_mine:
            entries.append(entry_of(role.key, local_of(value), start))
    return {path.name: write_shard(path, entries)} if entries else {}


def check_destination(source: Path, destination: Path) -> None:
    """Raise OptionError unless a new checkpoint can be made there, outside of the source."""
    if destination.exists() or destination.is_symlink():
        raise OptionError(f"{destination} is there already; give a path that is not")
    if destination.name.startswith("."):
        raise OptionError(f"a checkpoint cannot be named {destination.name!r}; give a plain name")
    if not destination.absolute().parent.is_dir():
        raise OptionError(f"there is no folder {destination.parent} for the new checkpoint")
    if destination.resolve().is_relative_to(source.resolve()):
        raise OptionError(f"{destination} is inside the checkpoint {source}; write next to it")


def write_shards(folder: Path, shards: Sequence[Sequence[Entry]]) -> dict[str, FileInfo]:
    """Write the data files of all ranks from one process; return them by name.

    Raises CheckpointError, before anything is written, if they do not fit on the disk.
    """
    needed = sum(entry.size for entries in shards for entry in entries)
    check_space(folder, needed, "make room or write elsewhere")
    return {
        shard_name(rank): write_shard(folder / shard_name(rank), entries)
        for rank, entries in enumerate(shards)
        if entries
    }
