"""Checkpoints in the background: copied at a step boundary, then published, uploaded, thinned out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import RLock

from plsc.checkpoint import (
    Retention,
    Snapshot,
    read_manifest,
    save_checkpoint,
)
from plsc.checkpoint.all_ranks import on_every_rank
from plsc.checkpoint.remote import upload
from plsc.checkpoint.retention import best_in, manifest_in, mode_of, prune, write_best
from plsc.checkpoint.shard_file import rank_of_shard
from plsc.errors import CheckpointError, OptionError, PlscError, suggest
from plsc.parallel.machine import BackgroundThread, available_memory
from plsc.storage.store import Store, Transfer, format_bytes
from plsc.train.build import Run
from plsc.train.directories import SMALL_FILES, Directories
from plsc.train.logs import RunLog
from plsc.train.snapshot import take_snapshot

_SHARE_OF_MEMORY = 0.8  # of what is left, for a copy of the state


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
    """Saves a run. Its methods are collectives, to be called by all ranks at the same step.

    last: the newest checkpoint that was published, at first the one that the run resumes. best: name and
    value of the best one in the run's folder, by the metric of `retention`; None if none is judged.
    """

    def __init__(self, run: Run, log: RunLog, directories: Directories) -> None:
        resumed = directories.start.checkpoint
        self.last = None if resumed is None else resumed[0]
        self.directories = directories
        self.retention = retention_of(run)
        self._lineage = [] if resumed is None else resumed[1].lineage
        self._run = run
        self._log = log
        self._options = run.options.checkpoint
        self._world = run.world.in_background(run.world.save_group)
        self._background = BackgroundThread("plsc-save")
        self._pending: _Pending | None = None
        self._uploader: Uploader | None = None
        if directories.store is not None:
            self._uploader = Uploader(run, log, directories, directories.store, self.retention)
            # A run before may have been killed before it had sent what this one resumes.
            if self.last is not None and self.last.resolve().parent == directories.local.resolve():
                self._uploader.add(directories.local / self.last.name)
        self._has_warned = False
        self.best = on_every_rank(
            run.world,
            f"look into {directories.local}",
            lambda: self._find_best() if run.world.is_main else None,
        )[0]

    def save(self, name: str, metrics: dict[str, float], *, wait: bool = False) -> None:
        """Begin to publish the run's state under a name; `wait` until it is there.

        metrics: what the checkpoint is judged by. Raises CheckpointError, also of the save before, unless
        errors are to be passed over.
        """
        began = time.monotonic()
        self.settle()  # at most one copy at a time is in memory
        state = take_snapshot(self._run, metrics, self.directories.start.run_id, self._lineage)
        wait = wait or not self._can_copy(state)
        if not wait:
            state = state.copy_to_host()
        path = self.directories.local / name
        future = self._background.submit(lambda: self._publish(path, state))
        self._pending = _Pending(future, path, time.monotonic() - began)
        if wait:
            self.settle()

    def _can_copy(self, state: Snapshot) -> bool:
        """Whether there is memory for a copy; if not, that is logged once."""
        if not self._options.asynchronous:
            return False
        # Offloaded rows are in this machine's memory because there are very many of them.
        free = 0 if self._run.options.head.offload else available_memory()
        if free is None or state.nbytes < _SHARE_OF_MEMORY * free:
            return True
        if not self._has_warned:
            self._has_warned = True
            why = (
                "no copy is made of offloaded rows"
                if self._run.options.head.offload
                else f"a copy of {format_bytes(state.nbytes)} does not fit into this machine's memory "
                "beside the rows"
            )
            self._log.say(f"{why}: training waits while a checkpoint is written")
        return False

    def is_done(self) -> bool:
        """Whether nothing is under way on this rank, or it has ended."""
        return self._pending is None or self._pending.future.done()

    def settle(self) -> None:
        """Wait for the save that is under way, and say what came of it. Raises as `save`."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        began = time.monotonic()
        try:
            outcome = pending.future.result()
        except CheckpointError as error:
            if self._options.on_error == "stop":
                raise
            self._log.say(f"{error}; training goes on without it", logging.WARNING)
            return
        stall = pending.stall + time.monotonic() - began
        self.last, self.best = pending.path, outcome.best
        speed = format_bytes(outcome.size / max(outcome.seconds, 1e-3))
        self._log.say(
            f"saved {pending.path}: {format_bytes(outcome.size)} in {outcome.seconds:.1f} s ({speed}/s), "
            f"training waited {stall:.1f} s"
        )
        if outcome.problem:
            self._log.say(outcome.problem, logging.WARNING)
        if self._uploader is not None:
            self._uploader.add(pending.path)

    def close(self, seconds: float | None = None) -> list[Path]:
        """Wait for all that is under way; return what could not be sent to the store, oldest first.

        seconds: for the uploads; None: until it has succeeded or failed.
        """
        self.settle()
        self._background.close()
        return [] if self._uploader is None else self._uploader.close(seconds)

    def _publish(self, path: Path, state: Snapshot) -> _Outcome:
        """Write, publish, thin out; in the thread."""
        began = time.monotonic()
        is_shared = self.directories.is_shared or self.directories.store is None
        save_checkpoint(path.parent, path.name, state, self._world, is_shared=is_shared)
        seconds = time.monotonic() - began
        tidied = on_every_rank(self._world, f"look at {path.parent}", lambda: self._tidy(path))
        best, size, _ = tidied[0]
        return _Outcome(size, seconds, best, tidied[self._world.rank][2])

    def _tidy(self, newest: Path) -> tuple[tuple[str, float] | None, int, str | None]:
        """Thin out, and note the best one; return it and the newest one's size, on rank 0, and a problem.

        What was saved is saved: that an older one cannot be deleted is a problem, and no error.
        """
        problem = _problem_of(partial(self._thin_out, newest)) if self.directories.is_owner else None
        if not self._world.is_main:
            return None, 0, problem
        size = sum(file.bytes for file in read_manifest(newest).files.values())
        best, folder = self._find_best(), Store(newest.parent)
        naming = partial(write_best, folder, self.retention.monitor, best)
        return best, size, _problem_of(naming) or problem

    def _thin_out(self, newest: Path) -> None:
        start, uploader = self.directories.start, self._uploader
        # Nothing else begins to be sent meanwhile.
        with contextlib.nullcontext() if uploader is None else uploader.lock:
            uploading = "" if uploader is None else uploader.uploading
            keep = {newest.name, start.resumed, uploading}
            prune(Store(newest.parent), self.retention, start.run_id, keep)

    def _find_best(self) -> tuple[str, float] | None:
        return best_in(Store(self.directories.local), self.retention, self.directories.start.run_id)


def _problem_of(action: Callable[[], object]) -> str | None:
    """Do something that may fail and that nothing depends on; return what went wrong, None if nothing did."""
    try:
        action()
    except (PlscError, OSError) as error:
        return str(error)
    return None


def retention_of(run: Run) -> Retention:
    """Return which checkpoints are kept. Raises OptionError for a metric that none of the run would have."""
    options = run.options.checkpoint
    known = [*(f"{target.name} accuracy" for target in run.targets), "loss"]
    metric = known[0] if options.monitor is None else options.monitor
    # A checkpoint's may be another.
    if metric not in known and "checkpoint.monitor" in run.options.explicit:
        raise OptionError(
            f"checkpoint.monitor is {metric!r}, which no checkpoint of this run would have; "
            f"{suggest(metric, known)}"
        )
    mode = mode_of(options.monitor_mode, metric)
    return Retention(options.keep_last, options.save_top_k, metric, mode)


class Uploader:
    """Uploads what was published on this machine. `add` and `close` are collectives.

    uploading: name of the checkpoint that is being uploaded, and must stay. lock: to be held while old ones
    are deleted.
    """

    def __init__(
        self, run: Run, log: RunLog, directories: Directories, store: Store, retention: Retention
    ) -> None:
        self.uploading = ""
        self.lock = RLock()
        self._world = run.world.in_background(run.world.upload_group)
        self._log = log
        self._directories = directories
        self._store = store
        self._retention = retention
        self._background = BackgroundThread("plsc-send")
        self._jobs: list[tuple[Path, Future[str | None]]] = []

    def add(self, path: Path) -> None:
        """Send a checkpoint after those before it, unless the store has it; the call does not wait."""
        self._jobs.append((path, self._background.submit(partial(self._send, path))))

    def close(self, seconds: float | None = None) -> list[Path]:
        """Wait, for so long; try again what had failed; return what is here and could not be sent."""
        give_up = None if seconds is None else time.monotonic() + seconds
        jobs, self._jobs = self._jobs, []
        failed = [path for path, future in jobs if not _has_succeeded(future, give_up)]
        # One that a newer one has pushed out is not missed.
        unsent = [path for path in failed if path.is_dir()]
        while unsent and give_up is None:
            again = self._background.submit(partial(self._send, unsent[0]))
            if not _has_succeeded(again, None):
                break
            unsent.pop(0)
        self._background.close()
        if unsent:
            names, here = ", ".join(path.name for path in unsent), self._directories.local
            self._log.say(
                f"not sent to {self._store.shown}: {names}; whole in {here}; when the store is back: "
                f"plsc checkpoint push {here} {self._store.shown}",
                logging.WARNING,
            )
        return unsent

    def _send(self, path: Path) -> str | None:
        """Send one checkpoint, in the thread; return None, or what went wrong."""
        try:
            doing = f"look into {self._store.shown}"
            if on_every_rank(self._world, doing, lambda: self._choose(path))[0]:
                self._send_chosen(path)
        except PlscError as error:
            self._log.say(str(error), logging.WARNING)
            return str(error)
        finally:
            with self.lock:
                self.uploading = ""
        return None

    def _choose(self, path: Path) -> bool:
        """Return whether to send the checkpoint: it is still there, and the store has not this very one.

        It stays from now on while it is sent. The answer of rank 0 counts.
        """
        with self.lock:
            if not path.is_dir():
                return False
            self.uploading = path.name
        if not self._world.is_main:
            return True
        try:
            return manifest_in(self._store, path.name)[0] != read_manifest(path)
        except CheckpointError:  # there is none, or half of one
            return True

    def _send_chosen(self, path: Path) -> None:
        manifests = on_every_rank(self._world, f"read {path}", lambda: read_manifest(path))
        manifest = manifests[self._world.rank]
        mine = [name for name in manifest.files if rank_of_shard(name) == self._world.rank]
        total = sum(manifest.files[name].bytes for name in mine)
        of = f" (rank 0 of {self._world.size})" if self._world.size > 1 else ""
        transfer = Transfer(f"sending {path} to {self._store.shown}{of}", total, self._world.is_main)
        upload(path, self._store, mine, self._world, transfer.add)
        transfer.end()
        if self._world.is_main:
            self._tidy(path)

    def _tidy(self, newest: Path) -> None:
        """Prune the store, and send the files next to the checkpoints, as they are now: some still grow.

        A failure is logged and stops neither the rest nor the run: the checkpoint itself was sent.
        """
        store, retention, start = self._store, self._retention, self._directories.start
        actions: list[Callable[[], object]] = [
            lambda: prune(store, retention, start.run_id, {newest.name, start.resumed}),
            lambda: write_best(store, retention.monitor, best_in(store, retention, start.run_id)),
        ]
        for path in (start.local / name for name in SMALL_FILES):
            if path.is_file():
                actions.append(partial(self._send_file, path))
        for problem in filter(None, map(_problem_of, actions)):
            self._log.say(problem, logging.WARNING)

    def _send_file(self, path: Path) -> None:
        self._store.write(path.name, path.read_bytes())


def _has_succeeded(future: Future[str | None], give_up: float | None) -> bool:
    """Wait for a job, no longer than until a time of `time.monotonic`; return whether nothing went wrong."""
    left = None if give_up is None else max(0.0, give_up - time.monotonic())
    try:
        return future.result(left) is None
    except FutureTimeout:
        return False
