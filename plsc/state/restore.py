"""Restore a run from a checkpoint: exactly on the same number of ranks, up to rounding on another number."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from plsc.checkpoint import Manifest, load_tensors
from plsc.checkpoint.load import OpenCheckpoint
from plsc.checkpoint.manifest import (
    BACKBONE,
    CALLBACK,
    CLASS_NAMES,
    CLASS_OPTIMIZER,
    CLASS_WEIGHTS,
    OPTIMIZER,
    STATISTICS,
    Checker,
    Role,
)
from plsc.checkpoint.save import info_of
from plsc.config.option import shown_value
from plsc.data.reader import ReaderLoader
from plsc.errors import CheckpointError
from plsc.heads import ShardedHead
from plsc.optim.loss_scaling import COUNTS, LossScaler
from plsc.optim.optimizers import describe_implementation
from plsc.run.run import Run, global_batch_size
from plsc.state.optimizer import restore_rest
from plsc.state.snapshot import describe_heads, own_tensors, seed_generators, take_own
from plsc.state.tensors import NEIGHBOURS, REST, check_counts, collect_tensors, make_state

_HOW_TO_CHANGE = {
    "number of classes": ", or change the classes with plsc checkpoint classes",
    "embedding size": ", or load only the weights that fit with set_pretrained()",
    "loss type": ", or load only the weights that fit with set_pretrained()",
    "optimizer": ", or load only the weights with set_pretrained()",
}


def restore(run: Run, path: Path, manifest: Manifest) -> list[str]:
    """Load the state of the checkpoint `path` into the run; a collective.

    Of several heads, those in both the run and the checkpoint are loaded. Returns log lines about the others
    and about the optimizer.
    """
    match = _match_heads(run, path, manifest)
    _check_fits(run, path, manifest)
    scalars = manifest.scalars
    numbers = Checker(str(path)).mapping(scalars.get("optimizer_numbers", {}), "the optimizer's numbers")
    saved = {key: info.role for key, info in manifest.tensors.items()}
    make_state(
        run.network,
        run.heads,
        run.optimizer,
        {key: info for key, info in manifest.tensors.items() if match.is_kept(key, saved)},
        {of: state for of, state in numbers.items() if match.is_kept(of, saved)},
    )
    tensors = collect_tensors(run.network, run.heads, run.optimizer)
    fresh = {
        role
        for role, value in tensors.items()
        if ((role.kind == OPTIMIZER and isinstance(value, Tensor)) or role.name == NEIGHBOURS)
        and role.key not in manifest.tensors
    }
    here = {role.key: role for role in tensors}
    wanted = {
        role: value
        for role, value in tensors.items()
        if role not in fresh and match.is_kept(role.key, here) and not _is_extra(role)
    }
    own = own_tensors(run, manifest)
    of_callbacks = {}
    for role, value in run.callbacks.state()[1].items():  # filled in place, if shape and type are those saved
        saved_info = manifest.tensors.get(role.key)
        if saved_info is not None and replace(info_of(role, value), sharded=saved_info.sharded) == saved_info:
            of_callbacks[role] = value
    try:
        load_tensors(path, {**wanted, **own, **of_callbacks}, run.world)
    except CheckpointError as error:
        lines = [line for line in run.options.differences if line.startswith("head.")]
        raise CheckpointError("; ".join([str(error), *lines])) from error
    check_counts(path, wanted)
    _restore_heads(run, path, manifest, match)
    _restore_position(run, path, manifest)
    if run.scaler is not None and scalars.get("loss_scaling") is not None:
        restore_scaler(run.scaler, scalars["loss_scaling"], Checker(str(path)))
    values = Checker(str(path)).mapping(scalars.get("callbacks", {}), "the state of callbacks")
    others = _other_tensors(run, path, manifest, of_callbacks)
    run.callbacks.load_state(values, {**others, **of_callbacks})
    length = scalars.get("steps_per_epoch")
    loader = run.data.loader
    if isinstance(loader, ReaderLoader) and manifest.epoch and length is not None:
        loader.expect_steps(Checker(str(path)).integer(length, "the steps of an epoch"))
    if ":" in run.options.optim.optimizer:
        restore_rest(run, scalars, {role.name: one for role, one in others.items() if role.kind == OPTIMIZER})
    if extra := {role.name: one for role, one in others.items() if role.kind == BACKBONE}:
        run.network.load_state_dict(extra, strict=False)
    if not take_own(run, own):
        seed_generators(run.world, run.options.train.seed, manifest.step)
    return [
        *match.lines(),
        *_lines_about_optimizer(run, scalars, {role.of for role in fresh if role.kind == OPTIMIZER}),
    ]


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


def _restore_position(run: Run, path: Path, manifest: Manifest) -> None:
    check, position = Checker(str(path)), run.position
    updates = check.integer(manifest.scalars.get("updates", manifest.step), "the count of updates")
    if updates > manifest.step:
        raise check.wrong(f"it counts {updates} updates in {manifest.step} steps")
    position.step, position.updates = manifest.step, updates
    position.epoch, position.step_in_epoch = manifest.epoch, manifest.step_in_epoch


def _restore_heads(run: Run, path: Path, manifest: Manifest, match: HeadMatch) -> None:
    """Restore the step count of the heads, which seeds sampling and rounding, and their backend."""
    for name, head in run.heads.by_name.items():
        if not isinstance(head, ShardedHead):
            continue
        head.step = manifest.step
        if not (match.dropped or match.added):  # other datasets change the batch sizes of all heads
            head.computed_by = head.resumed_from = manifest.heads[name].computed_by


def _check_fits(run: Run, path: Path, manifest: Manifest) -> None:
    options, scalars = run.options, manifest.scalars
    optimizer = type(run.optimizer).__name__
    expected: dict[str, Any] = {
        "embedding size": (manifest.emb_size, options.model.emb_size),
        "optimizer": (scalars.get("optimizer", optimizer), optimizer),
        "global batch": (scalars.get("global_batch"), global_batch_size(options, run.world.size)),
    }
    for what, (theirs, mine) in expected.items():
        if theirs != mine:
            raise CheckpointError(
                f"{path} was saved with {what} {theirs}, but this run has {mine}; use the saved value to "
                f"resume{_HOW_TO_CHANGE.get(what, '')}"
            )
    _check_network(run, path, manifest)
    if not manifest.step_in_epoch:
        return
    if run.data.is_of_ranks and manifest.world_size != run.world.size:
        raise CheckpointError(
            f"{path} was saved in the middle of an epoch by {manifest.world_size} ranks, each with its own "
            "data (order 'rank_files', or a reader that shards itself), but this run has "
            f"{run.world.size} ranks; start {manifest.world_size} ranks, or resume from the end of an epoch"
        )


def _check_network(run: Run, path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError if the network has other tensors than the saved network, or other shapes."""
    saved = {info.role.name: info.shape for info in manifest.tensors.values() if info.role.kind == BACKBONE}
    own = {name: tuple(value.shape) for name, value in run.network.state_dict().items()}
    for name in own | saved:
        before, here = saved.get(name), own.get(name)
        if before == here or _is_extra(Role(BACKBONE, name)):
            continue
        model = manifest.options.get("model")
        networks = (model.get("name") if isinstance(model, dict) else None, run.options.model.name)
        theirs, mine = (f"network {shown_value(network)}" for network in networks)
        if networks[0] == networks[1]:
            theirs, mine = (
                f"a network without {name}" if shape is None else f"{name} of shape {list(shape)}"
                for shape in (before, here)
            )
        raise CheckpointError(
            f"{path} was saved with {theirs}, but this run has {mine}; use the saved network to resume, or "
            "load only the weights that fit with set_pretrained()"
        )


@dataclass(frozen=True)
class HeadMatch:
    """Heads that only the checkpoint has (dropped) and that only the run has (added)."""

    dropped: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return log lines about these heads."""
        lines = []
        if self.dropped:
            lines.append(
                f"datasets removed: {', '.join(self.dropped)}; checkpoints of this run will not contain "
                "their heads"
            )
        if self.added:
            lines.append(f"datasets added: {', '.join(self.added)}; their heads start from scratch")
        return lines

    def is_kept(self, key: str, roles: Mapping[str, Role]) -> bool:
        """Return whether a tensor belongs to no head, or to a head that run and checkpoint both have.

        roles: roles of all tensors of the run or of the checkpoint, by key.
        """
        role = roles.get(key)
        if role is not None and role.kind in (OPTIMIZER, CLASS_OPTIMIZER):
            role = roles.get(role.of)
        is_of_head = role is not None and role.kind in (CLASS_WEIGHTS, STATISTICS, CLASS_NAMES)
        return not is_of_head or role is None or role.of not in (*self.dropped, *self.added)


def _match_heads(run: Run, path: Path, manifest: Manifest) -> HeadMatch:
    """Return the heads that are not in both. Raises CheckpointError if a common head or its data changed."""
    saved, here = manifest.heads, describe_heads(run)
    match = HeadMatch([n for n in saved if n not in here], [n for n in here if n not in saved])
    if len(match.added) == len(here):
        raise CheckpointError(
            f"{path} has heads of the datasets {', '.join(saved)}, but this run only has others: "
            f"{', '.join(match.added)}; keep at least one of them under its name, or use set_pretrained()"
        )
    for name, before in saved.items():
        if name not in here:
            continue
        now, of = here[name], f" for the dataset {name}" if name else ""
        compared: dict[str, tuple[Any, Any]] = {
            "number of classes": (before.class_num, now.class_num),
            "loss type": (before.loss_type, now.loss_type),
        }
        for what, (theirs, mine) in compared.items():
            if theirs != mine:
                raise CheckpointError(
                    f"{path} was saved with {what} {theirs}{of}, but this run has {mine}; use the saved "
                    f"value to resume{_HOW_TO_CHANGE[what]}"
                )
        if manifest.step_in_epoch and before.num_samples != now.num_samples:
            raise CheckpointError(
                f"{path} was saved in the middle of an epoch of {before.num_samples} images{of}, but the "
                f"dataset now has {now.num_samples}; resume from the end of an epoch, or restore the dataset"
            )
    return match


def restore_scaler(scaler: LossScaler, saved: object, check: Checker) -> None:
    """Restore the loss scale from a checkpoint. Raises CheckpointError if its state is damaged."""
    values = check.mapping(saved, "the state of the loss scaling")
    scale = values.get("scale")
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 1 <= scale < 2**53:
        raise check.wrong(f"the loss scale is {str(scale)[:80]}, expected a number of at least 1")
    counts = {name: check.integer(check.item(values, name), f"{name} of the loss scaling") for name in COUNTS}
    scaler.load(float(scale), counts)
