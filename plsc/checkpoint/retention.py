"""Which checkpoints there are, which is the best, and which may go."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from plsc.checkpoint.manifest import LARGEST_MANIFEST, Manifest, parse_manifest
from plsc.config.option import is_finite_number
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.storage.publish import MANIFEST_NAME, FolderLock, withdraw
from plsc.storage.store import Store
from plsc.storage.urls import shown

METRICS_KEY = "metrics"  # of a manifest's scalars: name to number
BEST_NAME = "best.json"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the `last` newest, and the `top` best by a metric; -1 of either: all.

    monitor: the metric's name, as in a manifest's metrics; checkpoints without it are not among the best.
    mode: 'max' if it should be high, 'min' if low. None for a monitor: none is best.

    Raises OptionError for counts and modes that mean nothing.
    """

    last: int = 5
    top: int = 0
    monitor: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.last < -1 or self.top < -1:
            raise OptionError(f"cannot keep {min(self.last, self.top)} checkpoints; -1 keeps all")
        if self.last == 0 and (self.top == 0 or self.monitor is None):
            raise OptionError(
                "nothing would be kept; keep at least the last checkpoint, or the best by a metric"
            )
        if self.mode not in ("min", "max"):
            raise OptionError(f"mode is {self.mode!r}; expected 'min' or 'max'")

    def ranking(self, found: Sequence[tuple[str, Manifest]]) -> list[tuple[str, float]]:
        """Return names and values of those that have the metric, the best first; of equals the older."""
        rated = [(name, metrics_of(manifest).get(self.monitor or "")) for name, manifest in found]
        known = [(name, value) for name, value in rated if value is not None]
        return sorted(known, key=lambda entry: entry[1] if self.mode == "min" else -entry[1])

    def kept(self, found: Sequence[tuple[str, Manifest]]) -> set[str]:
        """Return the names that stay. found: names and manifests, oldest first."""
        names = [name for name, _ in found]
        if -1 in (self.last, self.top):
            return set(names)
        best = [name for name, _ in self.ranking(found)[: self.top]]
        return {*names[max(0, len(names) - self.last) :], *best}


def mode_of(mode: str, metric: str) -> str:
    """Return 'min' or 'max'; for 'auto' what suits the metric: the loss is to be low, all else high."""
    if mode != "auto":
        return mode
    return "min" if metric == "loss" else "max"


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """Return the metrics of a checkpoint by name: those that are finite numbers."""
    found = manifest.scalars.get(METRICS_KEY)
    metrics = found if isinstance(found, dict) else {}
    return {name: float(value) for name, value in metrics.items() if is_finite_number(value)}


def list_checkpoints(save_dir: str | os.PathLike[str]) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints of the local folder ``save_dir`` with their manifests, fewest steps first.

    Raises DataError if ``save_dir`` cannot be read; no folder, no checkpoints.
    """
    folder = Path(save_dir)
    return [(folder / name, manifest) for name, manifest in checkpoints_in(Store(folder))]


def checkpoints_in(store: Store) -> list[tuple[str, Manifest]]:
    """Return names and manifests of the checkpoints in a folder or store, fewest steps first.

    Hidden folders, and folders without a sound manifest, are not checkpoints.
    """
    found = []
    for name in store.names(only_folders=True):
        if name.startswith("."):
            continue
        try:
            found.append((name, manifest_in(store, name)[0]))
        except CheckpointError:
            continue
        except DataError:  # of a folder of this disk that others may read
            if store.is_remote:
                raise
    return sorted(found, key=lambda entry: age_key(*entry))


def manifest_in(store: Store, name: str = "") -> tuple[Manifest, bytes]:
    """Return a checkpoint's manifest, parsed and as it is. No name: the store's own folder is the checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged. DataError: the store does not answer.
    """
    path = f"{name}/{MANIFEST_NAME}" if name else MANIFEST_NAME
    data = store.read(path, LARGEST_MANIFEST)
    where = shown(store.child(name)) if name else store.shown
    if data is None:
        raise CheckpointError(
            f"there is no checkpoint at {where}: it has no {MANIFEST_NAME}; give the path or URL of one, "
            "such as hdfs://server/run/5"
        )
    return parse_manifest(data, f"{where}/{MANIFEST_NAME}"), data


def age_key(name: str, manifest: Manifest) -> tuple[int, int, str]:
    """Return what checkpoints are sorted by, the oldest first."""
    return manifest.step, manifest.epoch, name


def prune(store: Store, retention: Retention, run_id: str = "", protect: Collection[str] = ()) -> list[str]:
    """Delete the checkpoints of a run that are not to be kept; return their names, oldest first.

    For one process. Those of other runs, those whose name is in `protect`, and linked folders are unchanged.
    A kill at any moment leaves no half of a checkpoint under a published name. Raises DataError if one cannot
    be deleted.
    """
    own = _of_run(store, run_id)
    stay = {*retention.kept(own), *protect}
    doomed = [name for name, _ in own if name not in stay and not store.is_link(name)]
    for name in doomed:
        withdraw(store, name)
    return doomed


def prune_all(place: str, retention: Retention) -> list[str]:
    """Delete the checkpoints in a folder or at a URL that are not to be kept; return their names.

    Each run's are counted separately; those without a run id are one run's.
    Raises DataError if a run is saving to the folder.
    """
    store = Store(place)
    runs = {manifest.run_id for _, manifest in checkpoints_in(store)}
    lock = FolderLock(Path(place)) if runs and not store.is_remote else None
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
    """Have best.json name a run's best checkpoint. Raises DataError if it cannot be written."""
    if best is None:
        store.delete(BEST_NAME)
        return
    content = {"path": best[0], "metric": metric, "value": best[1]}
    store.write(BEST_NAME, (json.dumps(content) + "\n").encode())
