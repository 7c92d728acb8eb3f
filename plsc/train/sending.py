"""Sends checkpoints to a store beside training, one after another, each rank its own part."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import RLock

from plsc.checkpoint import Retention, read_manifest
from plsc.checkpoint.agree import on_every_rank
from plsc.checkpoint.remote import upload
from plsc.checkpoint.retention import best_in, manifest_in, prune, write_best
from plsc.checkpoint.shard_file import is_shard_of
from plsc.errors import CheckpointError, PlscError
from plsc.parallel.machine import Background
from plsc.storage.store import Store, Transfer
from plsc.train.build import Run
from plsc.train.logs import RunLog
from plsc.train.places import SMALL_FILES, Places


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
                f"is back: plsc checkpoint push {self._places.local} {self._store.shown}"
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
            self._log.say(str(error))
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
        mine = [name for name in manifest.files if is_shard_of(name, self._world.rank)]
        total = sum(manifest.files[name].bytes for name in mine)
        say = self._log.say if self._world.is_main else None
        of = f" (rank 0 of {self._world.size})" if self._world.size > 1 else ""
        transfer = Transfer(f"sending {path} to {self._store.shown}{of}", total, say)
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
                self._log.say(str(error))

    def _send_file(self, path: Path) -> None:
        self._store.write(path.name, path.read_bytes())
