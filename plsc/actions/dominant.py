"""Keep the dominant sub-centre of each class: the closest one to most of its training images."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch

from plsc.checkpoint import save_checkpoint
from plsc.config import Options
from plsc.errors import OptionError
from plsc.heads import ShardedHead
from plsc.heads.centers import copy_dominant, count_choices, new_counts
from plsc.parallel.collectives import sum_over_ranks
from plsc.parallel.world import World
from plsc.run.build_data import NO_AUGMENTATION
from plsc.run.build_heads import build_trained_head
from plsc.run.run import Run, build_run
from plsc.run.settle import settle
from plsc.run.user_parts import UserParts
from plsc.state.restore import restore
from plsc.state.snapshot import take_snapshot
from plsc.state.start import open_load_dir

logger = logging.getLogger(__name__)


def run_dominant(options: Options, world: World, user: UserParts, output: Path) -> Path:
    """Keep, per class, the sub-centre closest to most of its training images; a collective.

    The network of `checkpoint.load_dir` embeds the training set. Writes the checkpoint `output`: the same run
    at the same step, with one weight vector per class, from which training can resume. Raises OptionError if
    there are no sub-centres or `output` exists.
    """
    path, manifest = open_load_dir(options.resolve(), world)
    if output.exists() or output.is_symlink():
        raise OptionError(f"{output} exists already; choose a new path")
    plain = settle(options, (path, manifest), world.size, user.model)
    as_predicted = plain.changed(NO_AUGMENTATION)
    plain_user = dataclasses.replace(user, train_transform=None)
    run = build_run(as_predicted, world, plain_user, (path, manifest))
    head = run.head
    if not isinstance(head, ShardedHead) or head.centers == 1:
        raise OptionError(
            f"{path} has one weight vector per class; expected a checkpoint trained with head.sub_centers of "
            "2 or more"
        )
    restore(run, path, manifest)
    counts = _count(run, head)
    plain = plain.changed({"head.sub_centers": 1})
    rows = run.rows
    untrained = plain.changed({"head.class_margins": None})
    run.options = plain
    run.head, run.rows = build_trained_head(untrained, head.class_num, world)
    if isinstance(run.head, ShardedHead):
        copy_dominant(head, rows, counts, run.head, run.rows)
        run.head.computed_by = head.computed_by
    save_checkpoint(output.parent, output.name, take_snapshot(run, {}, lineage=manifest.lineage), world)
    _log_result(world, counts, output)
    return output


def _count(run: Run, head: ShardedHead) -> torch.Tensor:
    """Return the number of training images closest to each sub-centre of this rank, [C_local, K]."""
    counts = new_counts(head)
    run.network.eval()
    for batch in run.data.loader.epoch(0):
        images = batch.input(run.world.device, run.network.input_layout)
        labels = batch.labels.to(run.world.device)
        with torch.no_grad():
            embeddings = run.network(images)
        count_choices(head, embeddings, labels, counts)
    return counts


def _log_result(world: World, counts: torch.Tensor, output: Path) -> None:
    chosen = counts.max(dim=1).values.sum() if len(counts) else counts.sum()
    both = sum_over_ranks(torch.stack([chosen, counts.sum()]).double(), world.head_group)
    if world.is_main:
        share = float(both[0] / both[1])
        logger.info(
            f"wrote {output} with the dominant sub-centre of each class: the closest one for {share:.1%} of "
            "the training images"
        )
