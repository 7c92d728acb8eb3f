"""The run's state, to a checkpoint; `plsc.train.resume` brings it back."""

from __future__ import annotations

import re
from pathlib import Path

from plsc.checkpoint import (
    Manifest,
    Snapshot,
    check_replaceable,
    list_checkpoints,
    read_manifest,
    save_checkpoint,
)
from plsc.checkpoint.agree import on_every_rank
from plsc.checkpoint.layout import info_of
from plsc.checkpoint.remote import list_remote
from plsc.checkpoint.retention import METRICS_KEY
from plsc.errors import CheckpointError
from plsc.heads.joint import JointHead
from plsc.models.base_model import constructor_arguments
from plsc.parallel.shard import class_ranges
from plsc.storage.names import join, parent_of
from plsc.storage.store import Store
from plsc.storage.urls import is_url, shown, without_secrets
from plsc.train.adopt import ARGUMENTS_KEY
from plsc.train.build import Run
from plsc.train.snapshot import scalars_to_save, tensors_to_save
from plsc.version import __version__

_EPOCH = re.compile(r"0|[1-9][0-9]{0,18}")  # the name of an epoch's checkpoint
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


def check_save_dir(run: Run, store: Store | None) -> None:
    """Refuse to mix a run with anything else in its folder or store; a collective."""

    def look() -> list[tuple[str, list[str]]]:
        if not run.world.is_main:
            return []
        found = [(str(run.save_dir), [folder.name for folder, _ in list_checkpoints(run.save_dir)])]
        if store is not None:
            found.append((store.url, [name for name, _ in list_remote(store)]))
        return [(place, names) for place, names in found if names]

    occupied = on_every_rank(run.world, f"look into {run.save_dir}", look)[0]
    options = run.options.checkpoint
    is_of_save_dir = options.load_dir in (LAST, BEST) and run.resumed_from is not None
    sources = {_parent(place) for place in (options.load_dir, options.download_dir) if place}
    here = {_home(str(run.save_dir)), *([_home(store.url)] if store else [])}
    if occupied and not is_of_save_dir and not sources & here:
        place, names = occupied[0]
        raise CheckpointError(
            f"{shown(place)} holds checkpoints of an earlier run: {', '.join(names)}; to go on with that "
            f"one, load {shown(join(place, names[-1]))} (checkpoint.load_dir, set_checkpoint_dir); for "
            "this one, save elsewhere (checkpoint.save_dir, set_model_save_dir), or to a new version folder "
            "(checkpoint.new_version, set_new_version)"
        )
    for path in run.save_dir.iterdir() if run.save_dir.is_dir() else ():
        # Where an epoch is to be saved, which a run ended by its steps may have billions of.
        if _EPOCH.fullmatch(path.name) and int(path.name) < run.options.train.epochs:
            check_replaceable(path)  # now, and not after an epoch of training


def _home(place: str) -> str:
    return place.rstrip("/") if is_url(place) else str(Path(place).resolve())


def _parent(place: str) -> str:
    return _home(parent_of(place if is_url(place) else str(Path(place).resolve())))


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
    )
    return Snapshot(replicated, sharded, manifest)


def _class_ranges(run: Run) -> list[list[int]]:
    if isinstance(run.head, JointHead):
        return []  # those of each head are among the scalars
    ranks = run.world.size if run.head.is_sharded else 1
    return [list(pair) for pair in class_ranges(run.head.class_num, ranks)]
