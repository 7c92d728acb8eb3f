"""A checkpoint, back into a run: on the same ranks bit for bit, on another number of them up to rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from plsc.checkpoint import Manifest, load_tensors
from plsc.checkpoint.manifest import OPTIMIZER, Checker
from plsc.config import Config, Options, find_option
from plsc.config.option import is_finite_number
from plsc.data.reader import ReaderLoader
from plsc.errors import CheckpointError, OptionError
from plsc.heads import ShardedHead
from plsc.heads.joint import each_head
from plsc.models import BaseModel
from plsc.optim.optimizers import FULL_RATE, describe_implementation
from plsc.train.adopt import (
    HeadMatch,
    adopt,
    check_batch,
    check_data_sets,
    match_heads,
    saved_heads,
)
from plsc.train.build import Run, global_batch_size
from plsc.train.build_head import with_margin
from plsc.train.precision import restore_scaler
from plsc.train.randomness import seed_generators
from plsc.train.snapshot import own_tensors, take_own
from plsc.train.state import (
    Position,
    check_counts,
    collect_tensors,
    make_state,
)

_HOW_TO_CHANGE = {
    "classes": " (plsc checkpoint classes changes them)",
    "embedding size": "; set_pretrained takes the weights that fit",
    "loss type": "; set_pretrained takes the weights that fit",
    "optimizer": "; set_pretrained takes the weights, and the optimizer begins afresh",
}


def resolve_run(
    options: Options,
    checkpoint: tuple[Path, Manifest] | None,
    ranks: int,
    model: BaseModel | None = None,
) -> Config:
    """Return the configuration of a run; of one that resumes a checkpoint with what that decides.

    model: the network, where the script gives one. Raises OptionError, and CheckpointError for a checkpoint
    that is damaged or of other data.
    """
    if checkpoint is None:
        return with_margin(options.resolve())
    path, manifest = checkpoint
    config = adopt(options, path, manifest, model, "run")
    check_data_sets(config, path, manifest)
    steps = manifest.scalars.get("steps_per_epoch")
    if config.data.datasets and "train.epoch_steps" not in config.explicit and steps is not None:
        # With other data sets, too: epochs and schedule are unchanged.
        config = config.changed(
            {"train.epoch_steps": find_option("train.epoch_steps").saved(steps)}
        )
    return with_margin(_keep_global_batch(config, path, manifest, ranks))


def _keep_global_batch(options: Config, path: Path, manifest: Manifest, ranks: int) -> Config:
    """Return the configuration whose steps have as many samples as the checkpoint's, on any number of ranks.

    A script that sets the batch per rank that it set before may be started on any number of ranks; one that
    sets another must come to the same product. Raises OptionError for that, CheckpointError for a damaged
    manifest.
    """
    saved = Checker(str(path)).integer(manifest.scalars.get("global_batch"), "the global batch")
    if saved < ranks:
        raise OptionError(
            f"{path} was trained with {saved} images a step, too few for {ranks} ranks; start fewer"
        )
    check_batch(options, path, saved // ranks)
    train = options.train
    if "train.global_batch_size" in options.explicit and train.global_batch_size != saved:
        raise OptionError(
            f"train.global_batch_size is {train.global_batch_size}, but {path} was trained with {saved} "
            "images a step, which a resumed run keeps; leave it out"
        )
    product = train.batch_size * ranks
    if product == saved:
        return options
    before = manifest.options.get("train", {})
    is_the_same = isinstance(before, dict) and before.get("batch_size") == train.batch_size
    if "train.batch_size" in options.explicit and not is_the_same:
        raise OptionError(
            f"train.batch_size {train.batch_size} on {ranks} rank{'s' * (ranks > 1)} makes {product}, but "
            f"{path} was trained with {saved} images a step, which a resumed run keeps; leave it out"
        )
    kept = replace(
        options.changed({"train.global_batch_size": saved}),
        adopted=options.adopted | {"train.global_batch_size"},
    )
    if ranks == manifest.world_size:
        return kept
    share = (
        f"{saved // ranks}" if saved % ranks == 0 else f"{saved // ranks} or {saved // ranks + 1}"
    )
    line = (
        f"ranks: {ranks} here, {manifest.world_size} in the checkpoint; a step keeps its {saved} images, "
        f"{share} a rank"
    )
    return replace(kept, differences=(*kept.differences, line))


def restore(run: Run, path: Path, manifest: Manifest) -> list[str]:
    """Load the whole state of `path` into the run; a collective.

    Of several heads those that the run and the checkpoint both have; returns lines about the others.
    """
    match = match_heads(run, path, manifest)
    _check_fits(run, path, manifest)
    scalars = manifest.scalars
    numbers = Checker(str(path)).mapping(
        scalars.get("optimizer_numbers", {}), "the optimizer's numbers"
    )
    numbers = {of: _optimizer_numbers(path, found) for of, found in numbers.items()}
    saved = {key: info.role for key, info in manifest.tensors.items()}
    make_state(
        run.network,
        run.head,
        run.optimizer,
        {key: info for key, info in manifest.tensors.items() if match.is_kept(key, saved)},
        {of: found for of, found in numbers.items() if match.is_kept(of, saved)},
    )
    _restore_groups(run, path, scalars.get("optimizer_groups", []))
    tensors = collect_tensors(run.network, run.head, run.optimizer, run.rows)
    fresh = {
        role
        for role, value in tensors.items()
        if role.kind == OPTIMIZER and isinstance(value, Tensor) and role.key not in manifest.tensors
    }
    here = {role.key: role for role in tensors}
    wanted = {
        role: value
        for role, value in tensors.items()
        if role not in fresh and match.is_kept(role.key, here)
    }
    own = own_tensors(run, manifest)
    load_tensors(path, {**wanted, **own}, run.world)
    check_counts(path, wanted)
    _restore_heads(run, path, manifest, match)
    run.position = _position(path, manifest)
    if run.scaler is not None and scalars.get("loss_scaling") is not None:
        restore_scaler(run.scaler, scalars["loss_scaling"], Checker(str(path)))
    run.lineage = manifest.lineage
    run.resumed_from = path
    length = scalars.get("steps_per_epoch")
    if isinstance(run.loader, ReaderLoader) and manifest.epoch and length is not None:
        run.loader.expect_steps(Checker(str(path)).integer(length, "the steps of an epoch"))
    if not take_own(run, own):
        seed_generators(run.world, run.options.train.seed, manifest.step)
    return [*match.lines(), *_lines_about_optimizer(run, scalars, {role.of for role in fresh})]


def _restore_groups(run: Run, path: Path, saved: Any) -> None:
    """Give the groups of a custom optimizer the numbers that training had changed; torch's change none."""
    groups = run.optimizer.param_groups
    if not isinstance(saved, list) or len(saved) not in (0, len(groups)):
        count = len(saved) if isinstance(saved, list) else "no"
        raise CheckpointError(
            f"{path} has numbers of the optimizer for {count} groups of parameters, this run has "
            f"{len(groups)}; group them as they were"
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
            f"the optimizer's step is computed by {here} here, {before} in the checkpoint: the last "
            "bits differ"
        )
    if fresh:
        lines.append(
            f"the checkpoint has no state of the optimizer for {len(fresh)} parameters: theirs begins afresh"
        )
    return lines


def _position(path: Path, manifest: Manifest) -> Position:
    check = Checker(str(path))
    updates = check.integer(manifest.scalars.get("updates", manifest.step), "the count of updates")
    if updates > manifest.step:
        raise check.wrong(f"{updates} updates are more than the {manifest.step} steps")
    return Position(manifest.step, manifest.epoch, manifest.step_in_epoch, updates)


def _restore_heads(run: Run, path: Path, manifest: Manifest, match: HeadMatch) -> None:
    """Give the heads the count of steps, which keys sampling and rounding, and what computed them."""
    saved = saved_heads(path, manifest) or {}
    for name, head, _ in each_head(run.head, run.rows):
        if not isinstance(head, ShardedHead):
            continue
        head.step = manifest.step
        before = manifest.scalars.get("head_computed_by")
        if run.sets:
            before = saved.get(name, {}).get("computed_by")
        if not (match.dropped or match.added):  # then the batches of the heads are other ones
            head.computed_by = head.resumed_from = None if before is None else str(before)


def _check_fits(run: Run, path: Path, manifest: Manifest) -> None:
    options, scalars = run.options, manifest.scalars
    optimizer = type(run.optimizer).__name__
    expected: dict[str, Any] = {
        "embedding size": (manifest.emb_size, options.model.emb_size),
        "optimizer": (scalars.get("optimizer", optimizer), optimizer),
        "global batch": (
            scalars.get("global_batch"),
            global_batch_size(options, run.world.size),
        ),
    }
    if not run.sets:
        expected = {
            "classes": (manifest.class_num, run.head.class_num),
            "loss type": (scalars.get("loss_type"), options.head.loss_type),
            **expected,
        }
    for what, (theirs, mine) in expected.items():
        if theirs != mine:
            raise CheckpointError(
                f"{path} was saved with {what} {theirs}, this run has {mine}; to resume, they must "
                f"be the same{_HOW_TO_CHANGE.get(what, '')}"
            )
    if not manifest.step_in_epoch or run.sets:  # of several data sets, match_heads has looked
        return
    saved_samples = scalars.get("num_samples")
    if saved_samples != run.num_samples:
        raise CheckpointError(
            f"{path} was saved in the middle of an epoch over {saved_samples} images, the dataset has "
            f"{run.num_samples} now; resume from the end of an epoch, or bring the data back"
        )
    if run.is_data_of_ranks and manifest.world_size != run.world.size:
        raise CheckpointError(
            f"{path} was saved in the middle of an epoch by {manifest.world_size} ranks that each read data "
            f"of their own (order 'rank_files', or a reader that shards itself); {run.world.size} cannot "
            f"go on there; start {manifest.world_size} ranks, or resume from the end of an epoch"
        )


def _optimizer_numbers(path: Path, saved: Any) -> dict[str, float]:
    is_sound = isinstance(saved, dict) and all(
        isinstance(value, bool) or is_finite_number(value) for value in saved.values()
    )
    if not is_sound:
        raise CheckpointError(
            f"the manifest of {path} is damaged: the optimizer's numbers are no numbers; "
            "choose another checkpoint"
        )
    return saved
