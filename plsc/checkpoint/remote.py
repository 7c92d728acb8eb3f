"""Send a checkpoint to a store, where it is published whole or not at all, as on a disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from plsc.checkpoint.agree import on_every_rank
from plsc.checkpoint.manifest import SUFFIX, Manifest, parse_manifest
from plsc.checkpoint.retention import manifest_in
from plsc.checkpoint.shard_file import is_shard
from plsc.errors import CheckpointError, DataError
from plsc.parallel.world import World
from plsc.storage import publish
from plsc.storage.publish import MANIFEST_NAME, hidden_name
from plsc.storage.store import OnBytes, Store
from plsc.storage.urls import shown

_ADVICE = "the checkpoint is whole on the local disk; send it with plsc checkpoint push"


def upload(
    folder: Path,
    store: Store,
    files: Iterable[str],
    world: World,
    on_bytes: OnBytes | None = None,
) -> None:
    """Publish the checkpoint `folder` in the store, under its own name. Collective.

    files: the data files that this rank sends; together the ranks send all. An older checkpoint of that name,
    of the same run, is deleted when the new one is published.

    Raises:
        CheckpointError: on all ranks; nothing was published.
    """
    name = folder.name
    doing = f"send {folder} to {store.shown}"

    def begin() -> tuple[str, bytes]:
        if not world.is_main:
            return "", b""
        data = (folder / MANIFEST_NAME).read_bytes()
        manifest = parse_manifest(data, str(folder))
        check_replaceable(store, name, manifest.run_id)
        target = hidden_name(name) if store.can_rename else name
        store.make_folder(target)
        if target == name:
            _make_way(store, name, manifest)
        return target, data

    target, data = on_every_rank(world, doing, begin, _ADVICE)[0]
    try:

        def send() -> None:
            for one in files:
                store.put(folder / one, f"{target}/{one}", on_bytes)

        on_every_rank(world, doing, send, _ADVICE)

        def finish() -> None:
            if world.is_main:
                finish_folder(store, target, name, data)

        on_every_rank(world, doing, finish, _ADVICE)
    except BaseException:
        if world.is_main and target != name:
            with contextlib.suppress(DataError):  # the next start cleans it
                store.delete(target)
        raise


def finish_folder(store: Store, target: str, name: str, manifest: bytes) -> None:
    """Write the manifest of a folder that has all its data files, and publish it under its name."""
    store.write(f"{target}/{MANIFEST_NAME}", manifest)
    if target != name:
        publish.publish(store, target, name)
        return
    keep = {MANIFEST_NAME, *parse_manifest(manifest, name).files}
    for old in set(store.names(name)) - keep:
        store.delete(f"{name}/{old}")


def _make_way(store: Store, name: str, manifest: Manifest) -> None:
    """Withdraw an older checkpoint of the name if files of the new one would overwrite some of its own."""
    if MANIFEST_NAME not in store.names(name):
        return
    old, new = manifest_in(store, name)[0].files, manifest.files
    if any(old[one] != new[one] for one in old.keys() & new.keys()):
        store.delete(f"{name}/{MANIFEST_NAME}")


def check_replaceable(store: Store, name: str, run_id: str | None = None) -> None:
    """Check that only a checkpoint, of this run if `run_id` is given, stands where one is to be saved.

    Raises:
        CheckpointError: a file, a link, a folder of something else, or a checkpoint of another run.
    """
    if not store.is_link(name) and not store.exists(name):
        return
    inside = [] if store.is_link(name) else store.names(name)
    if MANIFEST_NAME in inside:
        there = ""
        with contextlib.suppress(CheckpointError):  # damaged: no run's
            there = manifest_in(store, name)[0].run_id
        if run_id is not None and there not in ("", run_id):
            raise CheckpointError(
                f"{shown(store.child(name))} is a checkpoint of another run; save elsewhere, or delete it"
            )
    elif store.can_rename or not all(one.endswith(SUFFIX) for one in inside):
        raise CheckpointError(
            f"{shown(store.child(name))} is there already and is no checkpoint; move it away or save "
            "elsewhere"
        )


def clean(store: Store) -> list[str]:
    """Remove what a killed run left; return the names of the checkpoints that were put back.

    For one process, before a run's first save, where no other run saves. In an object store, a folder without
    a manifest that has only data files of ours is deleted.
    """
    restored = publish.clean(store)
    for name in [] if store.can_rename else store.names(only_folders=True):
        inside = store.names(name)
        if inside and all(map(is_shard, inside)):
            store.delete(name)
    return restored
