"""Checkpoints in the background: copied at a step boundary, then published, uploaded, thinned out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
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
from plsc.checkpoint.agree import on_every_rank
from plsc.checkpoint.remote import upload
from plsc.checkpoint.retention import best_in, manifest_in, mode_of, prune, write_best
from plsc.checkpoint.shard_file import rank_of_shard
from plsc.errors import CheckpointError, DataError, OptionError, PlscError, suggest
from plsc.parallel.machine import Background, available_memory
from plsc.storage.store import Store, Transfer, in_words
from plsc.train.build import Run
from plsc.train.directories import SMALL_FILES, Places
from plsc.train.logs import RunLog
from plsc.train.snapshot import take_snapshot

_SHARE_OF_MEMORY = 0.8  # of what is left, for a copy of the state


@dataclass(frozen=True)
class Best:
    """The best checkpoint that is there: its path, and its value of the metric that chose it."""

    path: Path
    metric: str
    value: float


@dataclass(frozen=True)
class _Outcome:
    path: Path
    size: int
    seconds: float
    best: Best | None
    problem: str | None


@dataclass
class _Pending:
    future: Future[_Outcome]
    path: Path
    stall: float


class Saver:
    """Saves a run. Its methods are collectives, to be called by all ranks at the same step.

    last: the newest checkpoint that was published; best: the best one, if one is judged.
    """

    def __init__(self, run: Run, log: RunLog, places: Places) -> None:
        self.last: Path | None = None
        self.best: Best | None = None
        self._run = run
        self._log = log
        self._places = places
        self._options = run.options.checkpoint
        self._retention = retention_of(run)
        self._world = run.world.beside(run.world.save_group)
        self._background = Background("plsc-save")
        self._pending: _Pending | None = None
        self._sender: Sender | None = None
        if places.store is not None:
            self._sender = Sender(run, log, places, places.store, self._retention)
            self._send_resumed()
        self._has_told = False
        self.best = on_every_rank(
            run.world,
            f"look into {places.local}",
            lambda: self._find_best() if run.world.is_main else None,
        )[0]

    def save(self, name: str, metrics: dict[str, float], *, wait: bool = False) -> None:
        """Begin to publish the run's state under a name; `wait` until it is there.

        metrics: what the checkpoint is judged by. Raises CheckpointError, also of the save before, unless
        errors are to be passed over.
        """
        began = time.monotonic()
        self.settle()  # at most one copy at a time is in memory
        state = take_snapshot(self._run, metrics)
        wait = wait or not self._can_copy(state)
        if not wait:
            state = state.copy_to_host()
        path = self._places.local / name
        future = self._background.submit(lambda: self._publish(path, state))
        stall = time.monotonic() - began
        self._pending = _Pending(future, path, stall)
        if wait:
            self.settle()

    def _send_resumed(self) -> None:
        """Send what the run goes on from, if it is here alone: a run before was killed in between.

        A run that has no step left to make would never send it.
        """
        source = self._run.resumed_from
        if self._sender is None or source is None:
            return
        if source.resolve().parent == self._places.local.resolve():
            self._sender.add(self._places.local / source.name, unless_there=True)

    def _can_copy(self, state: Snapshot) -> bool:
        """Whether there is memory for a copy; if not, it is said once."""
        if not self._options.asynchronous:
            return False
        # Offloaded rows are in this machine's memory because there are very many of them.
        free = 0 if self._run.options.head.offload else available_memory()
        if free is None or state.nbytes < _SHARE_OF_MEMORY * free:
            return True
        if not self._has_told:
            self._has_told = True
            why = (
                "no copy is made of offloaded rows"
                if self._run.options.head.offload
                else f"a copy of {in_words(state.nbytes)} does not fit into this machine's memory "
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
        self.last, self.best = outcome.path, outcome.best
        speed = in_words(outcome.size / max(outcome.seconds, 1e-3))
        self._log.say(
            f"saved {outcome.path}: {in_words(outcome.size)} in {outcome.seconds:.1f} s ({speed}/s), "
            f"training waited {stall:.1f} s"
        )
        if outcome.problem:
            self._log.say(outcome.problem, logging.WARNING)
        if self._sender is not None:
            self._sender.add(outcome.path)

    def close(self, seconds: float | None = None) -> list[Path]:
        """Wait for all that is under way; return what could not be sent to the store, oldest first.

        seconds: for the sending; None: until it has succeeded or failed.
        """
        self.settle()
        self._background.close()
        return [] if self._sender is None else self._sender.close(seconds)

    def _publish(self, path: Path, state: Snapshot) -> _Outcome:
        """Write, publish, thin out; in the thread."""
        began = time.monotonic()
        save_checkpoint(
            path.parent,
            path.name,
            state,
            self._world,
            is_shared=self._places.is_shared or self._places.store is None,
        )
        seconds = time.monotonic() - began
        told = on_every_rank(self._world, f"look at {path.parent}", lambda: self._tidy(path))
        best, size, _ = told[0]
        return _Outcome(path, size, seconds, best, told[self._world.rank][2])

    def _tidy(self, newest: Path) -> tuple[Best | None, int, str | None]:
        """Thin out, and note the best one; return it and the newest one's size, on rank 0, and a problem.

        What was saved is saved: that an older one cannot be deleted is a problem, and no error.
        """
        problem = None
        if self._places.is_owner:
            try:
                self._thin_out(newest)
            except (CheckpointError, DataError) as error:
                problem = str(error)
        if not self._world.is_main:
            return None, 0, problem
        size = sum(file.bytes for file in read_manifest(newest).files.values())
        best = self._find_best()
        named = None if best is None else (best.path.name, best.value)
        try:
            write_best(Store(self._places.local), self._retention.monitor, named)
        except DataError as error:
            problem = problem or str(error)
        return best, size, problem

    def _thin_out(self, newest: Path) -> None:
        protect = {newest.name, self._places.start.resumed or ""}
        with contextlib.ExitStack() as stack:
            if self._sender is not None:
                protect |= stack.enter_context(self._sender.holding())
            prune(Store(newest.parent), self._retention, self._run.run_id, protect)

    def _find_best(self) -> Best | None:
        metric, local = self._retention.monitor, self._places.local
        best = best_in(Store(local), self._retention, self._run.run_id)
        return None if metric is None or best is None else Best(local / best[0], metric, best[1])


def retention_of(run: Run) -> Retention:
    """Return which checkpoints are kept. Raises OptionError for a metric that none of the run would have."""
    options = run.options.checkpoint
    known = [*(f"{target.name} accuracy" for target in run.targets), "loss"]
    metric = known[0] if options.monitor is None else options.monitor
    if (
        metric not in known and "checkpoint.monitor" in run.options.explicit
    ):  # a checkpoint's may be another
        raise OptionError(
            f"checkpoint.monitor is {metric!r}, which no checkpoint of this run would have; "
            f"{suggest(metric, known)}"
        )
    mode = mode_of(options.monitor_mode, metric)
    return Retention(options.keep_last, options.save_top_k, metric, mode)


@dataclass
class _Job:
    path: Path
    future: Future[str | None]


class Sender:
    """Sends what was published on this machine. `add` and `close` are collectives."""

    def __init__(
        self, run: Run, log: RunLog, places: Places, store: Store, retention: Retention
    ) -> None:
        self._world = run.world.beside(run.world.send_group)
        self._run_id = run.run_id
        self._log = log
        self._places = places
        self._store = store
        self._retention = retention
        self._background = Background("plsc-send")
        self._jobs: list[_Job] = []
        self._lock = RLock()  # between the choice of what to send and the deletion of what is old
        self._in_use: Path | None = None

    def add(self, path: Path, *, unless_there: bool = False) -> None:
        """Send the checkpoint `path` after those before it; the call does not wait.

        unless_there: not if the store has it already.
        """
        self._jobs.append(self._job(path, unless_there))

    @contextlib.contextmanager
    def holding(self) -> Iterator[set[str]]:
        """Yield the name of what is being sent and must stay; nothing else is begun meanwhile."""
        with self._lock:
            yield set() if self._in_use is None else {self._in_use.name}

    def close(self, seconds: float | None = None) -> list[Path]:
        """Wait, for so long; try again what had failed; return what is here and could not be sent."""
        give_up = None if seconds is None else time.monotonic() + seconds
        jobs, self._jobs = self._jobs, []
        failed = [job.path for job in jobs if self._outcome(job, give_up) is not None]
        # One that a newer one has pushed out is not missed.
        unsent = [path for path in failed if path.is_dir()]
        while unsent and give_up is None and self._outcome(self._job(unsent[0]), None) is None:
            unsent.pop(0)
        self._background.close()
        if unsent:
            names = ", ".join(path.name for path in unsent)
            self._log.say(
                f"not sent to {self._store.shown}: {names}; whole in {self._places.local}; when the store "
                f"is back: plsc checkpoint push {self._places.local} {self._store.shown}",
                logging.WARNING,
            )
        return unsent

    def _job(self, path: Path, unless_there: bool = False) -> _Job:
        return _Job(path, self._background.submit(lambda: self._send(path, unless_there)))

    def _outcome(self, job: _Job, give_up: float | None) -> str | None:
        """Return what went wrong with a job, None if nothing did."""
        left = None if give_up is None else max(0.0, give_up - time.monotonic())
        try:
            return job.future.result(left)
        except FutureTimeout:
            return "there was no time left"

    def _send(self, path: Path, unless_there: bool) -> str | None:
        """Send one checkpoint, in the thread; return None, or what went wrong."""
        doing = f"look into {self._store.shown}"
        try:
            is_chosen = on_every_rank(
                self._world,
                doing,
                lambda: self._choose(path) and not (unless_there and self._has(path)),
            )[0]
            if not is_chosen:
                return None
            self._send_chosen(path)
        except PlscError as error:
            self._log.say(str(error), logging.WARNING)
            return str(error)
        finally:
            with self._lock:
                self._in_use = None
        return None

    def _choose(self, path: Path) -> bool:
        """Return whether the checkpoint is still there; if so it stays while it is sent."""
        with self._lock:
            is_there = path.is_dir()
            self._in_use = path if is_there else None
            return is_there

    def _has(self, path: Path) -> bool:
        """Whether the store holds this very checkpoint; asked on rank 0 alone."""
        if not self._world.is_main:
            return False
        try:
            return manifest_in(self._store, path.name)[0] == read_manifest(path)
        except CheckpointError:  # there is none, or half of one
            return False

    def _send_chosen(self, path: Path) -> None:
        manifests = on_every_rank(self._world, f"read {path}", lambda: read_manifest(path))
        manifest = manifests[self._world.rank]
        mine = [name for name in manifest.files if rank_of_shard(name) == self._world.rank]
        total = sum(manifest.files[name].bytes for name in mine)
        of = f" (rank 0 of {self._world.size})" if self._world.size > 1 else ""
        transfer = Transfer(
            f"sending {path} to {self._store.shown}{of}", total, self._world.is_main
        )
        upload(path, self._store, mine, self._world, transfer.add)
        transfer.end()
        if self._world.is_main:
            self._tidy(path)

    def _tidy(self, newest: Path) -> None:
        """Prune the store, and send the files next to the checkpoints, as they are now: some still grow.

        A failure is logged and stops neither the rest nor the run: the checkpoint itself was sent.
        """
        protect = {newest.name, self._places.start.resumed or ""}
        actions: list[Callable[[], object]] = [
            lambda: prune(self._store, self._retention, self._run_id, protect),
            lambda: write_best(
                self._store,
                self._retention.monitor,
                best_in(self._store, self._retention, self._run_id),
            ),
        ]
        for path in (self._places.local / name for name in SMALL_FILES):
            if path.is_file():
                actions.append(partial(self._send_file, path))
        for action in actions:
            try:
                action()
            except (PlscError, OSError) as error:
                self._log.say(str(error), logging.WARNING)

    def _send_file(self, path: Path) -> None:
        self._store.write(path.name, path.read_bytes())
