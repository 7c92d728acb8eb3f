"""The folder of a run: which checkpoint it loads, where it saves, and who else may write there.

A run at `save_dir` (locally, in a store, or in both) finds or leaves there::

    0/ 1/ 2-step500/     checkpoints, named by epoch; a folder without a manifest is none
    best.json            the name of the best one
    metrics.jsonl ...    what the loggers write
    .lock                locally: held by the run that saves here; names the launchers of its ranks
    .owner               in a store: the token of the run that uploads here
    version_1/ ...       the same, of the runs after the first one

1. A checkpoint is a path, a URL, ``last`` or ``best`` of `save_dir`: that of the newest version that has one.
   ``last`` starts from scratch if there is none.
2. A run that resumes the newest checkpoint of such a folder continues there, with its run id. Any other run
   gets a new id, and the next version if `save_dir` has checkpoints: one that resumes an older checkpoint
   takes another course. A run deletes and replaces only what has its id.
3. Ranks that a launcher restarts resume the newest checkpoint of the version whose lock names that launcher.
4. What a killed run left unfinished is removed, and a checkpoint that it was replacing is restored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, TypedDict

from plsc.checkpoint import read_manifest
from plsc.checkpoint.manifest import Manifest, OpenedCheckpoint, age_key, checkpoints_in
from plsc.checkpoint.remote import OWNER_NAME, fetch
from plsc.checkpoint.save import BEST_NAME, check_replaceable
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.parallel.failure import on_every_rank, on_main_rank, own_result, rank_on_shared_disk
from plsc.parallel.world import World
from plsc.storage.disk import MANIFEST_NAME, FolderLock, lock_note, read_record
from plsc.storage.store import Store, clean, hidden_versions
from plsc.storage.urls import base_name, folder_for, is_url, join, parent_of, shown

logger = logging.getLogger(__name__)

LAST, BEST = "last", "best"  # checkpoints of save_dir, instead of a path
START_SECONDS = 20.0  # timeout of a store before training starts
_RETRY_SECONDS = 120.0  # for which a failing transfer of a running run is retried
_VERSION = re.compile(r"version_[0-9]{1,18}")
_EPOCH = re.compile(r"0|[1-9][0-9]{0,18}")  # the name of the checkpoint of an epoch
_LARGEST_BEST = 2**16  # bytes


class RunFolder:
    """The folder in which a run saves, and the checkpoint that it loads. Methods are collectives.

    `find` is enough to load a checkpoint. A run that saves calls `choose`, and saves within `locked`.

    Attributes:
        checkpoint: local folder and manifest of the checkpoint to load; None: start from scratch.
        is_fetched: whether it was downloaded.
        path: folder on this machine.
        store: the store to which the run uploads, or None.
        run_id: id of the run, stored in its checkpoints.
        resumed: name of the resumed checkpoint if it is in this folder, else ''.
        note: log line about the choice.
        is_shared: whether all ranks see one folder.
        is_owner: whether this rank deletes old files on its machine.
    """

    checkpoint: OpenedCheckpoint | None = None
    is_fetched: bool = False
    path: Path
    store: Store | None = None
    run_id: str = ""
    resumed: str = ""
    note: str = ""
    is_shared: bool = True
    is_owner: bool = False

    def __init__(
        self,
        world: World,
        save_dir: str,
        upload_dir: str | None = None,
        load_dir: str | None = None,
        download_dir: str | None = None,
    ) -> None:
        """Raise OptionError for two URLs where there can be one; see the options in `checkpoint`."""
        for name, place, other, url in (
            ("save_dir", save_dir, "upload_dir", upload_dir),
            ("load_dir", load_dir, "download_dir", download_dir),
        ):
            if place is not None and is_url(place) and url is not None:
                raise OptionError(f"both {name} {shown(place)} and {other} {shown(url)} are URLs; set one")
        self._world = world
        self._save_dir, self._load_dir = save_dir, load_dir
        self._top, self._top_url = Path(save_dir), upload_dir
        if is_url(save_dir):
            self._top, self._top_url = folder_for("runs", save_dir), save_dir
        self._url: str | None = None  # of the version of this run
        self._download_url = download_dir
        if load_dir is not None and is_url(load_dir):
            self._load_dir, self._download_url = None, load_dir
        self._launches: list[str] = []
        self._interrupted: str | None = None  # the version in which ranks of these launches were saving
        self._locations: set[str] = set()  # path or URL of the checkpoint, or both

    # 1. The checkpoint to load.

    def find(self) -> OpenedCheckpoint:
        """Find the checkpoint to load, and download it if necessary. Raises OptionError if there is none."""
        self._find()
        if self.checkpoint is None:
            raise OptionError(
                f"no checkpoint is set, or {shown(self._save_dir)} contains none; set checkpoint.load_dir to "
                "the folder of one, such as saved_model/7, or checkpoint.save_dir to that of the run"
            )
        return self.checkpoint

    def _find(self) -> None:
        world, url = self._world, self._download_url
        doing = f"find the {BEST if self._load_dir == BEST else LAST} checkpoint of {shown(self._save_dir)}"
        folder, saved_url, self._interrupted = on_main_rank(world, doing, self._find_saved)
        if folder is not None or saved_url is not None:
            self._locations = {str(folder or saved_url)}
            folder = self._visible_to_all(folder, saved_url)
        else:
            if self._load_dir not in (None, LAST, BEST):
                folder = Path(str(self._load_dir))
            if url is not None:
                url = on_main_rank(world, f"reach {shown(url)}", partial(_newest_at, url))
            self._locations = {str(place) for place in (folder, url) if place is not None}
            if url is not None:
                folder, self.is_fetched = fetch(url, world, folder), True
        self.checkpoint = None if folder is None else (folder, read_manifest(folder))

    def _find_saved(self) -> tuple[Path | None, str | None, str | None]:
        """Return path and URL of the checkpoint in save_dir, and the interrupted version, if there are any.

        Called by one process. Raises CheckpointError if no best checkpoint is known.
        """
        wanted = self._load_dir if self._load_dir in (LAST, BEST) else None
        versions = self._versions() if wanted or self._launches else []
        interrupted = next(filter(self._was_interrupted, versions), None)
        name = None if interrupted is None else interrupted.name
        if interrupted is not None and (place := interrupted.find(LAST)):
            return *place, name
        for version in versions if wanted else ():
            if place := version.find(str(wanted)):
                return *place, name
        if wanted == BEST:
            raise CheckpointError(
                f"checkpoint.load_dir is {BEST!r}, but {shown(self._save_dir)} contains no checkpoint; train "
                "first, or set the path of a checkpoint"
            )
        return None, None, name

    def _versions(self) -> list[_Version]:
        """Return where runs may have saved: the versions of save_dir, newest first, then save_dir.

        Raises DataError if a store does not respond.
        """
        top = self._version("")
        names = {name for store in top.stores for name in store.names(only_folders=True)}
        known = sorted(filter(_VERSION.fullmatch, names), key=_number, reverse=True)
        return [*map(self._version, known), top]

    def _version(self, name: str) -> _Version:
        remote = None
        if self._top_url is not None:
            url = join(self._top_url, name) if name else self._top_url
            remote = Store(url, total_seconds=START_SECONDS)
        return _Version(name, Store(self._top / name), remote, is_url(self._save_dir))

    def _was_interrupted(self, version: _Version) -> bool:
        """Return whether the launcher has restarted the ranks that were saving in a version."""
        note = lock_note(Path(version.local.url))  # stays when its run ends
        is_this_process = (note.get("host"), note.get("pid")) == (socket.gethostname(), os.getpid())
        return not is_this_process and not set(self._launches).isdisjoint(note.get("launches", []))

    def _visible_to_all(self, folder: Path | None, url: str | None) -> Path:
        """Return the folder that rank 0 found if every rank sees it, else a local copy from the store."""
        world = self._world
        if folder is not None:
            # A machine may have the files of its own ranks alone.
            listed = on_every_rank(world, f"read {folder}", Store(folder).names)
            if all(names == listed[0] for names in listed):
                return folder
            remote = self._version("" if folder.parent == self._top else folder.parent.name).remote
            if url is None and remote is not None:  # killed before it was uploaded
                url = on_main_rank(world, f"reach {remote.shown}", partial(_newest_at, remote.url))
                self._locations = {url}
        if url is None:
            raise CheckpointError(
                f"not all ranks can read {folder}, where rank 0 found the checkpoint; save to a folder that "
                "all machines share, or to a store (checkpoint.upload_dir)"
            )
        return fetch(url, world)

    # 2. The folder to save in.

    def choose(self, new_version: bool = False) -> None:
        """Find the checkpoint to resume, if any, and choose the folder and id of the run.

        new_version: save to a new version in any case.
        """
        world, doing = self._world, f"look into {shown(self._save_dir)}"
        self._launches = sorted({launch for launch in world.all_gather_object(world.launch_id) if launch})
        on_every_rank(world, doing, self._restore_replaced)  # before the search, which must find them
        self._find()
        self.path, self._url, self.run_id, self.resumed, self.note = on_main_rank(
            world, doing, partial(self._choose, new_version)
        )

    def _restore_replaced(self) -> None:
        """Restore checkpoints that a killed run was replacing, on the disk of this machine."""
        if self._world.local_rank != 0:
            return
        top = Store(self._top)
        versions = filter(_VERSION.fullmatch, top.names(only_folders=True))
        for folder in [top, *(Store(top.child(name)) for name in versions if not top.is_link(name))]:
            if not hidden_versions(folder):
                continue
            here = Path(folder.url)
            # A run that lives is about to publish the replacement. `_was_interrupted` reads the note.
            with contextlib.suppress(DataError), FolderLock(here, lock_note(here)):
                _clean(folder)

    def _choose(self, new_version: bool) -> tuple[Path, str | None, str, str, str]:
        """Return path, URL, run id, name of the resumed checkpoint and note; called by one process."""
        resumed = self.checkpoint and self.checkpoint[1]
        run_id = resumed.run_id if resumed else ""
        fresh = secrets.token_hex(8)
        versions = self._versions()
        for version in versions:
            name = version.name_of(self._locations)
            continues = name and resumed and version.continues(resumed)
            is_interrupted = version.name == self._interrupted and (continues or not name)
            if is_interrupted or (self._interrupted is None and continues and not new_version):
                return *version.places, run_id if name and run_id else fresh, name, ""
        taken = [store.shown for version in versions for store in version.stores if checkpoints_in(store)]
        if not taken and not new_version:
            return *versions[-1].places, fresh, "", ""
        newest = _number(versions[0].name) if len(versions) > 1 else -1
        next_version = self._version(f"version_{max(newest, 0 if taken else -1) + 1}")
        note = (
            f"{taken[-1]} contains checkpoints of an earlier run, so this run saves to "
            f"{shown(join(self._save_dir, next_version.name))}; to resume the newest run instead, use "
            "checkpoint.load_dir last"
            if taken and not new_version
            else ""
        )
        return *next_version.places, fresh, "", note

    # 3. One run at a time.

    @contextlib.contextmanager
    def locked(self, epochs: int) -> Iterator[None]:
        """Keep other runs out while the block runs; clean up after a killed run, and connect to the store.

        epochs: of the run. Raises CheckpointError on all ranks if another run saves there, if another file
        has the name of a checkpoint, if a permission is missing, or if a store does not respond.
        """
        world, doing = self._world, f"save to {self.path}"
        index, count = rank_on_shared_disk(self.path, world)
        self.is_owner = index == 0
        self.is_shared = min(on_every_rank(world, "count ranks", lambda: count)) == world.size
        with contextlib.ExitStack() as locks:
            on_every_rank(world, doing, lambda: self._lock(epochs, locks) if self.is_owner else None)
            if self._url is not None:
                doing = f"connect to {shown(self._url)}"
                self.store = own_result(world, doing, partial(self._connect, self._url))
            yield

    def _lock(self, epochs: int, locks: contextlib.ExitStack) -> None:
        locks.enter_context(FolderLock(self.path, {"launches": self._launches}))
        folder = Store(self.path)
        _clean(folder)
        if self._world.is_main:  # the disks of other machines were not asked before either
            self.check_newest(folder)
        first = 0 if self.checkpoint is None else self.checkpoint[1].epoch
        # Fail now, not after an epoch of training. Existing names are checked, not all epochs: a run limited
        # by train.steps may have billions.
        for name in filter(_EPOCH.fullmatch, folder.names()):
            if first <= int(name) < epochs:
                check_replaceable(folder, name, self.run_id)

    def check_newest(self, folder: Store) -> None:
        """Raise CheckpointError if the run was continued in a folder since its checkpoint was chosen."""
        for name, manifest in checkpoints_in(folder) if self.resumed else ():
            if self.checkpoint is not None and _is_newer(manifest, self.checkpoint[1]):
                raise CheckpointError(f"{name} was saved to {folder.shown} meanwhile; start again")

    def _connect(self, url: str) -> Store:
        """Return the store after checking that it responds."""
        store = Store(url, total_seconds=START_SECONDS, silence=START_SECONDS)
        if self._world.is_main:
            store.make_folder()
            self.check_newest(store)  # before the store is taken over, and again afterwards
        else:
            store.exists()
        return Store(url, total_seconds=_RETRY_SECONDS)

    @contextlib.contextmanager
    def temporary(self, kept: str) -> Iterator[None]:
        """Use a temporary folder and no store; it is deleted, unless it has a file named `kept`."""
        world = self._world
        self.path = Path(world.broadcast_object(tempfile.mkdtemp(prefix="plsc-") if world.is_main else ""))
        self._url, self.note, self.resumed = None, "", ""
        try:
            yield
        finally:
            if self.is_owner and not (self.path / kept).exists():
                shutil.rmtree(self.path, ignore_errors=True)


class _Best(TypedDict):
    path: Annotated[str, r"(.*/)?(?!\.\.?$)[^/\0-\x1f]+"]


@dataclass(frozen=True)
class _Version:
    """A folder in which one run saves, and its store: save_dir itself (name '') or one of its versions."""

    name: str
    local: Store
    remote: Store | None
    is_cache: bool  # whether the local folder only serves uploads

    @property
    def stores(self) -> list[Store]:
        """The folder, and the remote store if there is one."""
        return [self.local] if self.remote is None else [self.local, self.remote]

    @property
    def places(self) -> tuple[Path, str | None]:
        """Path and URL."""
        return Path(self.local.url), None if self.remote is None else self.remote.url

    def name_of(self, locations: Collection[str]) -> str:
        """Return the name of the checkpoint if one of its paths or URLs is in this folder, else ''."""
        here = {_resolved(store.url) for store in self.stores}
        names = [base_name(location) for location in map(_resolved, locations) if parent_of(location) in here]
        return names[0] if names else ""

    def continues(self, resumed: Manifest) -> bool:
        """Return whether a run that resumes a checkpoint in here continues here: it is the newest."""
        if self.name and self.local.is_link(""):
            return False
        found = [manifest for store in self.stores for _, manifest in checkpoints_in(store)]
        ours = ("", resumed.run_id)
        return all(one.run_id in ours and not _is_newer(one, resumed) for one in found)

    def find(self, wanted: str) -> tuple[Path | None, str | None] | None:
        """Return path and URL of the last or best checkpoint of a run, as far as it is there; None if not."""
        # In a store that was deleted, nothing is taken from what was uploaded to it.
        is_gone = self.is_cache and self.remote is not None and self.remote.size(OWNER_NAME) is None
        here = {} if is_gone else dict(checkpoints_in(self.local))
        there = {} if self.remote is None else dict(checkpoints_in(self.remote))
        if not here and not there:
            return None
        age, remote_age = (
            max((age_key(*entry) for entry in listed.items()), default=(-1, -1, ""))
            for listed in (here, there)
        )
        name = max(age, remote_age)[-1]
        if wanted == BEST:
            # The store also has checkpoints of other machines, unless local ones are newer.
            name = _name_of_best(self.stores[:: -1 if remote_age >= age else 1])
        if name not in here and name not in there:
            raise CheckpointError(
                f"{self.local.child(BEST_NAME)} is missing, or names {name!r}, which does not exist; set the "
                "path of a checkpoint"
            )
        is_newer_there = name in there and remote_age >= age and there[name] != here.get(name)
        return (
            Path(self.local.child(name)) if name in here and not is_newer_there else None,
            self.remote.child(name) if self.remote is not None and name in there else None,
        )


def _is_newer(one: Manifest, other: Manifest) -> bool:
    return (one.step, one.epoch) > (other.step, other.epoch)


def _name_of_best(stores: list[Store]) -> str:
    """Return the name of the best checkpoint from the first best.json, '' if there is none."""
    for store in stores:
        data = store.read(BEST_NAME, _LARGEST_BEST)
        if data is not None:
            best = read_record(_Best, data, f"{store.shown}/{BEST_NAME}", most=_LARGEST_BEST)
            # Use only the last part: the folder may have moved, and paths outside of it are not allowed.
            return PurePath(best["path"]).name
    return ""


def _newest_at(url: str) -> str:
    """Return the URL of a checkpoint: `url` itself, or the newest one of the run at `url`."""
    store = Store(url)
    if MANIFEST_NAME in store.names():
        return url
    versions = filter(_VERSION.fullmatch, store.names(only_folders=True))
    newest_first = sorted(versions, key=_number, reverse=True)
    for folder in [*(store.child(version) for version in newest_first), url]:
        if checkpoints := checkpoints_in(Store(folder)):
            return join(folder, checkpoints[-1][0])
    return url  # the download reports what is missing


def _clean(folder: Store) -> None:
    """Remove what a killed run left in a local folder, whose lock this process holds."""
    for name in clean(folder):
        logger.warning(
            f"a run was killed while it replaced {folder.child(name)}; the old version was restored"
        )


def _number(version: str) -> int:
    return int(version.removeprefix("version_"))


def _resolved(location: str) -> str:
    return location.rstrip("/") if is_url(location) else str(Path(location).resolve())
