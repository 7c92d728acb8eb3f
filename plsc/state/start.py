"""Choose the folder in which a run saves, and open it: its lock, and its store."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.checkpoint.all_ranks import on_every_rank, on_main_rank, own_result, rank_on_shared_disk
from plsc.checkpoint.remote import clean
from plsc.checkpoint.retention import checkpoints_in
from plsc.checkpoint.save import check_replaceable
from plsc.config import Config, Options
from plsc.data.samples import LIST_NAME
from plsc.errors import CheckpointError, DataError
from plsc.parallel.world import World
from plsc.run.classes import OpenedCheckpoint
from plsc.run.loggers import METRICS_NAME, PLOT_NAME
from plsc.state.find import resolve_checkpoint
from plsc.state.folders import (
    START_SECONDS,
    VERSION_NAME,
    RunFolder,
    list_run_folders,
    open_run_folder,
    roots_of,
    version_number,
)
from plsc.storage.publish import FolderLock, lock_note
from plsc.storage.store import Store, hidden_versions
from plsc.storage.urls import is_url, join, shown

# Files that a run writes next to its checkpoints.
SMALL_FILES = (METRICS_NAME, PLOT_NAME, LIST_NAME)
logger = logging.getLogger(__name__)
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
            "set_checkpoint_dir('last')"
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
            if _EPOCH.fullmatch(name) and int(name) < options.train.epochs:
                check_replaceable(folder, name)  # fail now, not after an epoch of training

    on_every_rank(world, f"save to {local}", claim)
    is_shared = min(on_every_rank(world, "count ranks", lambda: count)) == world.size
    lock = locks[0] if locks else None
    store = None
    if start.url is not None:
        store = _open_store(start.url, world, bool(start.resumed))
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


def _open_store(url: str, world: World, is_own: bool) -> Store:
    """Return the store after checking that it responds; clean up after a kill if `is_own`."""

    def reach() -> Store:
        store = Store(url, total_seconds=START_SECONDS, silence=START_SECONDS)
        if world.is_main:
            store.make_folder()
            if is_own:
                clean(store)
        else:
            store.exists()
        return Store(url, total_seconds=_RETRY_SECONDS)

    return own_result(world, f"connect to {shown(url)}", reach)


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

    def choose() -> dict[str, Any]:
        return vars(choose_start(options, launches, interrupted, locations, run_id))

    chosen = {**on_main_rank(world, doing, choose), "checkpoint": checkpoint}
    return Start(**{**chosen, "is_fetched": any(map(is_url, locations))})
