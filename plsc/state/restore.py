"""Restore a run from a checkpoint: exactly on the same number of ranks, up to rounding on another number."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from plsc.checkpoint import Manifest, load_tensors
from plsc.checkpoint.load import OpenCheckpoint
from plsc.checkpoint.manifest import (
    BACKBONE,
    CALLBACK,
    OPTIMIZER,
    Role,
)
from plsc.checkpoint.save import info_of
from plsc.config.option import shown_value
from plsc.data.reader import ReaderLoader
from plsc.errors import CheckpointError
from plsc.heads import ShardedHead
from plsc.optim.optimizers import describe_implementation
from plsc.run.run import Run, global_batch_size
from plsc.state.optimizer import restore_rest
from plsc.state.snapshot import describe_head, own_tensors, seed_generators, take_own
from plsc.state.tensors import NEIGHBOURS, REST, check_counts, collect_tensors, make_state


def restore(run: Run, path: Path, manifest: Manifest) -> list[str]:
    """Load the state of the checkpoint `path` into the run; a collective.

    Returns log lines about the optimizer.
    """
    _check_fits(run, path, manifest)
    scalars = manifest.scalars
    numbers = scalars.get("optimizer_numbers", {})
    make_state(run.network, run.head, run.optimizer, manifest.tensors, numbers)
    tensors = collect_tensors(run.network, run.head, run.optimizer, run.rows)
    fresh = {
        role
        for role, value in tensors.items()
        if ((role.kind == OPTIMIZER and isinstance(value, Tensor)) or role.name == NEIGHBOURS)
        and role.key not in manifest.tensors
    }
    wanted = {role: value for role, value in tensors.items() if role not in fresh and not _is_extra(role)}
    own = own_tensors(run, manifest)
    of_callbacks = {}
    for role, value in run.callbacks.state()[1].items():  # filled in place, if shape and type are those saved
        saved_info = manifest.tensors.get(role.key)
        if saved_info is not None and replace(info_of(role, value), sharded=saved_info.sharded) == saved_info:
            of_callbacks[role] = value
    load_tensors(path, {**wanted, **own, **of_callbacks}, run.world)
    check_counts(path, wanted)
    if isinstance(run.head, ShardedHead):
        run.head.step = manifest.step  # seeds sampling and rounding
        run.head.computed_by = run.head.resumed_from = manifest.head.computed_by
    position = run.position
    position.step, position.updates = manifest.step, scalars.get("updates", manifest.step)
    position.epoch, position.step_in_epoch = manifest.epoch, manifest.step_in_epoch
    if run.scaler is not None and (scale := scalars.get("loss_scaling")) is not None:
        run.scaler.load(scale)
    others = _other_tensors(run, path, manifest, of_callbacks)
    run.callbacks.load_state(scalars.get("callbacks", {}), {**others, **of_callbacks})
    length = scalars.get("steps_per_epoch")
    loader = run.data.loader
    if isinstance(loader, ReaderLoader) and manifest.epoch and length is not None:
        loader.expect_steps(length)
    if ":" in run.options.optim.optimizer:
        restore_rest(run, scalars, {role.name: one for role, one in others.items() if role.kind == OPTIMIZER})
    if extra := {role.name: one for role, one in others.items() if role.kind == BACKBONE}:
        run.network.load_state_dict(extra, strict=False)
    if not take_own(run, own):
        seed_generators(run.world, run.options.train.seed, manifest.step)
    return _lines_about_optimizer(run, scalars, {role.of for role in fresh if role.kind == OPTIMIZER})


def _is_extra(role: Role) -> bool:
    """Return whether a tensor is from a module's ``get_extra_state``, and goes to its ``set_extra_state``."""
    return role.kind == BACKBONE and role.name.rpartition(".")[2] == "_extra_state"


def _other_tensors(run: Run, path: Path, manifest: Manifest, loaded: Collection[Role]) -> dict[Role, Tensor]:
    """Return the tensors that the parts of this run do not have yet, or do not give away."""
    names, roles = run.callbacks.names, {info.role for info in manifest.tensors.values()}
    of_callbacks = {role for role in roles - {*loaded} if role.kind == CALLBACK and role.of in names}
    wanted = of_callbacks | {role for role in roles if role.of == REST or _is_extra(role)}
    if not wanted:
        return {}
    with OpenCheckpoint(path, manifest) as opened:
        tensors = opened.select({role.kind for role in wanted})
        return {role: tensors[role].read() for role in wanted}


def _lines_about_optimizer(run: Run, scalars: dict[str, Any], fresh: set[str]) -> list[str]:
    lines = []
    here, before = describe_implementation(run.optimizer), scalars.get("optimizer_computed_by")
    if before not in (None, here):
        lines.append(
            f"the optimizer step is computed by {here}, but by {before} in the checkpoint: results may "
            "differ by rounding"
        )
    if fresh:
        lines.append(f"the checkpoint has no optimizer state for {len(fresh)} parameters: it is initialised")
    return lines


def _check_fits(run: Run, path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError for another network, head, optimizer or batch, or within an epoch other data."""
    options, scalars = run.options, manifest.scalars
    optimizer, before, now = type(run.optimizer).__name__, manifest.head, describe_head(run)
    expected: dict[str, Any] = {
        "number of classes": (before.class_num, now.class_num),
        "loss type": (before.loss_type, now.loss_type),
        "embedding size": (manifest.emb_size, options.model.emb_size),
        "optimizer": (scalars.get("optimizer", optimizer), optimizer),
        "global batch": (scalars.get("global_batch"), global_batch_size(options, run.world.size)),
        "updates": (min(scalars.get("updates", 0), manifest.step), scalars.get("updates", 0)),
        "network": (manifest.options.get("model", {}).get("name"), options.model.name),
    }
    saved = {info.role.name: info.shape for info in manifest.tensors.values() if info.role.kind == BACKBONE}
    own = {name: tuple(value.shape) for name, value in run.network.state_dict().items()}
    names = [name for name in own | saved if not _is_extra(Role(BACKBONE, name))]
    odd = [name for name in names if saved.get(name) != own.get(name)]
    if odd and expected["network"][0] == expected["network"][1]:
        expected["network"] = tuple(f"{odd[0]} of shape {shapes.get(odd[0])}" for shapes in (saved, own))
    elif not odd:
        del expected["network"]
    if manifest.step_in_epoch:
        expected["images in the interrupted epoch"] = before.num_samples, now.num_samples
    if manifest.step_in_epoch and run.data.is_of_ranks:
        expected["ranks with their own data in the epoch:"] = manifest.world_size, run.world.size
    for what, (theirs, mine) in expected.items():
        if theirs != mine:
            raise CheckpointError(
                f"{path} was saved with {what} {shown_value(theirs)}, but this run has {shown_value(mine)}; "
                "use the saved value to resume, or load only the weights that fit with model.pretrained"
            )
