"""Find the checkpoint that a run loads: a path, a URL, "last" or "best"."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Annotated, TypedDict

from plsc.checkpoint import Manifest, list_checkpoints, read_manifest
from plsc.checkpoint.all_ranks import on_every_rank, on_main_rank
from plsc.checkpoint.manifest import MANIFEST_NAME
from plsc.checkpoint.remote import fetch
from plsc.checkpoint.retention import BEST_NAME, age_key, checkpoints_in
from plsc.config import Config, Options
from plsc.errors import CheckpointError, OptionError
from plsc.parallel.world import World
from plsc.run.classes import OpenedCheckpoint
from plsc.state.folders import VERSION_NAME, RunFolder, list_run_folders, version_number
from plsc.storage.publish import lock_note
from plsc.storage.records import read_record
from plsc.storage.store import Store
from plsc.storage.urls import is_url, join, shown

LAST, BEST = "last", "best"  # checkpoints of save_dir, instead of a path
_LARGEST_BEST = 2**16  # bytes


class _Best(TypedDict):
    path: Annotated[str, r"(.*/)?(?!\.\.?$)[^/\0-\x1f]+"]


def open_load_dir(options: Options | Config, world: World) -> OpenedCheckpoint:
    """Return the local folder of the checkpoint to load, downloaded if necessary, and its manifest.

    A collective. Raises OptionError if no checkpoint is set or saved, CheckpointError if it does not exist.
    """
    opened = open_to_resume(options, world)
    if opened is None:
        raise OptionError(
            f"no checkpoint is set, or {shown(options.checkpoint.save_dir)} contains no checkpoint; call "
            "set_checkpoint_dir with the folder of one, such as saved_model/7"
        )
    return opened


def open_to_resume(options: Options | Config, world: World) -> OpenedCheckpoint | None:
    """Return the checkpoint to resume and its manifest; None to start from scratch; a collective.

    With "last", a run starts from scratch (or from `checkpoint.download_dir`) if nothing has been saved yet,
    so that the same script can start and resume the run.
    """
    return resolve_checkpoint(options, world, ())[0]


def open_checkpoint(path: Path) -> Manifest:
    """Return the manifest at `path`. If `path` is a folder of checkpoints, the error lists them."""
    try:
        return read_manifest(path)
    except CheckpointError as error:
        inside = [folder.name for folder, _ in list_checkpoints(path)] if path.is_dir() else []
        if not inside:
            raise
        raise CheckpointError(
            f"{path} is not a checkpoint but a folder of checkpoints: {', '.join(inside)}; "
            f"use one of them, such as {path / inside[-1]}"
        ) from error


def resolve_checkpoint(
    options: Options | Config, world: World, launches: Collection[str]
) -> tuple[OpenedCheckpoint | None, set[str], str | None]:
    """Return the checkpoint to load or None, its path or URL, and the interrupted version or None.

    If it is downloaded to a given folder, both its path and its URL.
    The interrupted version is the one in which ranks of one of these `launches` were saving.
    """
    place, url = options.checkpoint.load_dir, options.checkpoint.download_dir
    (folder, found_url), interrupted = on_main_rank(
        world,
        f"find the {place if place in (LAST, BEST) else LAST} checkpoint of "
        f"{shown(options.checkpoint.save_dir)}",
        lambda: _find_checkpoint(options, launches),
    )
    locations = set() if folder is None and found_url is None else {str(folder or found_url)}
    if locations:
        folder = _make_local(folder, found_url, world)
    else:
        if place is not None and is_url(place):
            if url is not None:
                raise OptionError(
                    f"both load_dir {shown(place)} and download_dir {shown(url)} are URLs; set only one"
                )
            url = place
        elif place not in (None, LAST, BEST):
            folder = Path(place)
        if url is not None:
            run = url
            url = on_main_rank(world, f"reach {shown(run)}", lambda: newest_at(run))
        locations = {str(one) for one in (folder, url) if one is not None}
        if url is not None:
            folder = fetch(url, world, folder)
    opened = None if folder is None else (folder, open_checkpoint(folder))
    return opened, locations, interrupted


def find_interrupted(run_folders: list[RunFolder], launches: Collection[str]) -> RunFolder | None:
    """Return the folder of a run whose ranks the launcher has restarted, None if there is none.

    The note in the lock of a folder names the launcher. Locks that this process holds belong to an earlier
    run.
    """
    for run_folder in run_folders:
        note = lock_note(Path(run_folder.local.url))
        is_this_process = (note.get("host"), note.get("pid")) == (socket.gethostname(), os.getpid())
        if not is_this_process and not set(launches).isdisjoint(note.get("launches", [])):
            return run_folder
    return None


def newest_at(url: str) -> str:
    """Return the URL of a checkpoint: `url` itself, or the newest one of the run at `url`."""
    store = Store(url)
    if MANIFEST_NAME in store.names():
        return url
    versions = sorted(
        filter(VERSION_NAME.fullmatch, store.names(only_folders=True)), key=version_number, reverse=True
    )
    for folder in [*(store.child(version) for version in versions), url]:
        if checkpoints := checkpoints_in(Store(folder)):
            return join(folder, checkpoints[-1][0])
    return url  # the download reports what is missing


def _make_local(folder: Path | None, url: str | None, world: World) -> Path:
    """Return the folder that rank 0 found if every rank sees it, else a local copy from the store."""
    if folder is not None:
        seen = on_every_rank(world, f"read {folder}", (folder / MANIFEST_NAME).is_file)
        if all(seen):
            return folder
        if url is None:
            raise CheckpointError(
                f"rank {seen.index(False)} cannot read {folder}, where rank 0 found the checkpoint; save to "
                "a folder that all machines share, or to a store (checkpoint.upload_dir)"
            )
    assert url is not None
    return fetch(url, world)


_Location = tuple[Path | None, str | None]
"""Folder on rank 0's machine and URL of a checkpoint; at least one of them is set."""


def _find_checkpoint(options: Options | Config, launches: Collection[str]) -> tuple[_Location, str | None]:
    """Return the checkpoint to load from save_dir, and the interrupted version; called by one process.

    Raises CheckpointError if no best checkpoint is known.
    """
    wanted = options.checkpoint.load_dir
    if not launches and wanted not in (LAST, BEST):
        return (None, None), None
    run_folders = list_run_folders(options)
    run_folder = find_interrupted(run_folders, launches)
    interrupted = None if run_folder is None else run_folder.version
    if run_folder is not None and (location := _find_in(run_folder, LAST)):
        return location, interrupted
    for run_folder in run_folders if wanted in (LAST, BEST) else ():
        if location := _find_in(run_folder, wanted):
            return location, interrupted
    if wanted == BEST:
        raise CheckpointError(
            f"checkpoint.load_dir is {BEST!r}, but {shown(options.checkpoint.save_dir)} contains no "
            "checkpoint; train first, or set the path of a checkpoint"
        )
    return (None, None), interrupted


def _find_in(run_folder: RunFolder, wanted: str | None) -> _Location | None:
    """Return the last or best checkpoint of a run; None if it has none."""
    here = checkpoints_in(run_folder.local)
    there = [] if run_folder.remote is None else checkpoints_in(run_folder.remote)
    if not here and not there:
        return None
    local_age, remote_age = (
        max((age_key(*entry) for entry in checkpoints), default=(-1, -1, "")) for checkpoints in (here, there)
    )
    if wanted == BEST:
        # The store also has checkpoints of other machines, unless local ones are newer.
        name = _name_of_best(run_folder.stores[:: -1 if remote_age >= local_age else 1])
    else:
        name = max(local_age, remote_age)[-1]
    is_here, is_there = (name in (entry for entry, _ in checkpoints) for checkpoints in (here, there))
    if not (is_here or is_there):
        raise CheckpointError(
            f"{run_folder.local.child(BEST_NAME)} is missing, or names {name!r}, which does not exist; set "
            "the path of a checkpoint"
        )
    is_newer_there = is_there and remote_age > local_age
    return (
        Path(run_folder.local.child(name)) if is_here and not is_newer_there else None,
        run_folder.remote.child(name) if run_folder.remote is not None and is_there else None,
    )


def _name_of_best(stores: list[Store]) -> str:
    """Return the name of the best checkpoint from the first best.json, '' if there is none."""
    for store in stores:
        data = store.read(BEST_NAME, _LARGEST_BEST)
        if data is not None:
            # Use only the last part: the folder may have moved, and paths outside of it are not allowed.
            return PurePath(read_record(_Best, data, f"{store.shown}/{BEST_NAME}")["path"]).name
    return ""
