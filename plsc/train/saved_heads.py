"""What a checkpoint says of several heads, and which of them a resumed run goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plsc.checkpoint import Manifest
from plsc.checkpoint.check import Checker
from plsc.checkpoint.manifest import HEADS_KEY
from plsc.checkpoint.roles import (
    CLASS_NAMES,
    CLASS_OPTIMIZER,
    CLASS_WEIGHTS,
    OPTIMIZER,
    STATISTICS,
    Role,
)
from plsc.config import Config
from plsc.errors import CheckpointError
from plsc.heads.joint import JointHead
from plsc.options.data_set import is_name
from plsc.parallel.collectives import class_ranges
from plsc.train.build import Run


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
