"""Checkpoints in remote stores: upload, fetch and verify, published atomically as on a local disk."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import RLock

from plsc.checkpoint.load import check_checksums, check_files
from plsc.checkpoint.manifest import (
    FileInfo,
    Manifest,
    checkpoints_in,
    checksum,
    list_checkpoints,
    manifest_in,
    parse_manifest,
    rank_of_shard,
    read_manifest,
)
from plsc.checkpoint.save import Retention, check_replaceable, finish_folder, prune
from plsc.errors import CheckpointError, DataError, PlscError
from plsc.machine import BackgroundThread, Counter
from plsc.parallel.failure import on_every_rank, on_main_rank, own_result, rank_on_shared_disk
from plsc.parallel.world import World
from plsc.storage.disk import SAVING, FolderLock, hidden_name, read_regular, replacing
from plsc.storage.store import OnBytes, Store
from plsc.storage.store import clean as clean_store
from plsc.storage.urls import base_name, folder_for, is_url, shown

_NO_RUN = "(none)"  # no id is this: a checkpoint of no run, which a command has written, replaces none
OWNER_NAME = ".owner"  # in a store: the token of the run that saves there
_ADVICE = "the checkpoint is intact on the local disk, and can be uploaded when the store is available again"


def claim(store: Store, is_own: bool = False) -> str:
    """Take a store over for the saves of a run; return the token for `upload`.

    No lock is possible there. The uploads of a run that claimed the store before fail from now on. is_own:
    the run has saved there before: remove what it left when it was killed.
    """
    token = secrets.token_hex(8)
    store.make_folder()
    store.write(OWNER_NAME, token.encode())
    if is_own:
        clean(store)
    return token


def _check_owner(store: Store, token: str) -> None:
    if token and store.read(OWNER_NAME, len(token)) != token.encode():
        raise CheckpointError(f"another run saves to {store.shown} now; this run uploads nothing more")


def upload(
    folder: Path,
    store: Store,
    manifest: Manifest,
    files: Sequence[str],
    world: World,
    token: str = "",
) -> None:
    """Publish the checkpoint `folder` in the store, under its own name. Collective.

    An older checkpoint of that name, of the same run, is replaced when the new one is published.

    Args:
        files: the data files that this rank uploads. Together, the ranks must upload all.
        token: of `claim`, on rank 0; empty: the store is not claimed.

    Raises:
        CheckpointError: on all ranks; the new checkpoint was not published.
    """
    name = folder.name
    doing = f"upload {folder} to {store.shown}"
    of = f" (rank 0 of {world.size})" if world.size > 1 else ""
    total = sum(manifest.files[file].bytes for file in files)
    progress = Counter(f"uploaded {folder} to {store.shown}{of}:", total, "MB")

    def begin() -> str:
        if not world.is_main:
            return ""
        _check_owner(store, token)
        check_replaceable(store, name, manifest.run_id or _NO_RUN)
        if store.can_rename:
            hidden = hidden_name(name)
            store.make_folder(hidden)
        else:
            hidden = _mark(store, name, (manifest.run_id or manifest.to_json()).encode())
        return hidden

    def send() -> None:
        for file in files:
            store.put(folder / file, f"{target}/{file}", progress.add if world.is_main else None)

    def finish() -> None:
        if world.is_main:
            _check_owner(store, token)
            if lost := manifest.files.keys() - set(store.names(target)):  # another run has cleaned up
                raise CheckpointError(f"{shown(store.child(target))} has lost {min(lost)}; upload it again")
            finish_folder(store, target, name, manifest, manifest.run_id or _NO_RUN)
            progress.log()

    hidden = on_every_rank(world, doing, begin, _ADVICE)[0]
    target = hidden if store.can_rename else name
    try:
        on_every_rank(world, doing, send, _ADVICE)
        on_every_rank(world, doing, finish, _ADVICE)
    finally:
        if world.is_main:
            with contextlib.suppress(DataError):  # the next start removes it
                store.delete(hidden)


def _mark(store: Store, name: str, run: bytes) -> str:
    """Write the mark of a run's upload, for a store that cannot rename, and return its name.

    Raises CheckpointError if there is that of another run: both would write to the same files.
    """
    start = f"{SAVING}{name}-"
    mark = f"{start}{hashlib.sha256(run).hexdigest()[:8]}"  # matches `HIDDEN`, so `clean` removes it
    store.make_folder()
    store.write(mark, b"")
    if others := [one for one in store.names() if one.startswith(start) and one != mark]:
        store.delete(mark)
        where = shown(store.child(others[0]))
        raise CheckpointError(f"{where} marks the upload of another run; wait, or remove it")
    return mark


class Uploader:
    """Uploads the published checkpoints in the background. `add` and `close` are collectives.

    Attributes:
        uploading: name of the checkpoint that is being uploaded; it must not be deleted.
        lock: hold it while deleting checkpoints.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        store: Store,
        retention: Retention,
        run_id: str,
        resumed: str,
        small_files: Sequence[str],
    ) -> None:
        """Take the store over, once nothing but training is left to fail. Raises CheckpointError.

        resumed: name of the checkpoint in the store that the run resumes, which stays there, or ''.
        small_files: names of files in the folder that change during the run, uploaded after each checkpoint.
        """
        self.uploading = ""
        self.lock = RLock()
        self._token = on_main_rank(world, f"reach {store.shown}", lambda: claim(store, is_own=bool(resumed)))
        self._world = world.in_background(world.upload_group)
        self._folder, self._store, self._retention = folder, store, retention
        self._run_id, self._resumed, self._small_files = run_id, resumed, small_files
        self._background = BackgroundThread("plsc-send")
        self._jobs: list[tuple[Path, Future[bool]]] = []

    def add(self, path: Path) -> None:
        """Queue a checkpoint for upload, unless the store already has it."""
        self._jobs.append((path, self._background.submit(partial(self._send, path))))

    def close(self, seconds: float | None = None) -> list[Path]:
        """Wait for the uploads and retry failed ones; return the local checkpoints that were not uploaded.

        seconds: deadline; None: no deadline.
        """
        give_up = None if seconds is None else time.monotonic() + seconds
        failed = [path for path, future in self._jobs if not _has_succeeded(future, give_up)]
        # A checkpoint that has been pruned since does not count.
        unsent = [path for path in failed if path.is_dir()]
        # In order, and none after a failure: the newest checkpoint in the store should have no gaps before
        # it.
        while unsent and give_up is None:
            if not self._background.submit(partial(self._send, unsent[0])).result():
                break
            unsent.pop(0)
        self._background.close()
        return unsent

    def _send(self, path: Path) -> bool:
        """Upload one checkpoint, in the background thread; return False after a failure, which is logged."""
        world, store = self._world, self._store
        try:
            if not on_every_rank(world, f"read {store.shown}", lambda: self._is_wanted(path))[0]:
                return True
            manifest = own_result(world, f"read {path}", lambda: read_manifest(path))
            mine = [name for name in manifest.files if rank_of_shard(name) == world.rank]
            upload(path, store, manifest, mine, world, self._token)
            # Only now is the new checkpoint complete in the store, so older ones may go.
            if world.is_main:
                self._update_store(path.name)
        except PlscError as error:
            world.log(str(error), logging.WARNING)
            return False
        finally:
            with self.lock:
                self.uploading = ""
        return True

    def _is_wanted(self, path: Path) -> bool:
        """Return whether to upload the checkpoint: it still exists, and the store has no identical one.

        From now on it is protected from deletion. Only the result of rank 0 is used.
        """
        with self.lock:
            if not path.is_dir():
                return False
            self.uploading = path.name
        try:
            return not self._world.is_main or manifest_in(self._store, path.name) != read_manifest(path)
        except CheckpointError:  # missing or incomplete in the store
            return True

    def _update_store(self, newest: str) -> None:
        """Prune the store and upload the small files; failures are logged: the checkpoint is in the store."""
        keep = {newest, self._resumed}
        actions: list[Callable[[], object]] = [
            partial(prune, self._store, self._retention, self._run_id, keep)
        ]
        for path in (self._folder / name for name in self._small_files):
            if path.is_file():
                actions.append(partial(self._send_file, path))
        for action in actions:
            self._world.log(_problem_of(action), logging.WARNING)

    def _send_file(self, path: Path) -> None:
        # Others may write into the folder: what is a link is not uploaded.
        self._store.write(path.name, read_regular(path, sys.maxsize, path.parent))


def _has_succeeded(future: Future[bool], give_up: float | None) -> bool:
    """Wait for an upload until `give_up` (in time.monotonic() seconds); return whether it succeeded."""
    try:
        return future.result(None if give_up is None else max(0.0, give_up - time.monotonic()))
    except FutureTimeout:
        return False


def _problem_of(action: Callable[[], object]) -> str | None:
    """Run an action whose failure is not fatal; return the error message, None on success."""
    try:
        action()
    except (PlscError, OSError) as error:
        return str(error)
    return None


def clean(store: Store) -> list[str]:
    """Remove the files that killed runs left; return the names of restored checkpoints.

    Call from one process, before a run's first save, while no other run saves there. In an object store,
    a folder that has only data files of plsc and no manifest is deleted.
    """
    restored = clean_store(store)
    for name in [] if store.can_rename else store.names(only_folders=True):
        inside = store.names(name)
        if inside and all(rank_of_shard(file) is not None for file in inside):
            store.delete(name)
    return restored


def fetch(url: str, world: World, folder: Path | None = None) -> Path:
    """Return a local folder with the checkpoint at a URL; download it unless it is there. Collective.

    Each rank downloads a share of the files. An older checkpoint of the same run in the
    folder is replaced. Complete files of an interrupted download are reused.

    Args:
        folder: where to store it; None for the cache folder.

    Raises:
        CheckpointError: on all ranks: no checkpoint at the URL, a damaged file, or a full disk. Nothing
            was replaced.
    """
    target = folder_for("checkpoints", url) if folder is None else folder
    store = own_result(world, f"reach {shown(url)}", lambda: Store(url))
    text = on_main_rank(world, f"reach {shown(url)}", lambda: manifest_in(store).to_json())
    manifest = parse_manifest(text.encode(), store.shown)
    # What is in the cache folder can be fetched again.
    run_id = None if folder is None else manifest.run_id or _NO_RUN
    doing = f"fetch {store.shown} to {target}"
    if all(on_every_rank(world, doing, lambda: _is_fetched(target, manifest, run_id))):
        return target
    work = target.with_name(f".fetching-{target.name}")
    on_every_rank(world, doing, lambda: _make_own_folder(work))
    index, count = rank_on_shared_disk(work, world)

    def fetch_share() -> None:
        files = {name: manifest.files[name] for name in sorted(manifest.files)[index::count]}
        total = sum(info.bytes for info in files.values())
        progress = Counter(f"fetched from {store.shown}:", total, "MB")
        for name, info in files.items():
            _fetch_file(store, name, info, work, progress.add if world.is_main else lambda count: None)
        if world.is_main:
            progress.log()

    def finish() -> None:
        if index != 0:
            return
        # Other processes may fetch it into the cache folder, too, and be writing into `work`.
        with FolderLock(target.parent) if folder is None else nullcontext():
            if _is_fetched(target, manifest, run_id):
                return
            whole = target.with_name(hidden_name(target.name))  # has only what was checked
            whole.mkdir()
            try:
                for name in manifest.files:
                    (work / name).replace(whole / name)
                finish_folder(Store(target.parent), whole.name, target.name, manifest, run_id)
            finally:
                shutil.rmtree(whole, ignore_errors=True)
            shutil.rmtree(work, ignore_errors=True)

    try:
        on_every_rank(world, doing, fetch_share)
        on_every_rank(world, doing, finish)
    except CheckpointError:  # another process fetched it into the same folder, and was faster
        if not all(on_every_rank(world, doing, lambda: _is_fetched(target, manifest, run_id))):
            raise
    return target


def _make_own_folder(work: Path) -> None:
    """Create a folder; DataError if there is a link or another user's folder, as its name is no secret."""
    work.mkdir(parents=True, exist_ok=True)
    status, owners = work.lstat(), (os.geteuid(), work.parent.stat().st_uid)  # NFS may map root to nobody
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in owners:
        raise DataError(f"{work} is a link or belongs to another user; remove it, or use another folder")


def _is_fetched(target: Path, manifest: Manifest, run_id: str | None) -> bool:
    """Return whether the checkpoint is already there; checksums are compared when it is loaded."""
    there = None
    with contextlib.suppress(CheckpointError, DataError):
        there = read_manifest(target)
        if there == manifest:
            check_files(target, manifest)
            return True
    check_replaceable(Store(target.parent), target.name, run_id)
    if run_id is not None and there is not None and there.step > manifest.step:
        raise CheckpointError(f"{target} is of step {there.step}, after step {manifest.step}; move it away")
    return False


def _fetch_file(store: Store, name: str, info: FileInfo, work: Path, on_bytes: OnBytes) -> None:
    local = work / name
    if local.is_file() and local.stat().st_size == info.bytes and checksum(local) == info:
        on_bytes(info.bytes)
        return
    with replacing(local) as part:
        store.get(name, part, on_bytes, info.bytes)
        if checksum(part) != info:
            where = shown(store.child(name))
            raise CheckpointError(f"{where} is damaged: its checksum differs from the saved one")


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Check that all files of a checkpoint exist and match their checksums; return the manifest.

    Files are read in pieces. A checkpoint at a URL is downloaded to a temporary folder first.

    Raises:
        CheckpointError: the first defect, with the name of the file.
    """
    with contextlib.ExitStack() as stack:
        folder, is_remote = Path(path), isinstance(path, str) and is_url(path)
        if is_remote:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="plsc-verify-"))
            folder = fetch(str(path), World.single(), Path(scratch) / base_name(str(path)))
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        if not is_remote:
            check_checksums(folder, manifest, sorted(manifest.files))
        return manifest


def push(source: str, url: str) -> list[str]:
    """Upload the checkpoint `source`, or all missing ones of that folder, to a store; return their names.

    Each is verified first. url: of the folder for the run's checkpoints, or its path.

    Raises:
        CheckpointError: one is damaged, or the store fails. Checkpoints uploaded before it stay there.
    """
    folder = Path(source)
    store = Store(url)
    there = dict(checkpoints_in(store))
    inside = list_checkpoints(folder)
    chosen = [path for path, manifest in inside if there.get(path.name) != manifest]
    if there.keys() & {path.name for path in chosen}:
        raise CheckpointError(f"{store.shown} has others of the names in {folder}; push one to replace it")
    chosen = chosen if inside else [folder.resolve()]
    for path in chosen:
        manifest = verify(path)
        upload(path, store, manifest, sorted(manifest.files), World.single())
    return [path.name for path in chosen]
