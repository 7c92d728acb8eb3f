"""Restore a run from a checkpoint: exactly on the same number of ranks, up to rounding on another number."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
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
from plsc.config.option import is_finite_number, shown_value
from plsc.data.reader import ReaderLoader
from plsc.errors import CheckpointError
from plsc.heads import ShardedHead
from plsc.optim.loss_scaling import COUNTS, LossScaler
from plsc.optim.optimizers import FULL_RATE, describe_implementation
from plsc.run.run import Run, global_batch_size
from plsc.state.snapshot import describe_heads, own_tensors, seed_generators, take_own
from plsc.state.tensors import NEIGHBOURS, check_counts, collect_tensors, make_state

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
    numbers = {of: _optimizer_numbers(path, state) for of, state in numbers.items()}
    saved = {key: info.role for key, info in manifest.tensors.items()}
    make_state(
        run.network,
        run.heads,
        run.optimizer,
        {key: info for key, info in manifest.tensors.items() if match.is_kept(key, saved)},
        {of: state for of, state in numbers.items() if match.is_kept(of, saved)},
    )
    _restore_groups(run, path, scalars.get("optimizer_groups", []))
    tensors = collect_tensors(run.network, run.heads, run.optimizer)
    fresh = {
        role
        for role, value in tensors.items()
        if ((role.kind == OPTIMIZER and isinstance(value, Tensor)) or role.name == NEIGHBOURS)
        and role.key not in manifest.tensors
    }
    here = {role.key: role for role in tensors}
    wanted = {
        role: value for role, value in tensors.items() if role not in fresh and match.is_kept(role.key, here)
    }
    own = own_tensors(run, manifest)
    of_callbacks = {
        role: value for role, value in run.callbacks.state()[1].items() if role.key in manifest.tensors
    }
    load_tensors(path, {**wanted, **own, **of_callbacks}, run.world)
    check_counts(path, wanted)
    _restore_heads(run, path, manifest, match)
    _restore_position(run, path, manifest)
    if run.scaler is not None and scalars.get("loss_scaling") is not None:
        restore_scaler(run.scaler, scalars["loss_scaling"], Checker(str(path)))
    values = Checker(str(path)).mapping(scalars.get("callbacks", {}), "the state of callbacks")
    run.callbacks.load_state(values, {**_other_tensors(run, path, manifest, of_callbacks), **of_callbacks})
    length = scalars.get("steps_per_epoch")
    loader = run.data.loader
    if isinstance(loader, ReaderLoader) and manifest.epoch and length is not None:
        loader.expect_steps(Checker(str(path)).integer(length, "the steps of an epoch"))
    if not take_own(run, own):
        seed_generators(run.world, run.options.train.seed, manifest.step)
    return [
        *match.lines(),
        *_lines_about_optimizer(run, scalars, {role.of for role in fresh if role.kind == OPTIMIZER}),
    ]


def _other_tensors(run: Run, path: Path, manifest: Manifest, loaded: Collection[Role]) -> dict[Role, Tensor]:
    """Return the tensors of this run's callbacks that `state_dict` does not return yet."""
    names = run.callbacks.names
    wanted = {
        info.role
        for info in manifest.tensors.values()
        if info.role.kind == CALLBACK and info.role.of in names and info.role not in loaded
    }
    if not wanted:
        return {}
    with OpenCheckpoint(path, manifest) as opened:
        tensors = opened.select((CALLBACK,))
        return {role: tensors[role].read() for role in wanted}


def _restore_groups(run: Run, path: Path, saved: Any) -> None:
    """Restore the numbers in the parameter groups of a custom optimizer; torch's optimizers keep none."""
    groups = run.optimizer.param_groups
    if not isinstance(saved, list) or len(saved) not in (0, len(groups)):
        count = len(saved) if isinstance(saved, list) else "no"
        raise CheckpointError(
            f"{path} has optimizer settings of {count} parameter groups, but this run has {len(groups)}; use "
            "the parameter groups that were saved"
        )
    if ":" not in run.options.optim.optimizer:
        return
    for group, changed in zip(groups, saved, strict=False):
        for name, value in _optimizer_numbers(path, changed).items():
            if name in group and name not in ("lr", FULL_RATE, "params"):
                group[name] = value


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
    """Raise CheckpointError if the network has a tensor that the saved network did not have."""
    saved = {info.role.name: info.shape for info in manifest.tensors.values() if info.role.kind == BACKBONE}
    for name, value in run.network.state_dict().items():
        before, here = saved.get(name), tuple(value.shape)
        if before == here:
            continue
        model = manifest.options.get("model")
        networks = (model.get("name") if isinstance(model, dict) else None, run.options.model.name)
        theirs, mine = (f"network {shown_value(network)}" for network in networks)
        if networks[0] == networks[1]:
            theirs = f"{name} of shape {list(before)}" if before else f"a {theirs} without {name}"
            mine = f"{name} of shape {list(here)}"
        raise CheckpointError(
            f"{path} was saved with {theirs}, but this run has {mine}; use the saved network to resume, or "
            "load only the weights that fit with set_pretrained()"
        )


def _optimizer_numbers(path: Path, saved: Any) -> dict[str, float]:
    is_sound = isinstance(saved, dict) and all(
        isinstance(value, bool) or is_finite_number(value) for value in saved.values()
    )
    if not is_sound:
        raise CheckpointError(
            f"the manifest of {path} is damaged: the optimizer state has values that are not numbers; choose "
            "another checkpoint"
        )
    return saved


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
