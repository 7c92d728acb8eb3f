"""Where a run saves, and which checkpoint it loads: a path, a URL, or "last" or "best" of a folder."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from plsc.checkpoint import Manifest, list_checkpoints, read_manifest
from plsc.checkpoint.all_ranks import on_every_rank, rank_on_shared_disk
from plsc.checkpoint.manifest import MANIFEST_NAME
from plsc.checkpoint.remote import clean, fetch
from plsc.checkpoint.retention import BEST_NAME, age_key, checkpoints_in
from plsc.checkpoint.save import check_replaceable
from plsc.config import Config
from plsc.data.samples import LIST_NAME
from plsc.errors import CheckpointError, OptionError
from plsc.parallel.world import World
from plsc.storage.cache import folder_for
from plsc.storage.publish import FolderLock, lock_note
from plsc.storage.store import Store
from plsc.storage.urls import base_name, is_url, join, parent_of, shown
from plsc.train.classes import OpenedCheckpoint
from plsc.train.logs import METRICS_NAME, PLOT_NAME

LAST, BEST = "last", "best"  # of the save_dir, in place of a path
SMALL_FILES = (METRICS_NAME, PLOT_NAME, LIST_NAME)  # that a run writes next to its checkpoints
logger = logging.getLogger(__name__)
_VERSION = re.compile(r"version_[0-9]{1,18}")
_EPOCH = re.compile(r"0|[1-9][0-9]{0,18}")  # the name of an epoch's checkpoint
_START_SECONDS = 20.0  # for a store to answer before training begins
_LARGEST_BEST = 2**16  # bytes


@dataclass(frozen=True)
class Home:
    """A folder in which one run saves, and its store: those of save_dir itself, or of a version in it."""

    version: str
    local: Store
    remote: Store | None

    @property
    def stores(self) -> list[Store]:
        """Return the folder, and the store if there is one."""
        return [self.local] if self.remote is None else [self.local, self.remote]

    def name_of(self, locations: Collection[str]) -> str:
        """Return the name of the checkpoint at one of some paths or URLs if it is in here, else nothing."""
        here = {_resolved(store.url) for store in self.stores}
        names = [base_name(one) for one in map(_resolved, locations) if parent_of(one) in here]
        return names[0] if names else ""

    def holds_other_run(self, run_id: str) -> bool:
        """Whether some checkpoint in here carries the id of another run, or this is a link to elsewhere."""
        if self.version and self.local.is_link(""):
            return True
        found = [manifest for store in self.stores for _, manifest in checkpoints_in(store)]
        return any(manifest.run_id not in ("", run_id) for manifest in found)


@dataclass(frozen=True)
class Start:
    """Which run this is, where it saves (a folder, and the URL of a store or None), and what it resumes.

    checkpoint: its local folder and manifest, None if the run begins anew. resumed: its name if it is in the
    folder or store where this run saves, else empty. launches: of all ranks. note: for the user.
    """

    local: Path
    url: str | None
    run_id: str = ""
    resumed: str = ""
    launches: Sequence[str] = ()
    note: str = ""
    checkpoint: OpenedCheckpoint | None = None


@dataclass(frozen=True)
class Directories:
    """Where a run saves: its `start`, and the store where each checkpoint is sent, too.

    is_shared: all ranks see the same folder. is_owner: this rank tidies it on its machine.
    """

    start: Start
    store: Store | None
    is_shared: bool
    is_owner: bool
    lock: FolderLock | None

    @property
    def local(self) -> Path:
        """The folder of checkpoints, metrics and plots."""
        return self.start.local

    def release(self) -> None:
        """Let other runs save here."""
        if self.lock is not None:
            self.lock.release()


def homes_of(options: Config) -> list[Home]:
    """Return where runs of this save_dir may have saved: its versions, the newest first, then itself.

    Raises DataError if a store does not answer.
    """
    local, url = _roots(options)
    top = _home(local, url, "")
    names = {name for store in top.stores for name in store.names(only_folders=True)}
    known = sorted(filter(_VERSION.fullmatch, names), key=_number, reverse=True)
    return [*(_home(local, url, version) for version in known), top]


def interrupted_home(homes: list[Home], launches: Collection[str]) -> Home | None:
    """Return where ranks that the launcher has replaced by this one's were saving; None if it replaced none.

    A launcher's agent is in the note of the lock; this process may have trained before.
    """
    for home in homes:
        note = lock_note(Path(home.local.url))
        is_this_process = (note.get("host"), note.get("pid")) == (socket.gethostname(), os.getpid())
        if not is_this_process and not set(launches).isdisjoint(note.get("launches", [])):
            return home
    return None


def choose_start(
    options: Config,
    launches: Collection[str],
    interrupted: str | None,
    locations: Collection[str],
    run_id: str,
) -> Start:
    """Return which run this is; for one process.

    A run saves only where its own options say, and only where no other run's checkpoints are: a checkpoint
    that is in such a folder is resumed in place; from any other one, or from none, a new run begins in
    save_dir, or in its next version if save_dir has checkpoints. interrupted: the version of
    `interrupted_home`. locations, run_id: of the checkpoint to resume, if any.
    """
    homes = homes_of(options)
    fresh = secrets.token_hex(8)

    def start(home: Home, run_id: str, resumed: str = "", note: str = "") -> Start:
        url = None if home.remote is None else home.remote.url
        return Start(Path(home.local.url), url, run_id, resumed, sorted(launches), note)

    for home in homes:
        name = home.name_of(locations)
        is_resumed = name and not options.checkpoint.new_version
        if home.version == interrupted or (
            interrupted is None and is_resumed and not home.holds_other_run(run_id)
        ):
            return start(home, run_id if name and run_id else fresh, name)
    taken = [store for store in homes[-1].stores if checkpoints_in(store)]
    if not taken and not options.checkpoint.new_version:
        return start(homes[-1], fresh)
    newest = _number(homes[0].version) if len(homes) > 1 else -1
    version = f"version_{max(newest, 0 if taken else -1) + 1}"
    note = ""
    if taken and not options.checkpoint.new_version:
        note = (
            f"{taken[-1].shown} holds checkpoints of an earlier run; this run saves to "
            f"{shown(join(options.checkpoint.save_dir, version))} (set_checkpoint_dir('last') resumes the "
            "newest run)"
        )
    return start(_home(*_roots(options), version), fresh, note=note)


def open_directories(options: Config, world: World, start: Start) -> Directories:
    """Return the directories of a run that is about to begin: tidied after a kill, and locked. Collective.

    Raises CheckpointError on all ranks: another run saves there, something that is no checkpoint has the name
    of one, no permission, a store that does not answer (within a minute).
    """
    local = start.local
    index, count = rank_on_shared_disk(local, world)
    is_owner = index == 0
    locks: list[FolderLock] = []

    def claim() -> None:
        if not is_owner:
            return
        locks.append(FolderLock(local, {"launches": start.launches}))
        folder = Store(local)
        for name in clean(folder):
            logger.warning(f"{local / name} was being replaced when a run was killed; it is back")
        for name in folder.names():
            if name in SMALL_FILES and not stat.S_ISREG((local / name).lstat().st_mode):
                raise CheckpointError(f"{local / name} is no regular file; remove it, or save elsewhere")
            # Where an epoch is to be saved, which a run ended by its steps may have billions of.
            if _EPOCH.fullmatch(name) and int(name) < options.train.epochs:
                check_replaceable(folder, name)  # now, and not after an epoch of training

    on_every_rank(world, f"save to {local}", claim)
    is_shared = min(on_every_rank(world, "count ranks", lambda: count)) == world.size
    lock = locks[0] if locks else None
    store = None
    if start.url is not None:
        store = _open_store(start.url, options, world, bool(start.resumed))
    return Directories(start, store, is_shared, is_owner, lock)


def _roots(options: Config) -> tuple[Path, str | None]:
    """Return the folder of this machine for save_dir, which may be a URL, and the URL of its store."""
    checkpoint = options.checkpoint
    save_dir, upload_dir = checkpoint.save_dir, checkpoint.upload_dir
    if not is_url(save_dir):
        return Path(save_dir), upload_dir
    if upload_dir is not None:
        raise OptionError(
            f"save_dir is a URL, and upload_dir is set, too ({shown(upload_dir)}); checkpoints are sent "
            "to one store: leave one of the two out"
        )
    local = checkpoint.local_dir
    return folder_for("runs", save_dir) if local is None else Path(local), save_dir


def _home(local: Path, url: str | None, version: str) -> Home:
    remote = None
    if url is not None:
        remote = Store(join(url, version) if version else url, total_seconds=_START_SECONDS)
    return Home(version, Store(local / version), remote)


def _number(version: str) -> int:
    return int(version.removeprefix("version_"))


def _resolved(location: str) -> str:
    return location.rstrip("/") if is_url(location) else str(Path(location).resolve())


def _open_store(url: str, options: Config, world: World, is_own: bool) -> Store:
    """Return the store, once it has answered; what a kill left there is removed if it is this run's."""
    opened: list[Store] = []

    def reach() -> None:
        store = Store(url, total_seconds=_START_SECONDS, silence=_START_SECONDS)
        if world.is_main:
            store.make_folder()
            if is_own:
                clean(store)
        else:
            store.exists()
        opened.append(Store(url, total_seconds=options.checkpoint.store_timeout))

    on_every_rank(world, f"reach {shown(url)}", reach)
    return opened[0]


def open_load_dir(options: Config, world: World) -> OpenedCheckpoint:
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


def open_to_resume(options: Config, world: World) -> OpenedCheckpoint | None:
    """Return the checkpoint that training resumes, and its manifest; None to begin anew; a collective.

    A run with "last" begins anew (or from `checkpoint.download_dir`) where nothing was saved yet, so that
    the same script starts, and is started again.
    """
    return _open(options, world, ())[0]


def open_start(options: Config, world: World) -> Start:
    """Return which run this is, and the checkpoint that it resumes, if any; a collective.

    Ranks that a launcher started in place of those that failed resume the run that these had begun.
    """
    launches = {one for one in world.all_gather_object(world.launch_id) if one}
    checkpoint, locations, interrupted = _open(options, world, launches)
    run_id = "" if checkpoint is None else checkpoint[1].run_id

    def choose() -> Start | None:
        if not world.is_main:
            return None
        return choose_start(options, launches, interrupted, locations, run_id)

    start = on_every_rank(world, f"look into {shown(options.checkpoint.save_dir)}", choose)[0]
    assert start is not None
    return replace(start, checkpoint=checkpoint)


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


def _open(
    options: Config, world: World, launches: Collection[str]
) -> tuple[OpenedCheckpoint | None, set[str], str | None]:
    """Return the checkpoint to load, if any, and all paths and URLs that it has.

    And the version in which ranks of one of these `launches` were saving, None if there is none.
    """
    place, url = options.checkpoint.load_dir, options.checkpoint.download_dir
    (folder, found_url), interrupted = on_every_rank(
        world,
        f"find the {place if place in (LAST, BEST) else LAST} checkpoint of "
        f"{shown(options.checkpoint.save_dir)}",
        lambda: _look(options, launches) if world.is_main else ((None, None), None),
    )[0]
    locations = {str(one) for one in (folder, found_url) if one is not None}
    if locations:
        folder = _bring(folder, found_url, world)
    else:
        if place is not None and is_url(place):
            if url is not None:
                raise OptionError(f"both {shown(place)} and {shown(url)} are to be loaded; name one")
            url = place
        elif place not in (None, LAST, BEST):
            folder = Path(place)
        locations = {str(one) for one in (folder, url) if one is not None}
        if url is not None:
            folder = fetch(url, world, folder)
    opened = None if folder is None else (folder, open_checkpoint(folder))
    return opened, locations, interrupted


def _bring(folder: Path | None, url: str | None, world: World) -> Path:
    """Return the folder of what rank 0 found, if every rank sees it, or a copy of what is in the store."""
    if folder is not None:
        seen = on_every_rank(world, f"look at {folder}", (folder / MANIFEST_NAME).is_file)
        if all(seen):
            return folder
        if url is None:
            raise CheckpointError(
                f"rank {seen.index(False)} does not see {folder}, where rank 0 found the checkpoint; save to "
                "a folder that all machines share, or to a store (checkpoint.upload_dir)"
            )
    assert url is not None
    return fetch(url, world)


_Found = tuple[Path | None, str | None]
"""A checkpoint that was found: its folder on rank 0's machine, its URL; one of the two at least."""


def _look(options: Config, launches: Collection[str]) -> tuple[_Found, str | None]:
    """Return what is to be loaded from where the run saves, and the version that was interrupted.

    For one process. Raises CheckpointError if no best checkpoint is known.
    """
    wanted = options.checkpoint.load_dir
    if not launches and wanted not in (LAST, BEST):
        return (None, None), None
    homes = homes_of(options)
    home = interrupted_home(homes, launches)
    interrupted = None if home is None else home.version
    if home is not None and (found := _find(home, LAST)):
        return found, interrupted
    for home in homes if wanted in (LAST, BEST) else ():
        if found := _find(home, wanted):
            return found, interrupted
    if wanted == BEST:
        raise CheckpointError(
            f"{shown(options.checkpoint.save_dir)} holds no checkpoint, so none is the best; train "
            "first, or give the path of one"
        )
    return (None, None), interrupted


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
    return (
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
