"""The folder of a run: find the checkpoint that it loads, choose where it saves, and open that."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, TypedDict

from plsc.checkpoint import Manifest, list_checkpoints, read_manifest
from plsc.checkpoint.all_ranks import on_every_rank, on_main_rank, own_result, rank_on_shared_disk
from plsc.checkpoint.manifest import MANIFEST_NAME
from plsc.checkpoint.remote import clean, fetch
from plsc.checkpoint.retention import BEST_NAME, age_key, checkpoints_in
from plsc.checkpoint.save import check_replaceable
from plsc.config import Config, Options
from plsc.data.samples import LIST_NAME
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.parallel.world import World
from plsc.storage.publish import FolderLock, lock_note
from plsc.storage.records import read_record
from plsc.storage.store import Store, hidden_versions
from plsc.storage.urls import base_name, folder_for, is_url, join, parent_of, shown
from plsc.train.data import OpenedCheckpoint
from plsc.train.log import METRICS_NAME, PLOT_NAME

logger = logging.getLogger(__name__)


VERSION_NAME = re.compile(r"version_[0-9]{1,18}")
START_SECONDS = 20.0  # timeout of a store before training starts


@dataclass(frozen=True)
class RunFolder:
    """A folder in which one run saves, and its store: save_dir itself, or one of its versions."""

    version: str
    local: Store
    remote: Store | None

    @property
    def stores(self) -> list[Store]:
        """The folder, and the remote store if there is one."""
        return [self.local] if self.remote is None else [self.local, self.remote]

    def name_of(self, locations: Collection[str]) -> str:
        """Return the name of the checkpoint if one of its paths or URLs is in this folder, else ''."""
        here = {_resolved(store.url) for store in self.stores}
        names = [base_name(location) for location in map(_resolved, locations) if parent_of(location) in here]
        return names[0] if names else ""

    def holds_other_run(self, run_id: str) -> bool:
        """Return whether a checkpoint here has another run id, or the folder is a symbolic link."""
        if self.version and self.local.is_link(""):
            return True
        manifests = [manifest for store in self.stores for _, manifest in checkpoints_in(store)]
        return any(manifest.run_id not in ("", run_id) for manifest in manifests)


def list_run_folders(options: Options | Config) -> list[RunFolder]:
    """Return the folders in which runs may have saved: the versions of save_dir, newest first, then save_dir.

    Raises DataError if a store does not respond.
    """
    local, url = roots_of(options)
    top = open_run_folder(local, url, "")
    names = {name for store in top.stores for name in store.names(only_folders=True)}
    known = sorted(filter(VERSION_NAME.fullmatch, names), key=version_number, reverse=True)
    return [*(open_run_folder(local, url, version) for version in known), top]


def roots_of(options: Options | Config) -> tuple[Path, str | None]:
    """Return the local folder of save_dir, which may be a URL, and the URL of its store, if any."""
    checkpoint = options.checkpoint
    save_dir, upload_dir = checkpoint.save_dir, checkpoint.upload_dir
    if not is_url(save_dir):
        return Path(save_dir), upload_dir
    if upload_dir is not None:
        raise OptionError(
            f"save_dir is a URL, and upload_dir is set too ({shown(upload_dir)}), but checkpoints are "
            "uploaded to one store only; remove one of the two options"
        )
    return folder_for("runs", save_dir), save_dir


def open_run_folder(local: Path, url: str | None, version: str) -> RunFolder:
    """Return the folder of a run; version: '' for save_dir itself."""
    remote = None
    if url is not None:
        remote = Store(join(url, version) if version else url, total_seconds=START_SECONDS)
    return RunFolder(version, Store(local / version), remote)


def version_number(version: str) -> int:
    """Return the number in the name of a version."""
    return int(version.removeprefix("version_"))


def _resolved(location: str) -> str:
    return location.rstrip("/") if is_url(location) else str(Path(location).resolve())


# The checkpoint to load.

LAST, BEST = "last", "best"  # checkpoints of save_dir, instead of a path
_LARGEST_BEST = 2**16  # bytes


class _Best(TypedDict):
    path: Annotated[str, r"(.*/)?(?!\.\.?$)[^/\0-\x1f]+"]


def open_load_dir(options: Options | Config, world: World) -> OpenedCheckpoint:
    """Return the local folder of the checkpoint to load, downloaded if necessary, and its manifest.

    A collective. Raises OptionError if no checkpoint is set or saved, CheckpointError if it does not exist.
    """
    opened = resolve_checkpoint(options, world, ())[0]
    if opened is None:
        raise OptionError(
            f"no checkpoint is set, or {shown(options.checkpoint.save_dir)} contains no checkpoint; set "
            "checkpoint.load_dir to the folder of one, such as saved_model/7"
        )
    return opened


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

    A collective. With "last", a run starts from scratch (or from `checkpoint.download_dir`) if nothing has
    been saved yet, so that the same script can start and resume the run. If the checkpoint is downloaded to a
    given folder, both its path and its URL.
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
    if folder is not None and all(on_every_rank(world, f"read {folder}", (folder / MANIFEST_NAME).is_file)):
        return folder
    if url is None:
        raise CheckpointError(
            f"not all ranks can read {folder}, where rank 0 found the checkpoint; save to a folder that all "
            "machines share, or to a store (checkpoint.upload_dir)"
        )
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
            return PurePath(
                read_record(_Best, data, f"{store.shown}/{BEST_NAME}", most=_LARGEST_BEST)["path"]
            ).name
    return ""


# The folder to save in.

# Files that a run writes next to its checkpoints.
SMALL_FILES = (METRICS_NAME, PLOT_NAME, LIST_NAME)
_EPOCH = re.compile(r"0|[1-9][0-9]{0,18}")  # the name of the checkpoint of an epoch
_RETRY_SECONDS = 120.0  # for which a failing transfer of a running run is retried


@dataclass(frozen=True)
class Start:
    """The identity of a run, the folder in which it saves, and the checkpoint that it resumes.

    Attributes:
        local: folder on this machine.
        url: URL of the store, or None.
        run_id: id of the run, stored in its checkpoints.
        resumed: name of the resumed checkpoint if it is in `local` or `url`, else ''.
        launches: launcher ids of all ranks.
        note: log line about this choice.
        checkpoint: local folder and manifest of the resumed checkpoint; None if the run starts from scratch.
        is_fetched: whether it is from a URL, where it is complete.
    """

    local: Path
    url: str | None
    run_id: str = ""
    resumed: str = ""
    launches: Sequence[str] = ()
    note: str = ""
    checkpoint: OpenedCheckpoint | None = None
    is_fetched: bool = False


@dataclass(frozen=True)
class Directories:
    """The folder in which a run saves, and the store to which it uploads.

    is_shared: all ranks see the same folder. is_owner: this rank deletes old files on its machine. lock: the
    lock of the folder, held by its owner.
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
        """Release the lock of the folder, so that other runs can save to it."""
        if self.lock is not None:
            self.lock.release()


def choose_start(
    options: Options | Config,
    launches: Collection[str],
    interrupted: str | None,
    locations: Collection[str],
    run_id: str,
) -> Start:
    """Choose the folder and the id of the run; called by one process.

    A run saves only within its save_dir, and never next to checkpoints of another run. A checkpoint in such a
    folder is resumed in place. Otherwise a new run saves to save_dir, or to its next version if save_dir has
    checkpoints. interrupted: the version from `find_interrupted`. locations, run_id: paths and run id of the
    checkpoint to resume, if any.
    """
    run_folders = list_run_folders(options)
    fresh = secrets.token_hex(8)

    def start(run_folder: RunFolder, run_id: str, resumed: str = "", note: str = "") -> Start:
        url = None if run_folder.remote is None else run_folder.remote.url
        return Start(Path(run_folder.local.url), url, run_id, resumed, sorted(launches), note)

    for run_folder in run_folders:
        name = run_folder.name_of(locations)
        is_resumed = name and not options.checkpoint.new_version
        if run_folder.version == interrupted or (
            interrupted is None and is_resumed and not run_folder.holds_other_run(run_id)
        ):
            return start(run_folder, run_id if name and run_id else fresh, name)
    taken = [store for store in run_folders[-1].stores if checkpoints_in(store)]
    if not taken and not options.checkpoint.new_version:
        return start(run_folders[-1], fresh)
    newest = version_number(run_folders[0].version) if len(run_folders) > 1 else -1
    version = f"version_{max(newest, 0 if taken else -1) + 1}"
    note = ""
    if taken and not options.checkpoint.new_version:
        note = (
            f"{taken[-1].shown} contains checkpoints of an earlier run, so this run saves to "
            f"{shown(join(options.checkpoint.save_dir, version))}; to resume the newest run instead, use "
            "checkpoint.load_dir last"
        )
    return start(open_run_folder(*roots_of(options), version), fresh, note=note)


def open_directories(options: Options | Config, world: World, start: Start) -> Directories:
    """Lock the directories of a run, and clean up after a killed run; a collective.

    Raises CheckpointError on all ranks if another run saves there, if another file has the name of a
    checkpoint, if a permission is missing, or if a store does not respond within a minute.
    """
    local = start.local
    index, count = rank_on_shared_disk(local, world)
    is_owner = index == 0
    locks: list[FolderLock] = []
    first = 0 if start.checkpoint is None else start.checkpoint[1].epoch

    def claim() -> None:
        if not is_owner:
            return
        locks.append(FolderLock(local, {"launches": start.launches}))
        folder = Store(local)
        _clean(folder)
        for name in folder.names():
            is_file = name in SMALL_FILES or name.startswith("log-rank")
            if is_file and not stat.S_ISREG((local / name).lstat().st_mode):
                raise CheckpointError(
                    f"{local / name} is not a regular file; remove it, or save to another folder"
                )
            # Check existing names, not all epochs: a run limited by train.steps may have billions of epochs.
            if _EPOCH.fullmatch(name) and first <= int(name) < options.train.epochs:
                check_replaceable(folder, name, start.run_id)  # fail now, not after an epoch of training

    on_every_rank(world, f"save to {local}", claim)
    is_shared = min(on_every_rank(world, "count ranks", lambda: count)) == world.size
    lock = locks[0] if locks else None
    store = None
    if start.url is not None:
        store = own_result(world, f"connect to {shown(start.url)}", partial(_reach, start, world.is_main))
    return Directories(start, store, is_shared, is_owner, lock)


def _clean(folder: Store) -> None:
    """Remove what a killed run left in a local folder, whose lock this process holds."""
    for name in clean(folder):
        logger.warning(
            f"a run was killed while it replaced {folder.child(name)}; the old version was restored"
        )


def _restore_replaced(options: Options | Config) -> None:
    """Restore checkpoints that a killed run was replacing, in the folders of save_dir on this machine."""
    top = Store(roots_of(options)[0])
    versions = filter(VERSION_NAME.fullmatch, top.names(only_folders=True))
    for folder in [top, *(Store(top.child(name)) for name in versions if not top.is_link(name))]:
        if not hidden_versions(folder):
            continue
        here = Path(folder.url)
        with contextlib.suppress(DataError):  # a run that lives is about to publish the replacement
            lock = FolderLock(here, lock_note(here))  # `find_interrupted` reads the note
            try:
                _clean(folder)
            finally:
                lock.release()


def _reach(start: Start, is_main: bool) -> Store:
    """Return the store after checking that it responds; clean up after a kill if it is the run's own."""
    url = str(start.url)
    store = Store(url, total_seconds=START_SECONDS, silence=START_SECONDS)
    if not is_main:
        store.exists()
    else:
        store.make_folder()
        if start.resumed:
            clean(store)
    return Store(url, total_seconds=_RETRY_SECONDS)


def open_start(options: Options | Config, world: World) -> Start:
    """Choose the folder of the run and the checkpoint that it resumes, if any; a collective.

    Ranks that a launcher restarts after a failure resume the interrupted run.
    """
    launches = {launch for launch in world.all_gather_object(world.launch_id) if launch}

    def restore() -> None:
        if world.local_rank == 0:
            _restore_replaced(options)

    doing = f"look into {shown(options.checkpoint.save_dir)}"
    on_every_rank(world, doing, restore)  # before the choice, which must find them
    checkpoint, locations, interrupted = resolve_checkpoint(options, world, launches)
    run_id = "" if checkpoint is None else checkpoint[1].run_id

    choose = partial(choose_start, options, launches, interrupted, locations, run_id)
    chosen = Start(**on_main_rank(world, doing, lambda: vars(choose())))  # ranks exchange dictionaries
    return replace(chosen, checkpoint=checkpoint, is_fetched=any(map(is_url, locations)))
