"""What a checkpoint decides of a configuration and of several heads, before memory is taken for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from plsc.checkpoint import Manifest
from plsc.checkpoint.importers.matching import shorten
from plsc.checkpoint.load import check_files
from plsc.checkpoint.manifest import (
    BACKBONE,
    CLASS_NAMES,
    CLASS_OPTIMIZER,
    CLASS_WEIGHTS,
    HEADS_KEY,
    OPTIMIZER,
    STATISTICS,
    Checker,
    Role,
)
from plsc.config import Config, Options
from plsc.config.data import is_name
from plsc.errors import CheckpointError, OptionError
from plsc.heads.joint import JointHead
from plsc.models import BaseModel, build_model
from plsc.models.base_model import harmless_arguments
from plsc.models.registry import TIMM, TORCHVISION
from plsc.parallel.collectives import class_ranges
from plsc.train.build import Run

ARGUMENTS_KEY = "model_arguments"  # of the manifest's scalars
_LARGEST_BATCH = 2**30  # numbers in the images of a rank's batch


def adopt(
    options: Options,
    path: Path,
    manifest: Manifest,
    model: BaseModel | None,
    use: Literal["model", "run"],
) -> Config:
    """Return the configuration of a run that uses a checkpoint, or its network.

    model: the network, where the script gives one. Raises CheckpointError for a checkpoint that is damaged,
    that contradicts itself, or that names code which the script does not name.
    """
    config = options.resolve(manifest.options, use)
    name = config.model.name
    if model is None and ":" in name:
        arguments = manifest.scalars.get(ARGUMENTS_KEY, {})
        if arguments is None:
            raise CheckpointError(
                f"{path} could not keep the arguments that {name} was made with; call set_model with an "
                "instance of it"
            )
        config = replace(config, arguments=harmless_arguments(arguments))
    is_other = any(line.startswith("model.name:") for line in config.differences)
    if model is None and not is_other and name.startswith((TORCHVISION, TIMM)):
        _check_neck(name, path, manifest)
    check_files(path, manifest)
    _check_head(config, path, manifest)
    # A network that the script chooses is compared when it is loaded.
    is_chosen = any(line.startswith("model.") for line in config.differences)
    if model is None and not is_chosen and any(one.startswith("model.") for one in config.adopted):
        _check_network(config, path, manifest)
    if use == "model":
        check_batch(config, path, config.train.test_batch_size)
    return config


def check_batch(config: Config, path: Path, images: int) -> None:
    """Raise CheckpointError if a checkpoint decides on batches per rank that take gigabytes."""
    sizes = {"train.batch_size", "train.global_batch_size", "model.image_shape"}
    shape = list(config.model.image_shape)
    if images * math.prod(shape) > _LARGEST_BATCH and config.adopted & sizes:
        raise CheckpointError(
            f"{path} has images of {shape}, {images} per rank and step, more than {_LARGEST_BATCH} numbers; "
            f"if that is what you want, set {' and '.join(sorted(config.adopted & sizes))}"
        )


def _check_head(config: Config, path: Path, manifest: Manifest) -> None:
    """Compare the sizes with the class weights, of several heads with those of any."""
    infos = [
        info
        for info in manifest.tensors.values()
        if (info.role.kind, info.role.name) == (CLASS_WEIGHTS, "weight")
    ]
    shapes = [info.shape for info in infos if len(info.shape) in (2, 3)]
    sizes = {
        "head.class_num": [rows for rows, *_ in shapes],
        "head.sub_centers": [(*centers, 1)[0] for _, *centers, _ in shapes],
        "model.emb_size": [size for *_, size in shapes],
    }
    for option in sorted(config.adopted & sizes.keys()):
        # Without a head the network alone has an embedding size.
        is_known = bool(shapes) or option != "model.emb_size"
        if is_known and config.get(option) not in (None, *sizes[option]):
            raise CheckpointError(
                f"{path} has {option} {config.get(option)}, but class weights "
                f"{', '.join(str(list(shape)) for shape in shapes[:3]) or 'none'}; choose another checkpoint"
            )


def _check_neck(network: str, path: Path, manifest: Manifest) -> None:
    names = [info.role.name for info in manifest.tensors.values() if info.role.kind == BACKBONE]
    if names and not any(name.startswith("neck.") for name in names):
        raise CheckpointError(
            f"{path} was written before networks of torchvision and timm had a neck, so it lacks that of "
            f"{network}; train again from its weights, set_pretrained({str(path)!r})"
        )


def _check_network(config: Config, path: Path, manifest: Manifest) -> None:
    saved = {one.role.name: one for one in manifest.tensors.values() if one.role.kind == BACKBONE}
    options = config.model
    # Of a user's or of another package: it may not compute without numbers.
    is_foreign, is_wrong = ":" in options.name or "/" in options.name, False
    state = {}
    try:
        with torch.device("meta"):  # no memory, no time for initial weights
            state = build_model(
                options.name,
                options.emb_size,
                options.image_shape,
                options.dropout,
                options.neck,
                config.arguments,
            ).state_dict()
    except (RuntimeError, TypeError):  # sizes beyond torch's
        is_wrong = not is_foreign
    except OptionError:
        if not is_foreign:
            raise
    wrong = [key for key, one in state.items() if key not in saved or saved[key].shape != one.shape]
    if wrong or is_wrong:
        raise CheckpointError(
            f"{path} has embeddings of {options.emb_size} and images of {list(options.image_shape)}, but "
            f"other sizes of {options.name}{': ' * bool(wrong)}{shorten(wrong)}; choose another checkpoint"
        )


@dataclass(frozen=True)
class HeadMatch:
    """The names of the heads that run and checkpoint both have, and of those that one of them has alone.

    dropped: in the checkpoint alone; added: in the run alone. All are empty for a single head.
    """

    kept: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return what the user should know of it."""
        lines = []
        if self.dropped:
            lines.append(
                f"data sets left out: {', '.join(self.dropped)}; their heads stay in that checkpoint and "
                "are not in those of this run"
            )
        if self.added:
            lines.append(
                f"data sets that are new: {', '.join(self.added)}; their heads begin afresh"
            )
        return lines

    def is_kept(self, key: str, roles: Mapping[str, Role]) -> bool:
        """Whether a tensor is of no head, or of one that run and checkpoint both have.

        roles: of all tensors of the one or the other, by key; key: of a tensor there.
        """
        role = roles.get(key)
        if role is not None and role.kind in (OPTIMIZER, CLASS_OPTIMIZER):
            role = roles.get(role.of)
        is_of_head = role is not None and role.kind in (CLASS_WEIGHTS, STATISTICS, CLASS_NAMES)
        return not is_of_head or role is None or role.of not in (*self.dropped, *self.added)


def heads_to_save(run: Run) -> dict[str, Any]:
    """Return what the manifest's scalars tell of several heads; nothing for a single one.

    Of each: class_num, class_ranges (on each rank), loss_type, num_samples, and what computes it.
    """
    if not isinstance(run.head, JointHead):
        return {}
    saved = {}
    for one in run.sets:
        head = run.head.heads[one.name]
        ranges = class_ranges(head.class_num, run.world.size if head.is_sharded else 1)
        saved[one.name] = {
            "class_num": head.class_num,
            "class_ranges": [list(pair) for pair in ranges],
            "loss_type": one.options.head.loss_type,
            "num_samples": one.num_samples,
            "computed_by": getattr(head, "computed_by", None),
        }
    return {HEADS_KEY: saved}


def check_data_sets(options: Config, path: Path, manifest: Manifest) -> None:
    """Refuse a run over one data set that goes on from a checkpoint of several, and the other way round.

    `options`: with those of the checkpoint adopted. Raises CheckpointError.
    """
    saved = saved_heads(path, manifest)
    if saved is None and options.data.datasets:
        raise CheckpointError(
            f"{path} has a single head, this run has one for each of its data sets (data.datasets); to begin "
            "with its network, use set_pretrained instead of set_checkpoint_dir"
        )
    if saved is not None and not options.data.datasets:
        raise CheckpointError(
            f"{path} has a head for each of the data sets {', '.join(saved)}, this run has one data set "
            "(data.dataset_dir); name those to go on with by add_dataset, or begin with its network by "
            "set_pretrained instead of set_checkpoint_dir"
        )


def match_heads(run: Run, path: Path, manifest: Manifest) -> HeadMatch:
    """Return which heads are in both. Raises CheckpointError if one of them, or its data set, changed."""
    saved = saved_heads(path, manifest)
    if not isinstance(run.head, JointHead):
        return HeadMatch()
    assert saved is not None  # see check_data_sets
    match = HeadMatch(
        [name for name in run.head.heads if name in saved],
        [name for name in saved if name not in run.head.heads],
        [name for name in run.head.heads if name not in saved],
    )
    if not match.kept:
        raise CheckpointError(
            f"{path} has heads of the data sets {', '.join(saved)}, this run of others, "
            f"{', '.join(match.added)}; keep one of them at least, under its name, or use set_pretrained"
        )
    for one in run.sets:
        if one.name not in saved:
            continue
        mine = {"class_num": one.class_num, "loss_type": one.options.head.loss_type}
        if manifest.step_in_epoch:
            mine["num_samples"] = one.num_samples
        for key, value in mine.items():
            theirs = saved[one.name].get(key)
            if theirs != value:
                raise CheckpointError(
                    f"{path} was saved with {_WORDS[key]} {theirs} for the data set {one.name}, this run has "
                    f"{value}; to resume, they must be the same"
                )
    return match


def saved_heads(path: Path, manifest: Manifest) -> dict[str, dict[str, Any]] | None:
    """Return what a checkpoint's scalars tell of its heads by name; None if it has a single one."""
    found = manifest.scalars.get(HEADS_KEY)
    if found is None:
        return None
    check = Checker(str(path))
    heads = check.mapping(found, "the heads")
    if not heads or not all(map(is_name, heads)):
        raise check.wrong("the names of its heads are damaged")
    return {name: check.mapping(value, f"the head {name!r}") for name, value in heads.items()}


_WORDS = {
    "class_num": "a number of classes of",
    "loss_type": "the loss type",
    "num_samples": "(in the middle of an epoch) a number of images of",
}
