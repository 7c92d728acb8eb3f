"""Look at checkpoints, check and move them: for one process, wherever they lie, without loading them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from plsc.checkpoint.fetch import fetch
from plsc.checkpoint.layout import check_checksums, check_files
from plsc.checkpoint.manifest import Manifest, read_manifest
from plsc.checkpoint.remote import upload
from plsc.checkpoint.retention import Retention, checkpoints_in, list_checkpoints, prune
from plsc.errors import CheckpointError
from plsc.parallel.world import World
from plsc.storage.publish import FolderLock
from plsc.storage.store import Store, Transfer
from plsc.storage.urls import base_name, is_url

Say = Callable[[str], None]


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a checkpoint whose files are all there, with the bytes that were saved.

    A file is read once, in pieces. What is at a URL is fetched to a temporary folder for that, and its
    checksums are taken there.

    Raises:
        CheckpointError: the first fault, with the name of the file.
    """
    if isinstance(path, str) and is_url(path):
        with tempfile.TemporaryDirectory(prefix="plsc-verify-") as scratch:
            folder = fetch(path, World.single(), Path(scratch) / base_name(path))
            return _check_structure(folder)
    folder = Path(path)
    manifest = _check_structure(folder)
    check_checksums(folder, manifest, sorted(manifest.files))
    return manifest


def _check_structure(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest


def prune_at(place: str, retention: Retention) -> list[str]:
    """Delete the checkpoints in a folder or at a URL that are not to be kept; return their names.

    Each run's are counted separately; those without a run id are one run's.
    Raises DataError if a run is saving to the folder.
    """
    store = Store(place)
    runs = {manifest.run_id for _, manifest in checkpoints_in(store)}
    lock = FolderLock(Path(place)) if runs and not store.is_remote else None
    try:
        return [name for run_id in sorted(runs) for name in prune(store, retention, run_id)]
    finally:
        if lock is not None:
            lock.release()


def push(source: str, url: str, say: Say | None = None) -> list[str]:
    """Send the checkpoint `source`, or all in that folder that are not there yet, to a store; return names.

    Each is verified first. url: of the folder of the run's checkpoints.

    Raises:
        CheckpointError: one is damaged, or the store fails; those before it are there.
    """
    if not is_url(url):
        raise CheckpointError(
            f"{url!r} is no fsspec URL, such as hdfs://server/run or s3://bucket/run"
        )
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
        transfer = Transfer(f"sending {path} to {store.shown}", total, say)
        upload(path, store, sorted(manifest.files), World.single(), transfer.add)
        transfer.end()
    return [path.name for path in chosen]
