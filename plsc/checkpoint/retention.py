"""Which checkpoints there are, which is the best, and which may go."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plsc.checkpoint.folders import withdraw
from plsc.checkpoint.manifest import Manifest, read_manifest
from plsc.errors import CheckpointError, OptionError

METRICS_KEY = "metrics"  # of a manifest's scalars: name to number


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
        rated = [(name, value_of(manifest, self.monitor)) for name, manifest in found]
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


def value_of(manifest: Manifest, metric: str | None) -> float | None:
    """Return a checkpoint's value of a metric, None if it was saved without."""
    metrics = manifest.scalars.get(METRICS_KEY)
    value = metrics.get(metric) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, (int, float)) else None


def list_checkpoints(save_dir: str | os.PathLike[str]) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints of ``save_dir`` with their manifests, fewest steps first.

    Hidden folders, and folders without a sound manifest, are not checkpoints. No folder, none.

    Raises:
        CheckpointError: ``save_dir`` cannot be read.
    """
    save_dir = Path(save_dir)
    try:
        candidates = sorted(save_dir.iterdir()) if save_dir.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"cannot list checkpoints in {save_dir}: {error.strerror}") from error
    found = []
    for path in candidates:
        if path.name.startswith("."):
            continue
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError:
            continue
    return sorted(found, key=lambda entry: age_key(entry[0].name, entry[1]))


def age_key(name: str, manifest: Manifest) -> tuple[int, int, str]:
    """Return what checkpoints are sorted by, the oldest first."""
    return manifest.step, manifest.epoch, name


def prune(
    save_dir: str | os.PathLike[str],
    retention: Retention,
    protect: Iterable[str | os.PathLike[str]] = (),
) -> list[Path]:
    """Delete all checkpoints that are not to be kept; return those deleted, oldest first.

    For one process (rank 0). ``protect``: paths that stay although they are old; a linked folder stays
    too. A kill at any moment leaves no half of a checkpoint under a published name.

    Raises:
        CheckpointError: a folder cannot be deleted; the others are as they were.
    """
    protected = {Path(path).resolve() for path in protect}
    found = list_checkpoints(save_dir)
    kept = retention.kept([(path.name, manifest) for path, manifest in found])
    deleted = []
    for path, _ in found:
        if path.name in kept or path.is_symlink() or path.resolve() in protected:
            continue
        try:
            withdraw(path)
        except OSError as error:
            raise CheckpointError(
                f"cannot delete old checkpoint {path}: {error.strerror}; check its permissions"
            ) from error
        deleted.append(path)
    return deleted
