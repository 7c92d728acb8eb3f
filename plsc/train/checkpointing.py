"""The run's state, to a checkpoint; `plsc.train.resume` brings it back."""

from __future__ import annotations

from pathlib import Path

from plsc.checkpoint import (
    Manifest,
    check_replaceable,
    clean_leftovers,
    list_checkpoints,
    prune,
    read_manifest,
    save_checkpoint,
)
from plsc.config import Options
from plsc.errors import CheckpointError
from plsc.parallel.shard import class_ranges
from plsc.train.build import Run
from plsc.train.snapshot import scalars_to_save, tensors_to_save
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
    load_dir = run.resumed_from
    resumes_here = load_dir and load_dir.resolve().parent == run.save_dir.resolve()
    if found and not resumes_here:
        raise CheckpointError(
            f"{run.save_dir} holds checkpoints of an earlier run: {', '.join(found)}; to go on with that "
            f"one, load {run.save_dir / found[-1]} (checkpoint.load_dir, set_checkpoint_dir); for this "
            "one, save elsewhere (checkpoint.save_dir, set_model_save_dir)"
        )
    for epoch in range(run.options.train.epochs):  # now, and not after an epoch of training
        check_replaceable(run.save_dir / str(epoch))


def save(run: Run, name: str) -> Path:
    """Publish the run's state as `save_dir/name`, then remove the oldest beyond the limit; a collective."""
    path = publish(run, run.save_dir, name)
    if run.world.is_main:
        best = [run.save_dir / run.best.name] if run.best.name else []
        prune(run.save_dir, run.options.checkpoint.keep_last, protect=[path, *best])
    run.world.barrier()
    return path


def publish(run: Run, folder: Path, name: str) -> Path:
    """Publish the run's state as `folder/name`, and change nothing of it; a collective."""
    replicated, sharded = tensors_to_save(run)
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
        scalars=scalars_to_save(run),
    )
    return save_checkpoint(folder, name, replicated, sharded, manifest, run.world)
