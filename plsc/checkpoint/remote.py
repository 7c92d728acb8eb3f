"""Checkpoints in stores: uploaded, fetched, verified, and published whole or not at all, as on a disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from plsc.checkpoint.agree import neighbours, on_every_rank
from plsc.checkpoint.load import check_checksums, check_files
from plsc.checkpoint.manifest import FileInfo, Manifest, parse_manifest, read_manifest
from plsc.checkpoint.retention import checkpoints_in, list_checkpoints, manifest_in
from plsc.checkpoint.save import check_replaceable, check_space, finish_folder
from plsc.checkpoint.shard_file import checksum, rank_of_shard
from plsc.errors import CheckpointError, DataError
from plsc.parallel.world import World
from plsc.storage import publish
from plsc.storage.cache import folder_for
from plsc.storage.publish import MANIFEST_NAME, hidden_name, replacing
from plsc.storage.store import OnBytes, Store, Transfer
from plsc.storage.urls import base_name, is_url, shown

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


def _make_way(store: Store, name: str, manifest: Manifest) -> None:
    """Withdraw an older checkpoint of the name if files of the new one would overwrite some of its own."""
    if MANIFEST_NAME not in store.names(name):
        return
    old, new = manifest_in(store, name)[0].files, manifest.files
    if any(old[one] != new[one] for one in old.keys() & new.keys()):
        store.delete(f"{name}/{MANIFEST_NAME}")


def clean(store: Store) -> list[str]:
    """Remove what a killed run left; return the names of the checkpoints that were put back.

    For one process, before a run's first save, where no other run saves. In an object store, a folder without
    a manifest that has only data files of ours is deleted.
    """
    restored = publish.clean(store)
    for name in [] if store.can_rename else store.names(only_folders=True):
        inside = store.names(name)
        if inside and all(rank_of_shard(one) is not None for one in inside):
            store.delete(name)
    return restored


def fetch(url: str, world: World, folder: Path | None = None) -> Path:
    """Return a local folder with the checkpoint at a URL, fetched unless it is there already. Collective.

    Each rank fetches a share of the files. folder: where it is to be; in the cache folder if None. A
    checkpoint that is there and is another one is replaced. Files that an earlier try brought whole are not
    fetched again.

    Raises:
        CheckpointError: on all ranks: no checkpoint there, a damaged file, a disk too small; nothing was
            replaced.
    """
    target = folder_for("checkpoints", url) if folder is None else folder
    opened: list[Store] = []

    def begin() -> bytes:
        opened.append(Store(url))
        return manifest_in(opened[0])[1] if world.is_main else b""

    text = on_every_rank(world, f"reach {shown(url)}", begin)[0]
    store = opened[0]
    manifest = parse_manifest(text, store.shown)
    doing = f"fetch {store.shown} to {target}"
    if all(on_every_rank(world, doing, lambda: _is_there(target, text, manifest))):
        return target
    work = target.with_name(f".fetching-{target.name}")
    index, count = neighbours(work, world)

    def bring() -> None:
        files = {name: manifest.files[name] for name in sorted(manifest.files)[index::count]}
        total = sum(info.bytes for info in files.values())
        check_space(work, total, "make room, or set PLSC_CACHE_DIR to a larger disk")
        transfer = Transfer(f"fetching {store.shown}", total, world.is_main)
        for name, info in files.items():
            _bring(store, name, info, work, transfer)
        transfer.end()

    on_every_rank(world, doing, bring)

    def finish() -> None:
        if index == 0:
            for unknown in {path.name for path in work.iterdir()} - set(manifest.files):
                (work / unknown).unlink()
            finish_folder(Store(target.parent), work.name, target.name, text)

    on_every_rank(world, doing, finish)
    return target


def _is_there(target: Path, text: bytes, manifest: Manifest) -> bool:
    """Whether the checkpoint was fetched before; its checksums are looked at when it is loaded."""
    check_replaceable(Store(target.parent), target.name)
    try:
        if (target / MANIFEST_NAME).read_bytes() != text:
            return False
        return all((target / name).stat().st_size == info.bytes for name, info in manifest.files.items())
    except FileNotFoundError:
        return False


def _bring(store: Store, name: str, info: FileInfo, work: Path, transfer: Transfer) -> None:
    local = work / name
    if local.is_file() and local.stat().st_size == info.bytes and checksum(local) == info:
        transfer.add(info.bytes)
        return
    there = store.size(name)
    where = shown(store.child(name))
    if there != info.bytes:
        state = "is missing" if there is None else f"has {there} bytes, {info.bytes} were saved"
        raise CheckpointError(f"{where} {state}; choose another checkpoint")
    with replacing(local) as part:
        store.get(name, part, transfer.add)
        if checksum(part) != info:
            raise CheckpointError(
                f"{where} is damaged: its checksum is not the saved one; choose another checkpoint"
            )


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a checkpoint whose files are all there, with the bytes that were saved.

    A file is read once, in pieces. What is at a URL is fetched to a temporary folder for that, and its
    checksums are taken there.

    Raises:
        CheckpointError: the first fault, with the name of the file.
    """
    with contextlib.ExitStack() as stack:
        folder, is_remote = Path(path), isinstance(path, str) and is_url(path)
        if is_remote:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="plsc-verify-"))
            folder = fetch(str(path), World.single(), Path(scratch) / base_name(str(path)))
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        if not is_remote:
            check_checksums(folder, manifest, sorted(manifest.files))
        return manifest


def push(source: str, url: str) -> list[str]:
    """Send the checkpoint `source`, or all in that folder that are not there yet, to a store; return names.

    Each is verified first. url: of the folder of the run's checkpoints.

    Raises:
        CheckpointError: one is damaged, or the store fails; those before it are there.
    """
    if not is_url(url):
        raise CheckpointError(f"{url!r} is no fsspec URL, such as hdfs://server/run or s3://bucket/run")
    folder = Path(source)
    store = Store(url)
    inside = list_checkpoints(folder)
    if inside:
        there = dict(checkpoints_in(store))
        chosen = [path for path, manifest in inside if there.get(path.name) != manifest]
    else:
        read_manifest(folder)
        chosen = [folder.resolve()]
    for path in chosen:
        manifest = verify(path)
        total = sum(file.bytes for file in manifest.files.values())
        transfer = Transfer(f"sending {path} to {store.shown}", total)
        upload(path, store, sorted(manifest.files), World.single(), transfer.add)
        transfer.end()
    return [path.name for path in chosen]
