"""Which checkpoint is meant: a path, a URL, or "last" or "best" of where the run saves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from plsc.checkpoint import Manifest, list_checkpoints
from plsc.checkpoint.agree import on_every_rank
from plsc.checkpoint.fetch import fetch
from plsc.checkpoint.manifest import MANIFEST_NAME
from plsc.checkpoint.remote import list_remote
from plsc.checkpoint.retention import age_key
from plsc.config import Config
from plsc.errors import CheckpointError, OptionError
from plsc.parallel.world import World
from plsc.storage.names import join
from plsc.storage.store import Store
from plsc.storage.urls import is_url, shown
from plsc.train.checkpointing import BEST, LAST, open_checkpoint
from plsc.train.places import START_SECONDS, local_folder, versions
from plsc.train.saving import BEST_NAME

_LARGEST_BEST = 2**16  # bytes


@dataclass(frozen=True)
class _Found:
    """A checkpoint that was found: its folder on rank 0's machine, its URL; one of the two at least."""

    folder: Path | None
    url: str | None


def open_load_dir(options: Config, world: World) -> tuple[Path, Manifest]:
    """Return the local folder of the checkpoint to load, fetched if need be, and its manifest; a collective.

    Raises OptionError if none is named, CheckpointError if there is none.
    """
    opened = open_to_resume(options, world)
    if opened is not None:
        return opened
    if options.checkpoint.load_dir is None:
        raise OptionError(
            "there is no checkpoint to load; call set_checkpoint_dir, or give --checkpoint.load_dir"
        )
    raise CheckpointError(
        f"checkpoint.load_dir is {LAST!r}, but {shown(options.checkpoint.save_dir)} holds no checkpoint; "
        "train first, or give the path of one"
    )


def open_to_resume(options: Config, world: World) -> tuple[Path, Manifest] | None:
    """Return the checkpoint that training goes on from, and its manifest; None to begin anew; a collective.

    A run with "last" begins anew (or from `checkpoint.download_dir`) where nothing was saved yet, so that
    the same script starts, and is started again.
    """
    place, url = options.checkpoint.load_dir, options.checkpoint.download_dir
    folder: Path | None = None
    if place in (LAST, BEST):
        found = on_every_rank(
            world,
            f"find the {place} checkpoint of {shown(options.checkpoint.save_dir)}",
            lambda: _find(options) if world.is_main else None,
        )[0]
        folder = None if found is None else _bring(found, world)
        if folder is not None:
            return folder, open_checkpoint(folder)
    elif place is not None and is_url(place):
        if url is not None:
            raise OptionError(f"both {shown(place)} and {shown(url)} are to be loaded; name one")
        url = place
    elif place is not None:
        folder = Path(place)
    if url is not None:
        folder = fetch(url, world, folder, print if world.is_main else None)
    return None if folder is None else (folder, open_checkpoint(folder))


def _bring(found: _Found, world: World) -> Path:
    """Return the folder of what rank 0 found, if every rank sees it, or a copy of what is in the store."""
    folder = found.folder
    if folder is not None:
        seen = on_every_rank(world, f"look at {folder}", (folder / MANIFEST_NAME).is_file)
        if all(seen):
            return folder
        if found.url is None:
            raise CheckpointError(
                f"rank {seen.index(False)} does not see {folder}, where rank 0 found the checkpoint; save to "
                "a folder that all machines share, or to a store (checkpoint.upload_dir)"
            )
    assert found.url is not None
    return fetch(found.url, world, None, print if world.is_main else None)


def _find(options: Config) -> _Found | None:
    """Return what "last" or "best" means; for one process. Raises CheckpointError if no best one is known."""
    wanted = options.checkpoint.load_dir
    for local, store in _homes(options):
        here = list_checkpoints(local)
        there = [] if store is None else list_remote(store)
        if not here and not there:
            continue
        local_age = max((age_key(path.name, manifest) for path, manifest in here), default=None)
        remote_age = max((age_key(*entry) for entry in there), default=None)
        if wanted == BEST:
            name = _name_of_best(local, store)
        else:
            name = max(age for age in (local_age, remote_age) if age is not None)[-1]
        is_here = name in (path.name for path, _ in here)
        is_there = name in (entry for entry, _ in there)
        if not (is_here or is_there):
            raise CheckpointError(
                f"{local / BEST_NAME} names {name!r}, which is not there; give the path of a checkpoint"
            )
        # Both may have the name, from different runs: the newer place is right.
        is_newer_there = remote_age is not None and (local_age is None or remote_age > local_age)
        return _Found(
            local / name if is_here and not (is_there and is_newer_there) else None,
            store.child(name) if store is not None and is_there else None,
        )
    if wanted == BEST:
        raise CheckpointError(
            f"{shown(options.checkpoint.save_dir)} holds no checkpoint, so none is the best; train first, or "
            "give the path of one"
        )
    return None


def _homes(options: Config) -> Iterator[tuple[Path, Store | None]]:
    """Yield the folders, with their stores, in which the run's checkpoints may be: those of versions, too.

    A run that saves to new versions looks into the newest one first, another one into save_dir itself.
    """
    checkpoint = options.checkpoint
    save_dir, upload_dir = checkpoint.save_dir, checkpoint.upload_dir

    def store_of(url: str | None) -> Store | None:
        return None if url is None else Store(url, total_seconds=START_SECONDS)

    root = save_dir if is_url(save_dir) else upload_dir
    top = store_of(root)
    local = Path(save_dir)
    names = top.names() if top is not None else []
    if not is_url(save_dir) and local.is_dir():
        names = sorted({*names, *(path.name for path in local.iterdir())})
    known = versions(names)[::-1]
    homes = [(local_folder(options, save_dir), top)]
    versioned = (
        (local_folder(options, join(save_dir, name)), store_of(root and join(root, name)))
        for name in known
    )
    yield from chain(versioned, homes) if checkpoint.new_version else chain(homes, versioned)


def _name_of_best(local: Path, store: Store | None) -> str:
    """Return the name of the best checkpoint, as best.json says."""
    path, where = local / BEST_NAME, str(local / BEST_NAME)
    try:
        with path.open("rb") as file:
            data: bytes | None = file.read(_LARGEST_BEST + 1)
    except FileNotFoundError:
        data = None
        if store is not None:
            data, where = store.read(BEST_NAME, _LARGEST_BEST), f"{store.shown}/{BEST_NAME}"
    if data is None:
        raise CheckpointError(
            f"there is no {where}, so no checkpoint is known as the best; give the path of one"
        )
    try:
        content: Any = json.loads(data) if len(data) <= _LARGEST_BEST else None
    except (ValueError, RecursionError):
        content = None
    named = content.get("path") if isinstance(content, dict) else None
    # Its last part alone counts: the folder may have moved, and what is outside of it is not meant.
    name = PurePath(named).name if isinstance(named, str) else ""
    if not name or name == "..":
        raise CheckpointError(
            f"{where} is damaged: expected the name of a checkpoint as its path; give the path of one"
        )
    return name
