"""Bring a checkpoint from a remote store to this machine, checked, each rank a share of its files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from plsc.checkpoint.agree import neighbours, on_every_rank
from plsc.checkpoint.layout import checksum
from plsc.checkpoint.manifest import FileInfo, Manifest, parse_manifest
from plsc.checkpoint.remote import check_replaceable, finish_folder
from plsc.checkpoint.retention import manifest_in
from plsc.errors import CheckpointError
from plsc.parallel.world import World
from plsc.storage.cache import folder_for
from plsc.storage.publish import MANIFEST_NAME, replacing
from plsc.storage.store import Store, Transfer
from plsc.storage.urls import shown

_FETCHING = ".fetching-"


def fetch(
    url: str, world: World, folder: Path | None = None, say: Callable[[str], None] | None = None
) -> Path:
    """Return a local folder with the checkpoint at a URL, fetched unless it is there already. Collective.

    folder: where it is to be; in the cache folder if None. A checkpoint that is there and is another one is
    replaced. Files that an earlier try brought whole are not fetched again.

    Raises:
        CheckpointError: on all ranks alike: no checkpoint there, a damaged file, a disk too small; nothing
            was replaced.
    """
    target = folder_for("checkpoints", url) if folder is None else folder
    opened: list[Store] = []
    on_every_rank(world, f"reach {shown(url)}", lambda: opened.append(Store(url)))
    store = opened[0]
    text = on_every_rank(
        world,
        f"read {store.shown}",
        lambda: manifest_in(store)[1] if world.is_main else b"",
    )[0]
    manifest = parse_manifest(text, store.shown)
    doing = f"fetch {store.shown} to {target}"
    work = target.with_name(f"{_FETCHING}{target.name}")
    if all(on_every_rank(world, doing, lambda: _is_there(target, text, manifest))):
        return target
    index, count = neighbours(work, world)

    def bring() -> None:
        names = sorted(manifest.files)[index::count]
        _check_space(work, sum(manifest.files[name].bytes for name in names), target)
        total = sum(manifest.files[name].bytes for name in names)
        transfer = Transfer(f"fetching {store.shown}", total, say if world.is_main else None)
        for name in names:
            _bring(store, name, manifest.files[name], work, transfer)
        transfer.end()

    on_every_rank(world, doing, bring)

    def finish() -> None:
        if index == 0:
            for stranger in {path.name for path in work.iterdir()} - set(manifest.files):
                (work / stranger).unlink()
            finish_folder(Store(target.parent), work.name, target.name, text)

    on_every_rank(world, doing, finish)
    return target


def _is_there(target: Path, text: bytes, manifest: Manifest) -> bool:
    """Whether the checkpoint was fetched before; its checksums are looked at when it is loaded."""
    check_replaceable(Store(target.parent), target.name)
    try:
        if (target / MANIFEST_NAME).read_bytes() != text:
            return False
        return all(
            (target / name).stat().st_size == info.bytes for name, info in manifest.files.items()
        )
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


def _check_space(work: Path, needed: int, target: Path) -> None:
    free = shutil.disk_usage(work).free
    if needed > free:
        raise CheckpointError(
            f"{target.parent} has {free} bytes free, the checkpoint needs {needed}; make room, or set "
            "PLSC_CACHE_DIR to a larger disk"
        )
