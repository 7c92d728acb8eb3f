"""Save a run in the background: copied at a step boundary, then written, published, pruned, uploaded."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import RLock

from plsc.checkpoint import Retention, Snapshot, read_manifest, save_checkpoint
from plsc.checkpoint.manifest import manifest_in, rank_of_shard
from plsc.checkpoint.remote import upload
from plsc.checkpoint.rollback import mark_of
from plsc.checkpoint.save import best_in, prune
from plsc.checkpoint.weights_file import WeightsFile
from plsc.data.batch import LIST_NAME
from plsc.errors import CheckpointError, NotSavedError, PlscError
from plsc.machine import BackgroundThread, Counter, available_memory
from plsc.parallel.failure import on_every_rank, on_main_rank, own_result
from plsc.parallel.world import World
from plsc.storage.disk import read_regular
from plsc.storage.store import Store, format_bytes
from plsc.train.callbacks import Run
from plsc.train.folder import RunFolder
from plsc.train.log import METRICS_NAME, PLOT_NAME
from plsc.train.snapshot import check_snapshot, take_snapshot

_SHARE_OF_MEMORY = 0.8  # maximum share of the available memory for a copy of the state
_SHORTEST_STALL = 0.1  # seconds; shorter pauses are not logged
_SMALL_FILES = (METRICS_NAME, PLOT_NAME, LIST_NAME)  # next to the checkpoints


@dataclass
class _Save:
    """A save: seconds that training waited for it, and what the background thread has done so far."""

    path: Path
    stall: float = 0.0
    size: int = 0
    seconds: float = 0.0
    best: tuple[str, float] | None = None
    problem: str | None = None


class Saver:
    """Saves the checkpoints of a run. All ranks call its methods, which are collectives, at the same step.

    Attributes:
        last: the newest published checkpoint; before the first save, the one that the run resumes.
        best: name and metric value of the best checkpoint in the run's folder, by the metric of
            `retention`; None if no checkpoint has this metric.
        unsent: after `close`, the complete checkpoints that were not uploaded, oldest first.
    """

    unsent: Sequence[Path] = ()
    _pending: tuple[_Save, Future[None]] | None = None
    _uploader: Uploader | None = None
    _has_warned = False

    def __init__(self, run: Run, folder: RunFolder) -> None:
        self.last = None if folder.checkpoint is None else folder.checkpoint[0]
        self.folder, self.retention = folder, run.retention
        self._lineage = [] if folder.checkpoint is None else folder.checkpoint[1].lineage
        self._run = run
        self._file = run.head.file if isinstance(run.head.file, WeightsFile) else None
        # Its own group: the thread's collectives would meet those of the training steps in the other one.
        self._world = run.world.in_background(run.world.save_group)
        self._background = BackgroundThread("plsc-save")
        if folder.store is not None:
            folder.claim_store(folder.store)
            world = run.world.in_background(run.world.upload_group)
            self._uploader = Uploader(world, folder, folder.store, self.retention)
            # An earlier run may have been killed before it had uploaded the checkpoint that this one resumes.
            last = None if self.last is None or folder.is_fetched else self.last.resolve()  # may be a link
            if last is not None and last.parent == folder.path.resolve():
                self._uploader.add(folder.path / last.name)
        self.best = on_main_rank(run.world, f"look into {folder.path}", self._find_best)

    def check(self) -> None:
        """Raise CheckpointError, on all ranks, for state that cannot be saved; a collective."""
        on_every_rank(self._run.world, "save this run", lambda: check_snapshot(self._run))

    def save(self, name: str, metrics: dict[str, float], *, wait: bool = False) -> None:
        """Save the state of the run as the checkpoint `name`, in the background unless `wait` is set.

        metrics: values for `Retention`. Raises CheckpointError, also for the previous save.
        """
        began = time.monotonic()
        self.finish_save()  # at most one copy is in memory
        if self._file is not None:
            self._file.begin(mark_of(self._run.position.step, self.folder.run_id))
        state = take_snapshot(self._run, metrics, self.folder.run_id, self._lineage)
        wait = wait or not self._can_copy(state)
        if not wait:
            state = state.copy_to_host()
        save = _Save(self.folder.path / name)
        self._pending = save, self._background.submit(lambda: self._publish(save, state))
        save.stall = time.monotonic() - began
        if wait:
            self.finish_save()

    def _can_copy(self, state: Snapshot) -> bool:
        """Return whether memory suffices for a copy; log once if it does not."""
        # Offloaded class weights already fill this machine's memory.
        is_offloaded = self._run.options.head.offload
        free = 0 if is_offloaded else available_memory()
        if free is None or state.nbytes < _SHARE_OF_MEMORY * free:
            return True
        why = f"a copy of {format_bytes(state.nbytes)} does not fit into CPU memory"
        if is_offloaded:
            why = "head.offload is set, so class weights are not copied"
        if not self._has_warned:
            self._world.log(f"{why}: training pauses while a checkpoint is written")
        self._has_warned = True
        return False

    def _publish(self, save: _Save, state: Snapshot) -> None:
        """Write, publish and prune, in the background thread."""
        began, folder = time.monotonic(), self.folder
        is_shared = folder.is_shared or folder.store is None
        save_checkpoint(folder.path, save.path.name, state, self._world, is_shared=is_shared)
        if self._file is not None:
            self._file.forget(mark_of(state.manifest.step, state.manifest.run_id))
        save.seconds = time.monotonic() - began
        doing = f"prune {folder.path}"
        save.best = on_every_rank(self._world, doing, lambda: self._prune_and_find_best(save))[0]

    def _prune_and_find_best(self, save: _Save) -> tuple[str, float] | None:
        """Delete old checkpoints on the disk of this machine; on rank 0, return the best.

        A failure to delete is only a problem to log: the newest checkpoint is saved.
        """
        best = None
        if self.folder.is_owner:
            uploader = self._uploader
            # No other upload starts while this lock is held.
            with contextlib.nullcontext() if uploader is None else uploader.lock:
                keep = {save.path.name, self.folder.resumed, "" if uploader is None else uploader.uploading}
                store = Store(self.folder.path)
                try:
                    best = prune(store, self.retention, self.folder.run_id, keep)
                except (PlscError, OSError) as error:
                    save.problem, best = str(error), self._find_best()
        if self._world.is_main:
            save.size = sum(file.bytes for file in read_manifest(save.path).files.values())
        return best

    def _find_best(self) -> tuple[str, float] | None:
        return best_in(Store(self.folder.path), self.retention, self.folder.run_id)

    def is_done(self) -> bool:
        """Return whether no save is running on this rank."""
        return self._pending is None or self._pending[1].done()

    def finish_save(self) -> None:
        """Wait for the running save, if any, and log its result. Raises the same errors as `save`."""
        if self._pending is None:
            return
        (save, future), self._pending = self._pending, None
        began = time.monotonic()
        try:
            future.result()
        except CheckpointError as error:
            error.exit_code = NotSavedError.exit_code
            raise
        self.last, self.best = save.path, save.best
        stall = save.stall + time.monotonic() - began
        stalled = f", training stalled {stall:.1f} s" if stall >= _SHORTEST_STALL else ""
        speed = format_bytes(save.size / max(save.seconds, 1e-3))
        size = format_bytes(save.size)
        self._world.log(f"saved {save.path}: {size} in {save.seconds:.1f} s ({speed}/s){stalled}")
        self._world.log(save.problem, logging.WARNING)
        if self._uploader is not None:
            self._uploader.add(save.path)

    def wait(self, seconds: float) -> None:
        """Wait for the running save, at most so long; its result is ignored."""
        if self._pending is not None:
            futures.wait([self._pending[1]], seconds)

    def close(self, seconds: float | None = None) -> str:
        """Wait for the running save and all uploads; return what is not uploaded and where it is, or ''.

        seconds: deadline for the uploads; None: wait until each has succeeded or failed.
        """
        self.finish_save()
        self._background.close()
        self.unsent = [] if self._uploader is None else self._uploader.close(seconds)
        if not self.unsent or self.folder.store is None:
            return ""
        names, here, there = ", ".join(p.name for p in self.unsent), self.folder.path, self.folder.store.shown
        return (
            f"not uploaded to {there}: {names} (complete in {here}); when the store is available again, "
            f"run: plsc checkpoint push {here} {there}"
        )


class Uploader:
    """Uploads the published checkpoints in the background. `add` and `close` are collectives.

    Attributes:
        uploading: name of the checkpoint that is being uploaded; it must not be deleted.
        lock: hold it while deleting checkpoints.
    """

    def __init__(self, world: World, folder: RunFolder, store: Store, retention: Retention) -> None:
        self.uploading = ""
        self.lock = RLock()
        self._world, self._folder, self._store, self._retention = world, folder, store, retention
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
            total = sum(manifest.files[name].bytes for name in mine)
            of = f" (rank 0 of {world.size})" if world.size > 1 else ""
            progress = Counter(f"uploaded {path} to {store.shown}{of}:", total, "MB")
            on_bytes = progress.add if world.is_main else None
            upload(path, store, manifest, mine, world, on_bytes, self._folder.token)
            if world.is_main:
                progress.log()
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
        """Prune the store and upload metrics, plot and list of bad samples, which change during the run.

        Failures are logged and not fatal: the checkpoint itself has been uploaded.
        """
        store, retention, folder = self._store, self._retention, self._folder
        keep = {newest, folder.resumed}
        actions: list[Callable[[], object]] = [partial(prune, store, retention, folder.run_id, keep)]
        for path in (folder.path / name for name in _SMALL_FILES):
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
