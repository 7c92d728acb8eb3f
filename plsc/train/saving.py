"""Save a run in the background: copied at a step boundary, then written, published, uploaded, pruned."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import RLock

import torch

from plsc.checkpoint import Retention, Snapshot, read_manifest, save_checkpoint
from plsc.checkpoint.all_ranks import on_every_rank, on_main_rank, own_result
from plsc.checkpoint.load import OpenCheckpoint, StoredTensor
from plsc.checkpoint.manifest import CLASS_OPTIMIZER, CLASS_WEIGHTS, Role
from plsc.checkpoint.remote import claim, upload
from plsc.checkpoint.retention import best_in, manifest_in, prune, write_best
from plsc.checkpoint.rollback import mark_of
from plsc.checkpoint.shard_file import rank_of_shard
from plsc.checkpoint.weights_file import WeightsFile
from plsc.errors import CheckpointError, NotSavedError, OptionError, PlscError, suggest
from plsc.heads import Head
from plsc.parallel.machine import BackgroundThread, available_memory
from plsc.parallel.world import World
from plsc.storage.regular import read_regular
from plsc.storage.store import Store, Transfer, format_bytes
from plsc.train.data import OpenedCheckpoint
from plsc.train.folder import SMALL_FILES, Directories
from plsc.train.run import Run
from plsc.train.snapshot import check_snapshot, take_snapshot


def problem_of(action: Callable[[], object]) -> str | None:
    """Run an action whose failure is not fatal; return the error message, None on success."""
    try:
        action()
    except (PlscError, OSError) as error:
        return str(error)
    return None


class Uploader:
    """Uploads the published checkpoints in the background. `add` and `close` are collectives.

    Attributes:
        uploading: name of the checkpoint that is being uploaded; it must not be deleted.
        lock: hold it while deleting checkpoints.
    """

    def __init__(self, run: Run, directories: Directories, store: Store, retention: Retention) -> None:
        self.uploading = ""
        self.lock = RLock()
        self._world = run.world.in_background(run.world.upload_group)
        self._directories = directories
        self._store = store
        self._token = own_result(
            self._world, f"reach {store.shown}", lambda: claim(store) if run.world.is_main else ""
        )
        self._retention = retention
        self._background = BackgroundThread("plsc-send")
        self._jobs: list[tuple[Path, Future[str | None]]] = []

    def add(self, path: Path) -> None:
        """Queue a checkpoint for upload, unless the store already has it."""
        self._jobs.append((path, self._background.submit(partial(self._send, path))))

    def close(self, seconds: float | None = None) -> list[Path]:
        """Wait for the uploads and retry failed ones; return the local checkpoints that were not uploaded.

        seconds: deadline; None: no deadline.
        """
        give_up = None if seconds is None else time.monotonic() + seconds
        jobs, self._jobs = self._jobs, []
        failed = [path for path, future in jobs if not _has_succeeded(future, give_up)]
        # A checkpoint that has been pruned since does not count.
        unsent = [path for path in failed if path.is_dir()]
        # In order, and none after a failure: the newest checkpoint in the store should have no gaps before
        # it.
        while unsent and give_up is None:
            again = self._background.submit(partial(self._send, unsent[0]))
            if not _has_succeeded(again, None):
                break
            unsent.pop(0)
        self._background.close()
        return unsent

    def _send(self, path: Path) -> str | None:
        """Upload one checkpoint, in the background thread; return None, or the error message."""
        try:
            doing = f"read {self._store.shown}"
            if on_every_rank(self._world, doing, lambda: self._choose(path))[0]:
                self._send_chosen(path)
        except PlscError as error:
            self._world.log(str(error), logging.WARNING)
            return str(error)
        finally:
            with self.lock:
                self.uploading = ""
        return None

    def _choose(self, path: Path) -> bool:
        """Return whether to upload the checkpoint: it still exists, and the store has no identical one.

        From now on it is protected from deletion. Only the result of rank 0 is used.
        """
        with self.lock:
            if not path.is_dir():
                return False
            self.uploading = path.name
        if not self._world.is_main:
            return True
        try:
            return manifest_in(self._store, path.name)[0] != read_manifest(path)
        except CheckpointError:  # missing or incomplete in the store
            return True

    def _send_chosen(self, path: Path) -> None:
        manifest = own_result(self._world, f"read {path}", lambda: read_manifest(path))
        mine = [name for name in manifest.files if rank_of_shard(name) == self._world.rank]
        total = sum(manifest.files[name].bytes for name in mine)
        of = f" (rank 0 of {self._world.size})" if self._world.size > 1 else ""
        transfer = Transfer(f"uploading {path} to {self._store.shown}{of}", total, self._world.is_main)
        upload(path, self._store, mine, self._world, transfer.add, self._token)
        transfer.end()
        # Only now is the new checkpoint complete in the store, so older ones may go.
        if self._world.is_main:
            self._update_store(path)

    def _update_store(self, newest: Path) -> None:
        """Prune the store and upload metrics, plot and list of bad samples, which change during the run.

        Failures are logged and not fatal: the checkpoint itself has been uploaded.
        """
        store, retention, start = self._store, self._retention, self._directories.start
        actions: list[Callable[[], object]] = [
            lambda: prune(store, retention, start.run_id, {newest.name, start.resumed}),
            lambda: write_best(store, retention.monitor, best_in(store, retention, start.run_id)),
        ]
        for path in (start.local / name for name in SMALL_FILES):
            if path.is_file():
                actions.append(partial(self._send_file, path))
        for problem in filter(None, map(problem_of, actions)):
            self._world.log(problem, logging.WARNING)

    def _send_file(self, path: Path) -> None:
        # They were no links at the start, but others may write into the folder.
        self._store.write(path.name, read_regular(path, sys.maxsize, path.parent))


def _has_succeeded(future: Future[str | None], give_up: float | None) -> bool:
    """Wait for an upload until `give_up` (in time.monotonic() seconds); return whether it succeeded."""
    left = None if give_up is None else max(0.0, give_up - time.monotonic())
    try:
        return future.result(left) is None
    except FutureTimeout:
        return False


_ROWS = 2**16  # class weights that are copied at a time


def file_of(head: Head) -> WeightsFile | None:
    """Return the file of the class weights; None if they are in memory."""
    return head.file if isinstance(head.file, WeightsFile) else None


@contextlib.contextmanager
def opened_file(head: Head, world: World, checkpoint: OpenedCheckpoint | None) -> Iterator[None]:
    """Open the file at the state of a checkpoint, or a new one, and close it at the end; a collective.

    If the checkpoint itself has class weights (`plsc checkpoint copy`), a new file is filled with them.

    Raises CheckpointError on all ranks if a folder cannot be used, or does not have that state.
    """
    file = file_of(head)
    if file is None:
        yield
        return
    with file:
        on_every_rank(world, "open the class weights", lambda: _open(file, world, checkpoint))
        yield


def _open(file: WeightsFile, world: World, checkpoint: OpenedCheckpoint | None) -> None:
    if checkpoint is None:
        file.open()
        return
    mark = mark_of(checkpoint[1].step, checkpoint[1].run_id)
    is_complete = Role(CLASS_WEIGHTS, "weight").key in checkpoint[1].tensors
    if file.has(mark) or not is_complete:
        file.open(mark)
        return
    file.open()
    with OpenCheckpoint(*checkpoint) as stored:
        _fill(file, stored.select((CLASS_WEIGHTS, CLASS_OPTIMIZER), world.rank, world.size))
    file.begin(mark)
    file.forget(mark)


def _fill(file: WeightsFile, stored: dict[Role, StoredTensor]) -> None:
    """Write the class weights and states of a checkpoint to a new file."""
    weight = Role(CLASS_WEIGHTS, "weight")
    tensors = {}
    for name, column in file.columns.items():
        role = weight if name == "weight" else Role(CLASS_OPTIMIZER, name, weight.key)
        found = stored.get(role)
        if found is None or (found.dtype, found.shape[1:]) != (column.dtype, column.shape):
            raise CheckpointError(
                f"the checkpoint has no {role.key} of {column.dtype} {list(column.shape)} per class; use the "
                "embedding size, data types and optimizer of the class weights that were saved"
            )
        tensors[name] = found
    first = file.classes.start
    for rows in file.pieces(_ROWS):
        file.hold(rows)
        values = {
            name: torch.empty(len(rows), *column.shape, dtype=column.dtype)
            for name, column in file.columns.items()
        }
        for name, value in values.items():
            tensors[name].read_into(value, first + int(rows[0]))
        file.write(rows, values)


_SHARE_OF_MEMORY = 0.8  # maximum share of the available memory for a copy of the state
_SHORTEST_STALL = 0.1  # seconds; shorter pauses are not logged


@dataclass(frozen=True)
class _Outcome:
    size: int
    seconds: float
    best: tuple[str, float] | None
    problem: str | None


@dataclass
class _Pending:
    future: Future[_Outcome]
    path: Path
    stall: float


class Saver:
    """Saves the checkpoints of a run. All ranks call its methods, which are collectives, at the same step.

    Attributes:
        last: the newest published checkpoint; before the first save, the one that the run resumes.
        best: name and metric value of the best checkpoint in the run's folder, by the metric of
            `retention`; None if no checkpoint has this metric.
        unsent: after `close`, the complete checkpoints that were not uploaded, oldest first.
    """

    unsent: Sequence[Path] = ()
    _pending: _Pending | None = None
    _uploader: Uploader | None = None

    def __init__(self, run: Run, directories: Directories) -> None:
        resumed = directories.start.checkpoint
        self.last = None if resumed is None else resumed[0]
        self.directories = directories
        self.retention = retention_of(run)
        self._lineage = [] if resumed is None else resumed[1].lineage
        self._run = run
        self._file = file_of(run.head)
        # Its own group: the thread's collectives would meet those of the training steps in the other one.
        self._world = run.world.in_background(run.world.save_group)
        self._background = BackgroundThread("plsc-save")
        if directories.store is not None:
            self._uploader = Uploader(run, directories, directories.store, self.retention)
            # An earlier run may have been killed before it had uploaded the checkpoint that this one resumes.
            last = None if self.last is None else self.last.resolve()  # may be a link to one in the folder
            is_here = last is not None and last.parent == directories.local.resolve()
            if last is not None and is_here and not directories.start.is_fetched:
                self._uploader.add(directories.local / last.name)
        self._has_warned = False
        self.best = on_main_rank(run.world, f"look into {directories.local}", self._find_best)

    def save(self, name: str, metrics: dict[str, float], *, wait: bool = False) -> None:
        """Save the state of the run as the checkpoint `name`, in the background unless `wait` is set.

        metrics: values for `Retention`. Raises CheckpointError, also for the previous save.
        """
        began = time.monotonic()
        self.finish_save()  # at most one copy is in memory
        if self._file is not None:
            self._file.begin(mark_of(self._run.position.step, self.directories.start.run_id))
        state = take_snapshot(self._run, metrics, self.directories.start.run_id, self._lineage)
        wait = wait or not self._can_copy(state)
        if not wait:
            state = state.copy_to_host()
        path = self.directories.local / name
        future = self._background.submit(lambda: self._publish(path, state))
        self._pending = _Pending(future, path, time.monotonic() - began)
        if wait:
            self.finish_save()

    def check(self) -> None:
        """Raise CheckpointError, on all ranks, for state that cannot be saved; a collective."""
        on_every_rank(self._run.world, "save this run", lambda: check_snapshot(self._run))

    def _can_copy(self, state: Snapshot) -> bool:
        """Return whether memory suffices for a copy; log once if it does not."""
        # Offloaded class weights already fill this machine's memory.
        free = 0 if self._run.options.head.offload else available_memory()
        if free is None or state.nbytes < _SHARE_OF_MEMORY * free:
            return True
        if not self._has_warned:
            self._has_warned = True
            why = (
                "head.offload is set, so class weights are not copied"
                if self._run.options.head.offload
                else f"a copy of {format_bytes(state.nbytes)} does not fit into CPU memory"
            )
            self._world.log(f"{why}: training pauses while a checkpoint is written")
        return False

    def is_done(self) -> bool:
        """Return whether no save is running on this rank."""
        return self._pending is None or self._pending.future.done()

    def finish_save(self) -> None:
        """Wait for the running save, if any, and log its result. Raises the same errors as `save`."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        began = time.monotonic()
        try:
            outcome = pending.future.result()
        except CheckpointError as error:
            error.exit_code = NotSavedError.exit_code
            raise
        stall = pending.stall + time.monotonic() - began
        self.last, self.best = pending.path, outcome.best
        speed = format_bytes(outcome.size / max(outcome.seconds, 1e-3))
        stalled = f", training stalled {stall:.1f} s" if stall >= _SHORTEST_STALL else ""
        self._world.log(
            f"saved {pending.path}: {format_bytes(outcome.size)} in {outcome.seconds:.1f} s "
            f"({speed}/s){stalled}"
        )
        if outcome.problem:
            self._world.log(outcome.problem, logging.WARNING)
        if self._uploader is not None:
            self._uploader.add(pending.path)

    def wait(self, seconds: float) -> None:
        """Wait for the running save, at most so long; its result is ignored."""
        if self._pending is not None:
            futures.wait([self._pending.future], seconds)

    def close(self, seconds: float | None = None) -> str:
        """Wait for the running save and all uploads; return what is not uploaded and where it is, or ''.

        seconds: deadline for the uploads; None: wait until each has succeeded or failed.
        """
        self.finish_save()
        self._background.close()
        self.unsent = [] if self._uploader is None else self._uploader.close(seconds)
        if not self.unsent or self.directories.store is None:
            return ""
        names, here = ", ".join(path.name for path in self.unsent), self.directories.local
        there = self.directories.store.shown
        return (
            f"not uploaded to {there}: {names} (complete in {here}); when the store is available again, "
            f"run: plsc checkpoint push {here} {there}"
        )

    def _publish(self, path: Path, state: Snapshot) -> _Outcome:
        """Write, publish and prune, in the background thread."""
        began = time.monotonic()
        is_shared = self.directories.is_shared or self.directories.store is None
        save_checkpoint(path.parent, path.name, state, self._world, is_shared=is_shared)
        if self._file is not None:
            self._file.forget(mark_of(state.manifest.step, state.manifest.run_id))
        seconds = time.monotonic() - began
        pruned = on_every_rank(self._world, f"prune {path.parent}", lambda: self._prune_and_find_best(path))
        best, size, _ = pruned[0]
        return _Outcome(size, seconds, best, pruned[self._world.rank][2])

    def _prune_and_find_best(self, newest: Path) -> tuple[tuple[str, float] | None, int, str | None]:
        """Delete old checkpoints and write best.json; return best, size of the newest, and a problem.

        Best and size are those of rank 0. A failure to delete is only a problem to log: the newest
        checkpoint is saved.
        """
        problem = problem_of(partial(self._prune, newest)) if self.directories.is_owner else None
        if not self._world.is_main:
            return None, 0, problem
        size = sum(file.bytes for file in read_manifest(newest).files.values())
        best, folder = self._find_best(), Store(newest.parent)
        naming = partial(write_best, folder, self.retention.monitor, best)
        return best, size, problem_of(naming) or problem

    def _prune(self, newest: Path) -> None:
        start, uploader = self.directories.start, self._uploader
        # No other upload starts while this lock is held.
        with contextlib.nullcontext() if uploader is None else uploader.lock:
            uploading = "" if uploader is None else uploader.uploading
            keep = {newest.name, start.resumed, uploading}
            prune(Store(newest.parent), self.retention, start.run_id, keep)

    def _find_best(self) -> tuple[str, float] | None:
        return best_in(Store(self.directories.local), self.retention, self.directories.start.run_id)


def retention_of(run: Run) -> Retention:
    """Return which checkpoints to keep. Raises OptionError for a metric that this run does not measure."""
    options = run.options.checkpoint
    known = [*run.evaluated, "loss"]
    metric = known[0] if options.monitor is None else options.monitor
    # A metric that comes from a checkpoint may be unknown here.
    if metric not in known and "checkpoint.monitor" in run.options.explicit:
        raise OptionError(
            f"checkpoint.monitor is {metric!r}, which this run does not measure; {suggest(metric, known)}"
        )
    return Retention(options.keep_last, options.save_top_k, metric)
