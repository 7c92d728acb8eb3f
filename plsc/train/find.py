"""Which checkpoint is meant: a path, a URL, or "last" or "best" of where the run saves."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from plsc.checkpoint import Manifest, list_checkpoints, read_manifest
from plsc.checkpoint.agree import on_every_rank
from plsc.checkpoint.manifest import MANIFEST_NAME
from plsc.checkpoint.remote import fetch
from plsc.checkpoint.retention import BEST_NAME, age_key, checkpoints_in
from plsc.config import Config
from plsc.errors import CheckpointError, OptionError
from plsc.parallel.world import World
from plsc.storage.store import Store
from plsc.storage.urls import is_url, shown
from plsc.train.places import Home, Start, choose_start, homes_of, interrupted_home

LAST, BEST = "last", "best"  # of the save_dir, in place of a path
_LARGEST_BEST = 2**16  # bytes


@dataclass(frozen=True)
class _Found:
    """A checkpoint that was found: its folder on rank 0's machine, its URL; one of the two at least."""

    folder: Path | None
    url: str | None

    @property
    def locations(self) -> set[str]:
        return {str(one) for one in (self.folder, self.url) if one is not None}


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
    """Return the checkpoint that training resumes, and its manifest; None to begin anew; a collective.

    A run with "last" begins anew (or from `checkpoint.download_dir`) where nothing was saved yet, so that
    the same script starts, and is started again.
    """
    folder = _open(options, world)[0]
    return None if folder is None else (folder, open_checkpoint(folder))


def open_checkpoint(path: Path) -> Manifest:
    """Return the manifest at `path`; the error names the checkpoints when it is a folder of some."""
    try:
        return read_manifest(path)
    except CheckpointError as error:
        inside = [folder.name for folder, _ in list_checkpoints(path)] if path.is_dir() else []
        if not inside:
            raise
        raise CheckpointError(
            f"{path} is not a checkpoint but holds some: {', '.join(inside)}; "
            f"give one of them, such as {path / inside[-1]}"
        ) from error


def open_start(options: Config, world: World) -> tuple[tuple[Path, Manifest] | None, Start]:
    """Return the checkpoint that a training run resumes, if any, and which run it is; a collective.

    Ranks that a launcher started in place of those that failed resume the run that these had begun.
    """
    launches = {one for one in world.all_gather_object(world.launch) if one}
    folder, locations, interrupted = _open(options, world, launches)
    manifest = None if folder is None else open_checkpoint(folder)

    def choose() -> Start | None:
        if not world.is_main:
            return None
        return choose_start(options, launches, interrupted, locations, manifest)

    doing = f"look into {shown(options.checkpoint.save_dir)}"
    start = on_every_rank(world, doing, choose)[0]
    assert start is not None
    return None if folder is None or manifest is None else (folder, manifest), start


def _open(
    options: Config, world: World, launches: Collection[str] = ()
) -> tuple[Path | None, set[str], str | None]:
    """Return the local folder of the checkpoint to load, if any, and all paths and URLs that it has.

    And the version in which ranks of one of these `launches` were saving, None if there is none.
    """
    place, url = options.checkpoint.load_dir, options.checkpoint.download_dir
    found, interrupted = on_every_rank(
        world,
        f"find the {place if place in (LAST, BEST) else LAST} checkpoint of "
        f"{shown(options.checkpoint.save_dir)}",
        lambda: _look(options, launches) if world.is_main else (None, None),
    )[0]
    if found is not None:
        return _bring(found, world), found.locations, interrupted
    folder: Path | None = None
    if place is not None and is_url(place):
        if url is not None:
            raise OptionError(f"both {shown(place)} and {shown(url)} are to be loaded; name one")
        url = place
    elif place not in (None, LAST, BEST):
        folder = Path(place)
    locations = {str(one) for one in (folder, url) if one is not None}
    if url is not None:
        folder = fetch(url, world, folder, print if world.is_main else None)
    return folder, locations, interrupted


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


def _look(options: Config, launches: Collection[str]) -> tuple[_Found | None, str | None]:
    """Return what is to be loaded from where the run saves, and the version that was interrupted.

    For one process. Raises CheckpointError if no best checkpoint is known.
    """
    wanted = options.checkpoint.load_dir
    if not launches and wanted not in (LAST, BEST):
        return None, None
    homes = homes_of(options)
    interrupted = interrupted_home(homes, launches)
    if interrupted is not None and (found := _find(interrupted, LAST)):
        return found, interrupted.version
    if wanted in (LAST, BEST):
        for home in homes:
            if found := _find(home, wanted):
                return found, None if interrupted is None else interrupted.version
        if wanted == BEST:
            raise CheckpointError(
                f"{shown(options.checkpoint.save_dir)} holds no checkpoint, so none is the best; train "
                "first, or give the path of one"
            )
    return None, None if interrupted is None else interrupted.version


def _find(home: Home, wanted: str | None) -> _Found | None:
    """Return the last or best checkpoint of a run; None if it has none."""
    here = checkpoints_in(home.local)
    there = [] if home.remote is None else checkpoints_in(home.remote)
    if not here and not there:
        return None
    local_age, remote_age = (
        max((age_key(*entry) for entry in found), default=(-1, -1, "")) for found in (here, there)
    )
    if wanted == BEST:
        # The store has what other machines saved, too, unless it misses what is newer here.
        name = _name_of_best(home.stores[:: -1 if remote_age >= local_age else 1])
    else:
        name = max(local_age, remote_age)[-1]
    is_here, is_there = (name in (entry for entry, _ in found) for found in (here, there))
    if not (is_here or is_there):
        raise CheckpointError(
            f"{home.local.child(BEST_NAME)} names {name!r}, which is not there; give the path of a checkpoint"
        )
    is_newer_there = is_there and remote_age > local_age
    return _Found(
        Path(home.local.child(name)) if is_here and not is_newer_there else None,
        home.remote.child(name) if home.remote is not None and is_there else None,
    )


def _name_of_best(stores: list[Store]) -> str:
    """Return the name of the best checkpoint, as the first best.json says."""
    for store in stores:
        where, data = f"{store.shown}/{BEST_NAME}", store.read(BEST_NAME, _LARGEST_BEST)
        if data is not None:
            break
    else:
        raise CheckpointError(
            f"there is no {where}, so no checkpoint is known as the best; give the path of one"
        )
    try:
        content: Any = json.loads(data)
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
