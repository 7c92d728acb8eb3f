"""The run's state, to a checkpoint; `plsc.train.resume` brings it back."""

from __future__ import annotations

from pathlib import Path

from plsc.checkpoint import (
    Manifest,
    Snapshot,
    list_checkpoints,
    read_manifest,
    save_checkpoint,
)
from plsc.checkpoint.layout import info_of
from plsc.checkpoint.retention import METRICS_KEY
from plsc.errors import CheckpointError
from plsc.heads.joint import JointHead
from plsc.models.base_model import constructor_arguments
from plsc.parallel.collectives import class_ranges
from plsc.storage.urls import without_secrets
from plsc.train.adopt import ARGUMENTS_KEY
from plsc.train.build import Run
from plsc.train.snapshot import scalars_to_save, tensors_to_save
from plsc.version import __version__

LAST, BEST = "last", "best"  # of the save_dir, in place of a path


def open_checkpoint(path: Path) -> Manifest:
    """Return the manifest at `path`; the error names the checkpoints when it is a folder of some."""
    try:
        return read_manifest(path)
    except CheckpointError as error:
        inside = [folder.name for folder, _ in list_checkpoints(path)] if path.is_dir() else []
        if not inside:
            raise
        raise CheckpointError(
            f"{path} is not a checkpoint but holds some: {', '.join(inside)}; "
            f"give one of them, such as {path / inside[-1]}"
        ) from error


def publish(run: Run, folder: Path, name: str) -> Path:
    """Publish the run's state as `folder/name`; a collective."""
    state = take_state(run, {})
    return save_checkpoint(folder, name, state.tensors, state.sharded, state.manifest, run.world)


def take_state(run: Run, metrics: dict[str, float]) -> Snapshot:
    """Return the run's state, without a copy of it; a collective.

    metrics: what the checkpoint is judged by. Nothing of the run is changed.
    """
    replicated, sharded, roles = tensors_to_save(run)
    manifest = Manifest(
        plsc_version=__version__,
        step=run.position.step,
        epoch=run.position.epoch,
        step_in_epoch=run.position.step_in_epoch,
        world_size=run.world.size,
        class_num=run.head.class_num,
        emb_size=run.options.model.emb_size,
        class_ranges=_class_ranges(run),
        options=without_secrets(run.options.as_dict()),
        scalars={
            METRICS_KEY: metrics,
            ARGUMENTS_KEY: constructor_arguments(run.network),
            **scalars_to_save(run),
        },
        tensors={
            key: info_of(value, roles[key])
            for part in (replicated, sharded)
            for key, value in part.items()
        },
        lineage=run.lineage,
        run_id=run.run_id,
    )
    return Snapshot(replicated, sharded, manifest)


def _class_ranges(run: Run) -> list[list[int]]:
    if isinstance(run.head, JointHead):
        return []  # those of each head are among the scalars
    ranks = run.world.size if run.head.is_sharded else 1
    return [list(pair) for pair in class_ranges(run.head.class_num, ranks)]
