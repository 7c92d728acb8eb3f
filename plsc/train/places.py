"""Where a run's checkpoints go: a folder of this machine, and a store if there is one."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from plsc.checkpoint import Manifest
from plsc.checkpoint.agree import neighbours, on_every_rank
from plsc.checkpoint.remote import check_replaceable, clean
from plsc.checkpoint.retention import checkpoints_in
from plsc.config import Config
from plsc.data.bad_samples import LIST_NAME
from plsc.errors import CheckpointError, OptionError
from plsc.parallel.world import World
from plsc.storage.cache import folder_for
from plsc.storage.publish import FolderLock, lock_note
from plsc.storage.store import Store
from plsc.storage.urls import base_name, is_url, join, parent_of, shown
from plsc.train.logs import METRICS_NAME, PLOT_NAME

SMALL_FILES = (METRICS_NAME, PLOT_NAME, LIST_NAME)  # that a run writes next to its checkpoints
_VERSION = re.compile(r"version_[0-9]{1,18}")
_EPOCH = re.compile(r"0|[1-9][0-9]{0,18}")  # the name of an epoch's checkpoint
_START_SECONDS = 20.0  # for a store to answer before training begins


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

    def name_of(self, locations: Collection[str]) -> str | None:
        """Return the name of the checkpoint at one of some paths or URLs if it is in here, else None."""
        here = {_resolved(store.url) for store in self.stores}
        names = [base_name(one) for one in map(_resolved, locations) if parent_of(one) in here]
        return names[0] if names else None

    def holds_other_run(self, run_id: str) -> bool:
        """Whether some checkpoint in here carries the id of another run, or this is a link to elsewhere."""
        if self.version and self.local.is_link(""):
            return True
        found = [manifest for store in self.stores for _, manifest in checkpoints_in(store)]
        return any(manifest.run_id not in ("", run_id) for manifest in found)


@dataclass(frozen=True)
class Start:
    """Which run this is, and where it saves: a folder, and the URL of a store or None.

    resumed: name of the checkpoint in there that is resumed, None if the run is a new one. launches: of all
    ranks. note: for the user.
    """

    local: Path
    url: str | None
    run_id: str = ""
    resumed: str | None = None
    launches: Sequence[str] = ()
    note: str = ""


@dataclass
class Places:
    """local: the folder of checkpoints, metrics and plots. store: where each checkpoint is sent, too.

    is_shared: all ranks see the same `local`. is_owner: this rank tidies it on its machine.
    """

    local: Path
    store: Store | None
    is_shared: bool
    is_owner: bool
    lock: FolderLock | None
    start: Start

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
    manifest: Manifest | None,
) -> Start:
    """Return which run this is; for one process.

    A run saves only where its own options say, and only where no other run's checkpoints are: a checkpoint
    that is in such a folder is resumed in place; from any other one, or from none, a new run begins in
    save_dir, or in its next version if save_dir has checkpoints. interrupted: the version of
    `interrupted_home`. locations, manifest: of the checkpoint to resume, if any.
    """
    homes = homes_of(options)
    run_id = "" if manifest is None else manifest.run_id
    fresh = secrets.token_hex(8)
    launches = sorted(launches)
    for home in homes:
        name = home.name_of(locations)
        is_resumed = name is not None and not options.checkpoint.new_version
        if home.version == interrupted or (
            interrupted is None and is_resumed and not home.holds_other_run(run_id)
        ):
            kept = run_id if name is not None and run_id else fresh
            return _start(home, kept, name, launches)
    taken = [store for store in homes[-1].stores if checkpoints_in(store)]
    if not taken and not options.checkpoint.new_version:
        return _start(homes[-1], fresh, None, launches)
    newest = _number(homes[0].version) if len(homes) > 1 else -1
    version = f"version_{max(newest, 0 if taken else -1) + 1}"
    home = _home(*_roots(options), version)
    note = ""
    if taken and not options.checkpoint.new_version:
        note = (
            f"{taken[-1].shown} holds checkpoints of an earlier run; this run saves to "
            f"{shown(join(options.checkpoint.save_dir, version))} (set_checkpoint_dir('last') resumes the "
            "newest run)"
        )
    return _start(home, fresh, None, launches, note)


def _start(
    home: Home, run_id: str, resumed: str | None, launches: Sequence[str], note: str = ""
) -> Start:
    url = None if home.remote is None else home.remote.url
    return Start(Path(home.local.url), url, run_id, resumed, launches, note)


def open_places(
    options: Config, world: World, say: Callable[[str], None], start: Start | None = None
) -> Places:
    """Return the places of a run that is about to begin: tidied after a kill, and locked. Collective.

    Raises CheckpointError on all ranks: another run saves there, something that is no checkpoint has the name
    of one, no permission, a store that does not answer (within a minute).
    """
    start = start or Start(*_roots(options))
    local = start.local
    index, count = neighbours(local, world)
    is_owner = index == 0
    locks: list[FolderLock] = []

    def claim() -> None:
        if not is_owner:
            return
        locks.append(FolderLock(local, {"launches": start.launches}))
        folder = Store(local)
        for name in clean(folder):
            say(f"{local / name} was being replaced when a run was killed; it is back")
        for name in folder.names():
            if name in SMALL_FILES and not stat.S_ISREG((local / name).lstat().st_mode):
                raise CheckpointError(
                    f"{local / name} is no regular file; remove it, or save elsewhere"
                )
            # Where an epoch is to be saved, which a run ended by its steps may have billions of.
            if _EPOCH.fullmatch(name) and int(name) < options.train.epochs:
                check_replaceable(folder, name)  # now, and not after an epoch of training

    on_every_rank(world, f"save to {local}", claim)
    is_shared = min(on_every_rank(world, "count ranks", lambda: count)) == world.size
    lock = locks[0] if locks else None
    store = None
    if start.url is not None:
        store = _open_store(start.url, options, world, start.resumed is not None)
    return Places(local, store, is_shared, is_owner, lock, start)


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
