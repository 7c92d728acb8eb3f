"""Upload the checkpoints of a run to its store, in the background."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from threading import RLock

from plsc.checkpoint import Retention, read_manifest
from plsc.checkpoint.all_ranks import on_every_rank, own_result
from plsc.checkpoint.remote import claim, upload
from plsc.checkpoint.retention import best_in, manifest_in, prune, write_best
from plsc.checkpoint.shard_file import rank_of_shard
from plsc.errors import CheckpointError, PlscError
from plsc.parallel.machine import BackgroundThread
from plsc.run.run import Run
from plsc.state.start import SMALL_FILES, Directories
from plsc.storage.regular import read_regular
from plsc.storage.store import Store, Transfer


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
