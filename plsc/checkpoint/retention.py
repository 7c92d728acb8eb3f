"""List checkpoints, rank them by a metric, and delete old ones."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from plsc.checkpoint.manifest import LARGEST_MANIFEST, Manifest, parse_manifest
from plsc.errors import CheckpointError, DataError
from plsc.storage.publish import MANIFEST_NAME, FolderLock
from plsc.storage.store import Store, withdraw
from plsc.storage.urls import shown

METRICS_KEY = "metrics"  # in a manifest's scalars: maps names to numbers
BEST_NAME = "best.json"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep: the `last` newest, at least one, and the `top` best by a metric; -1: all.

    Attributes:
        monitor: name of the metric; checkpoints without it do not count as best. None: rank none. The lowest
            loss and the highest value of any other metric are the best.
    """

    last: int = 5
    top: int = 0
    monitor: str | None = None

    def ranking(self, checkpoints: Sequence[tuple[str, Manifest]]) -> list[tuple[str, float]]:
        """Return names and values of the checkpoints that have the metric, best first, then oldest first."""
        rated = [(name, metrics_of(manifest).get(self.monitor or "")) for name, manifest in checkpoints]
        known = [(name, value) for name, value in rated if value is not None]
        return sorted(known, key=lambda entry: entry[1] if self.monitor == "loss" else -entry[1])

    def kept(self, checkpoints: Sequence[tuple[str, Manifest]]) -> set[str]:
        """Return the names to keep. checkpoints: names and manifests, oldest first."""
        names = [name for name, _ in checkpoints]
        if min(self.last, self.top) < 0:
            return set(names)
        best = [name for name, _ in self.ranking(checkpoints)[: self.top]]
        return {*names[-max(1, self.last) :], *best}


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """Return a checkpoint's metrics by name, without values that are not finite numbers."""
    saved = manifest.scalars.get(METRICS_KEY)
    metrics = saved if isinstance(saved, dict) else {}
    numbers = {name: value for name, value in metrics.items() if type(value) in (int, float)}
    return {name: float(value) for name, value in numbers.items() if abs(value) <= sys.float_info.max}


def list_checkpoints(save_dir: str | os.PathLike[str]) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints of the local folder ``save_dir`` with their manifests, fewest steps first.

    The list is empty if the folder does not exist. Raises DataError if it cannot be read.
    """
    folder = Path(save_dir)
    return [(folder / name, manifest) for name, manifest in checkpoints_in(Store(folder))]


def checkpoints_in(store: Store) -> list[tuple[str, Manifest]]:
    """Return names and manifests of the checkpoints in a folder or store, fewest steps first.

    Hidden folders and folders without a valid manifest are left out.
    """
    checkpoints = []
    for name in store.names(only_folders=True):
        if name.startswith("."):
            continue
        try:
            checkpoints.append((name, manifest_in(store, name)[0]))
        except CheckpointError:
            continue
        except DataError:  # a local folder that this user cannot read
            if store.is_remote:
                raise
    return sorted(checkpoints, key=lambda entry: age_key(*entry))


def manifest_in(store: Store, name: str = "") -> tuple[Manifest, bytes]:
    """Return a checkpoint's manifest, parsed and as bytes. No name: the store's folder is the checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
        DataError: the store does not answer.
    """
    path = f"{name}/{MANIFEST_NAME}" if name else MANIFEST_NAME
    data = store.read(path, LARGEST_MANIFEST)
    where = shown(store.child(name)) if name else store.shown
    if data is None:
        raise CheckpointError(
            f"{where} is not a checkpoint: it has no {MANIFEST_NAME}; expected a path or URL such as "
            "saved_model/5 or hdfs://server/run/5"
        )
    return parse_manifest(data, f"{where}/{MANIFEST_NAME}"), data


def age_key(name: str, manifest: Manifest) -> tuple[int, int, str]:
    """Return the sort key of a checkpoint; the oldest sorts first."""
    return manifest.step, manifest.epoch, name


def prune(store: Store, retention: Retention, run_id: str = "", protect: Collection[str] = ()) -> list[str]:
    """Delete the checkpoints of a run that the retention does not keep; return their names, oldest first.

    Call from one process. Checkpoints of other runs, those named in `protect`, linked folders and folders
    with other files are unchanged. If the process is killed, no partial checkpoint keeps a published name.
    Raises DataError if one cannot be deleted.
    """
    own = _of_run(store, run_id)
    stay = {*retention.kept(own), *protect}
    doomed = [
        name
        for name, manifest in own
        if name not in stay
        and not store.is_link(name)
        and manifest.files.keys() | {MANIFEST_NAME} >= set(store.names(name))
    ]
    for name in doomed:
        withdraw(store, name)
    return doomed


def prune_all(location: str, retention: Retention) -> list[str]:
    """Delete the checkpoints in a folder or at a URL that the retention does not keep; return their names.

    Each run's checkpoints are counted separately; those without a run id count as one run's.
    Raises DataError if a run is saving to the folder.
    """
    store = Store(location)
    runs = {manifest.run_id for _, manifest in checkpoints_in(store)}
    lock = FolderLock(Path(location)) if runs and not store.is_remote else None
    try:
        return [name for run_id in sorted(runs) for name in prune(store, retention, run_id)]
    finally:
        if lock is not None:
            lock.release()


def best_in(store: Store, retention: Retention, run_id: str) -> tuple[str, float] | None:
    """Return name and value of a run's best checkpoint; None if none has the metric."""
    ranking = retention.ranking(_of_run(store, run_id))
    return ranking[0] if ranking else None


def _of_run(store: Store, run_id: str) -> list[tuple[str, Manifest]]:
    return [one for one in checkpoints_in(store) if one[1].run_id == run_id]


def write_best(store: Store, metric: str | None, best: tuple[str, float] | None) -> None:
    """Write the best checkpoint's name to best.json, or delete the file if `best` is None."""
    if best is None:
        store.delete(BEST_NAME)
        return
    content = {"path": best[0], "metric": metric, "value": best[1]}
    store.write(BEST_NAME, (json.dumps(content) + "\n").encode())
