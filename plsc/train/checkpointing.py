"""The run's state, to a checkpoint and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from plsc.checkpoint import (
    Manifest,
    check_replaceable,
    clean_leftovers,
    list_checkpoints,
    load_tensors,
    prune,
    read_manifest,
    save_checkpoint,
)
from plsc.config import Options
from plsc.errors import CheckpointError, OptionError
from plsc.heads import ShardedHead
from plsc.models.sync_batch_norm import equalise_buffers
from plsc.parallel.shard import class_ranges
from plsc.train.build import Run, global_batch_size
from plsc.train.state import Best, Position, collect_tensors, make_momentum
from plsc.version import __version__

# A checkpoint does not decide where the next run reads it from, nor on which device that run is.
_NEVER_ADOPTED = frozenset(
    {
        "checkpoint.load_dir",
        "runtime.device",
        "runtime.backend",
        "runtime.timeout",
        "runtime.cpu_threads",
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


def open_load_dir(options: Options) -> tuple[Path, Manifest]:
    """Return `checkpoint.load_dir` and its manifest; OptionError if it is not set."""
    if options.checkpoint.load_dir is None:
        raise OptionError(
            "there is no checkpoint to load; call set_checkpoint_dir, or give --checkpoint.load_dir"
        )
    path = Path(options.checkpoint.load_dir)
    return path, open_checkpoint(path)


def adopt_options(options: Options, manifest: Manifest) -> list[str]:
    """Take the checkpoint's options where the script set none; return the differences, a line each."""
    return options.adopt(manifest.options, keep=_NEVER_ADOPTED)


def prepare_save_dir(run: Run) -> None:
    """Clear what a killed run left half done; refuse to mix a run with anything else in the folder."""
    found = None
    if run.world.is_main:
        clean_leftovers(run.save_dir)
        found = [folder.name for folder, _ in list_checkpoints(run.save_dir)]
    found = run.world.broadcast_object(found)
    load_dir = run.options.checkpoint.load_dir
    resumes_here = load_dir and Path(load_dir).resolve().parent == run.save_dir.resolve()
    if found and not resumes_here:
        raise CheckpointError(
            f"{run.save_dir} holds checkpoints of an earlier run: {', '.join(found)}; to go on with that "
            f"one, load {run.save_dir / found[-1]} (checkpoint.load_dir, set_checkpoint_dir); for this "
            "one, save elsewhere (checkpoint.save_dir, set_model_save_dir)"
        )
    for epoch in range(run.options.train.epochs):  # now, and not after an epoch of training
        check_replaceable(run.save_dir / str(epoch))


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
    run.best = _read_best(path, scalars.get("best"))
    run.lineage = manifest.lineage


def _read_best(path: Path, saved: Any) -> Best:
    """Return the best checkpoint so far; one that retention has removed is forgotten."""
    if not isinstance(saved, dict) or set(saved) != {"name", "metric", "value"}:
        raise CheckpointError(f"the manifest of {path} is damaged: 'best' is {saved!r}")
    name, metric, value = saved["name"], saved["metric"], saved["value"]
    is_plain = name is None or (isinstance(name, str) and Path(name).name == name)
    if not (is_plain and isinstance(metric, str) and isinstance(value, (int, float))):
        raise CheckpointError(f"the manifest of {path} is damaged: 'best' is {saved!r}")
    return Best(name, metric, float(value))


def save(run: Run, name: str) -> Path:
    """Publish the run's state as `save_dir/name`, then remove the oldest beyond the limit; a collective."""
    path = publish(run, run.save_dir, name)
    if run.world.is_main:
        best = [run.save_dir / run.best.name] if run.best.name else []
        prune(run.save_dir, run.options.checkpoint.keep_last, protect=[path, *best])
    run.world.barrier()
    return path


def publish(run: Run, folder: Path, name: str) -> Path:
    """Publish the run's state as `folder/name`; a collective.

    Buffers that differ between ranks (batch norm) are made equal first.
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
        options=run.options.as_dict(),
        scalars={
            "best": asdict(run.best),
            "loss_type": run.options.head.loss_type,
            "global_batch": global_batch_size(run.options, run.world.size),
            "num_samples": run.num_samples,
            "head_computed_by": getattr(run.head, "computed_by", None),
        },
        lineage=run.lineage,
    )
    return save_checkpoint(folder, name, replicated, sharded, manifest, run.world)
