"""Checkpoints in a remote store: there whole or not at all, like those on a disk.

Where the store can rename (HDFS), files go into a hidden folder that then takes its name. Where it cannot
(S3), the files of a save have names of their own and the manifest, sent last, is the publication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from plsc.checkpoint.agree import on_every_rank
from plsc.checkpoint.folders import DELETING, HIDDEN, REPLACED, SAVING, hidden_name
from plsc.checkpoint.manifest import (
    LARGEST_MANIFEST,
    MANIFEST_NAME,
    SUFFIX,
    Manifest,
    parse_manifest,
)
from plsc.checkpoint.retention import Retention, age_key
from plsc.checkpoint.shard_file import is_shard
from plsc.errors import CheckpointError, DataError
from plsc.parallel.world import World
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

    files: the data files that this rank sends; together the ranks send all. A checkpoint of that name that
    is there goes away when the new one is published.

    Raises:
        CheckpointError: on all ranks alike; nothing was published.
    """
    name = folder.name
    doing = f"send {folder} to {store.shown}"

    def begin() -> tuple[str, bytes]:
        if not world.is_main:
            return "", b""
        manifest = (folder / MANIFEST_NAME).read_bytes()
        _check_replaceable(store, name)
        target = hidden_name(name, SAVING) if store.can_rename else name
        store.make_folder(target)
        if target == name:
            _make_way(store, name, manifest)
        return target, manifest

    target, manifest = on_every_rank(world, doing, begin, _ADVICE)[0]
    try:

        def send() -> None:
            for one in files:
                store.put(folder / one, f"{target}/{one}", on_bytes)

        on_every_rank(world, doing, send, _ADVICE)

        def finish() -> None:
            if world.is_main:
                _publish(store, target, name, manifest)

        on_every_rank(world, doing, finish, _ADVICE)
    except BaseException:
        if world.is_main and target != name:
            with contextlib.suppress(DataError):  # the next start cleans it
                store.delete(target)
        raise


def _publish(store: Store, target: str, name: str, manifest: bytes) -> None:
    store.write(f"{target}/{MANIFEST_NAME}", manifest)
    if target == name:
        keep = {MANIFEST_NAME, *parse_manifest(manifest, name).files}
        for old in set(store.names(name)) - keep:
            store.delete(f"{name}/{old}")
        return
    old_name = hidden_name(name, REPLACED)
    is_replacing = store.exists(name)
    if is_replacing:
        store.rename(name, old_name)
    store.rename(target, name)
    if is_replacing:
        delete(store, old_name)


def _make_way(store: Store, name: str, manifest: bytes) -> None:
    """Withdraw an older checkpoint of the name if files of the new one would overwrite some of its own."""
    if MANIFEST_NAME not in store.names(name):
        return
    old, new = read_remote_manifest(store, name)[0].files, parse_manifest(manifest, name).files
    if any(old[one] != new[one] for one in old.keys() & new.keys()):
        store.delete(f"{name}/{MANIFEST_NAME}")


def delete(store: Store, name: str) -> None:
    """Delete a checkpoint, its manifest first: from then on it is none."""
    store.delete(f"{name}/{MANIFEST_NAME}")
    store.delete(name)


def withdraw(store: Store, name: str) -> None:
    """Delete a published checkpoint so that no half of it keeps the name."""
    doomed = name
    if store.can_rename:
        doomed = hidden_name(name, DELETING)
        store.rename(name, doomed)
    delete(store, doomed)


def read_remote_manifest(store: Store, name: str = "") -> tuple[Manifest, bytes]:
    """Return the manifest of a checkpoint in the store, parsed and as it is. No name: the store's own folder.

    Raises:
        CheckpointError: there is none, or it is damaged. DataError: the store does not answer.
    """
    path = f"{name}/{MANIFEST_NAME}" if name else MANIFEST_NAME
    data = store.read(path, LARGEST_MANIFEST)
    where = shown(store.child(name)) if name else store.shown
    if data is None:
        raise CheckpointError(
            f"there is no checkpoint at {where}: it has no {MANIFEST_NAME}; expected the URL of one, such "
            "as hdfs://server/run/5"
        )
    return parse_manifest(data, f"{where}/{MANIFEST_NAME}"), data


def list_remote(store: Store) -> list[tuple[str, Manifest]]:
    """Return names and manifests of the sound checkpoints in the store, fewest steps first."""
    found = []
    for name in store.names():
        if name.startswith("."):
            continue
        try:
            found.append((name, read_remote_manifest(store, name)[0]))
        except CheckpointError:
            continue
    return sorted(found, key=lambda entry: age_key(*entry))


def prune_remote(store: Store, retention: Retention, protect: Iterable[str] = ()) -> list[str]:
    """Delete the checkpoints in the store that are not to be kept; return their names, oldest first."""
    found = list_remote(store)
    doomed = [
        name for name, _ in found if name not in retention.kept(found) and name not in set(protect)
    ]
    for name in doomed:
        withdraw(store, name)
    return doomed


def clean_remote(store: Store) -> None:
    """Tidy the store after a kill; for one process, before a run's first save.

    What has no manifest and holds nothing but data files of ours is deleted; an old version that was
    hidden, and whose successor never came, gets its name back.
    """
    names = store.names()
    for name in names:
        match = HIDDEN.fullmatch(name)
        inside = store.names(name) if match or not store.can_rename else []
        if match:
            if match[1] == REPLACED and MANIFEST_NAME in inside and match[2] not in names:
                store.rename(name, match[2])
            else:
                delete(store, name)
        elif inside and all(map(is_shard, inside)):
            store.delete(name)


def _check_replaceable(store: Store, name: str) -> None:
    inside = store.names(name)
    if not inside or MANIFEST_NAME in inside:
        return
    if store.can_rename or not all(one.endswith(SUFFIX) for one in inside):
        raise CheckpointError(
            f"{shown(store.child(name))} is there already and is no checkpoint; move it away or save "
            "elsewhere"
        )
