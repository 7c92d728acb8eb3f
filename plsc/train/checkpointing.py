"""The run's state, to a checkpoint and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plsc.checkpoint import (
    Manifest,
    Snapshot,
    check_replaceable,
    list_checkpoints,
    load_tensors,
    read_manifest,
    save_checkpoint,
)
from plsc.checkpoint.agree import on_every_rank
from plsc.checkpoint.fetch import fetch
from plsc.checkpoint.remote import list_remote
from plsc.checkpoint.retention import METRICS_KEY
from plsc.config import Options
from plsc.errors import CheckpointError, OptionError
from plsc.heads import ShardedHead
from plsc.models.sync_batch_norm import equalise_buffers
from plsc.parallel.shard import class_ranges
from plsc.parallel.world import World
from plsc.storage.names import join, parent_of
from plsc.storage.store import Store
from plsc.storage.urls import is_url, shown, without_secrets
from plsc.train.build import Run, global_batch_size
from plsc.train.state import Position, collect_tensors, make_momentum
from plsc.version import __version__

# A checkpoint does not decide where the next run reads it from, nor on which device that run is.
_NEVER_ADOPTED = frozenset(
    {
        "checkpoint.load_dir",
        "runtime.device",
        "runtime.backend",
        "runtime.timeout",
        "runtime.cpu_threads",
        "checkpoint.download_dir",
        "checkpoint.local_dir",
    }
)


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


def wants_checkpoint(options: Options) -> bool:
    """Whether a checkpoint is named that is to be loaded."""
    return options.checkpoint.load_dir is not None or options.checkpoint.download_dir is not None


def open_load_dir(options: Options, world: World) -> tuple[Path, Manifest]:
    """Return the local folder of the checkpoint to load, fetched if need be, and its manifest. Collective.

    Raises OptionError if none is named, CheckpointError if there is none.
    """
    if not wants_checkpoint(options):
        raise OptionError(
            "there is no checkpoint to load; call set_checkpoint_dir, or give --checkpoint.load_dir"
        )
    path, url = options.checkpoint.load_dir, options.checkpoint.download_dir
    if path is not None and is_url(path):
        if url is not None:
            raise OptionError(f"both {shown(path)} and {shown(url)} are to be loaded; name one")
        path, url = None, path
    folder = None if path is None else Path(path)
    if url is not None:
        folder = fetch(url, world, folder, print if world.is_main else None)
    assert folder is not None
    return folder, open_checkpoint(folder)


def adopt_options(options: Options, manifest: Manifest) -> list[str]:
    """Take the checkpoint's options where the script set none; return the differences, a line each."""
    return options.adopt(manifest.options, keep=_NEVER_ADOPTED)


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
    sources = {_parent(place) for place in (options.load_dir, options.download_dir) if place}
    here = {_home(str(run.save_dir)), *([_home(store.url)] if store else [])}
    if occupied and not sources & here:
        place, names = occupied[0]
        raise CheckpointError(
            f"{shown(place)} holds checkpoints of an earlier run: {', '.join(names)}; to go on with that "
            f"one, load {shown(join(place, names[-1]))} (checkpoint.load_dir, set_checkpoint_dir); for "
            "this one, save elsewhere (checkpoint.save_dir, set_model_save_dir), or to a new version folder "
            "(checkpoint.new_version, set_new_version)"
        )
    for epoch in range(run.options.train.epochs):  # now, and not after an epoch of training
        check_replaceable(run.save_dir / str(epoch))


def _home(place: str) -> str:
    return place.rstrip("/") if is_url(place) else str(Path(place).resolve())


def _parent(place: str) -> str:
    return _home(parent_of(place if is_url(place) else str(Path(place).resolve())))


def restore(run: Run, path: Path, manifest: Manifest) -> None:
    """Load the whole state of `path` into the run; a collective."""
    options, scalars = run.options, manifest.scalars
    expected: dict[str, Any] = {
        "ranks": (manifest.world_size, run.world.size),
        "classes": (manifest.class_num, run.head.class_num),
        "embedding size": (manifest.emb_size, options.model.emb_size),
        "loss type": (scalars.get("loss_type"), options.head.loss_type),
        "global batch": (
            scalars.get("global_batch"),
            global_batch_size(options, run.world.size),
        ),
    }
    for what, (theirs, mine) in expected.items():
        if theirs != mine:
            raise CheckpointError(
                f"{path} was saved with {what} {theirs}, this run has {mine}; to resume, they must "
                "be the same"
            )
    saved_samples = scalars.get("num_samples")
    if manifest.step_in_epoch and saved_samples != run.num_samples:
        raise CheckpointError(
            f"{path} was saved in the middle of an epoch over {saved_samples} images, the dataset has "
            f"{run.num_samples} now; resume from the end of an epoch, or bring the data back"
        )
    make_momentum(run.network, run.head, run.optimizer, set(manifest.tensors))
    replicated, sharded = collect_tensors(run.network, run.head, run.optimizer, run.rows)
    load_tensors(path, replicated, sharded, run.world)
    if isinstance(run.head, ShardedHead):
        run.head.step = manifest.step  # keys the sampling and the rounding
        before = scalars.get("head_computed_by")
        run.head.computed_by = run.head.resumed_from = None if before is None else str(before)
    run.position = Position(manifest.step, manifest.epoch, manifest.step_in_epoch)
    run.lineage = manifest.lineage


def publish(run: Run, folder: Path, name: str) -> Path:
    """Publish the run's state as `folder/name`; a collective."""
    state = take_state(run, {})
    return save_checkpoint(folder, name, state.tensors, state.sharded, state.manifest, run.world)


def take_state(run: Run, metrics: dict[str, float]) -> Snapshot:
    """Return the run's state, without a copy of it; a collective.

    metrics: what the checkpoint is judged by. Buffers that differ between ranks (batch norm) are made
    equal first.
    """
    equalise_buffers(run.network, run.world.backbone_group)
    replicated, sharded = collect_tensors(run.network, run.head, run.optimizer, run.rows)
    ranks = run.world.size if run.head.is_sharded else 1
    manifest = Manifest(
        plsc_version=__version__,
        step=run.position.step,
        epoch=run.position.epoch,
        step_in_epoch=run.position.step_in_epoch,
        world_size=run.world.size,
        class_num=run.head.class_num,
        emb_size=run.options.model.emb_size,
        class_ranges=[list(pair) for pair in class_ranges(run.head.class_num, ranks)],
        options=without_secrets(run.options.as_dict()),
        scalars={
            METRICS_KEY: metrics,
            "loss_type": run.options.head.loss_type,
            "global_batch": global_batch_size(run.options, run.world.size),
            "num_samples": run.num_samples,
            "head_computed_by": getattr(run.head, "computed_by", None),
        },
        lineage=run.lineage,
    )
    return Snapshot(replicated, sharded, manifest)
