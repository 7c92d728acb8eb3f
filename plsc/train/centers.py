"""A checkpoint with sub-centres, to one with the dominant row of each class alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from plsc.checkpoint import save_checkpoint
from plsc.checkpoint.classes.change import refuse_several_heads
from plsc.config import Options
from plsc.errors import OptionError
from plsc.heads import ShardedHead
from plsc.heads.centers import copy_dominant, count_choices, new_counts
from plsc.heads.joint import JointRows
from plsc.parallel.collectives import sum_over_ranks
from plsc.parallel.sharding import whole_parameters
from plsc.parallel.world import World
from plsc.train.build import Run, UserParts, build_run
from plsc.train.build_head import build_head_of, build_row_optimizer
from plsc.train.feed import NO_AUGMENTATION
from plsc.train.find import open_load_dir
from plsc.train.resume import resolve_run, restore
from plsc.train.snapshot import take_snapshot


def run_dominant(options: Options, world: World, user: UserParts, output: Path) -> Path:
    """Keep of each class the row that most of its training images are nearest to; a collective.

    The network of `checkpoint.load_dir` embeds the training set. Writes the checkpoint `output`: the same run
    at the same step, with one row a class; training goes on from it. Raises OptionError if there are no
    sub-centres, or something stands where the new checkpoint is to be.
    """
    path, manifest = open_load_dir(options.resolve(), world)
    if output.exists() or output.is_symlink():
        raise OptionError(f"{output} is there already; give a path that is not")
    refuse_several_heads(path, manifest)
    plain = resolve_run(options, (path, manifest), world.size, user.model)
    as_predicted = plain.changed(NO_AUGMENTATION)
    plain_user = dataclasses.replace(user, train_transform=None)
    run = build_run(as_predicted, world, plain_user, (path, manifest))
    head = run.head
    if not isinstance(head, ShardedHead) or head.centers == 1:
        raise OptionError(
            f"{path} has one row a class; dropping the other sub-centres needs head.sub_centers of 2 or more"
        )
    restore(run, path, manifest)
    counts = _count(run, head)
    plain = plain.changed({"head.sub_centers": 1})
    new_head = build_head_of(plain, head.class_num, world)
    assert isinstance(new_head, ShardedHead)
    new_rows = build_row_optimizer(plain, new_head)
    assert not isinstance(run.rows, JointRows)
    copy_dominant(head, run.rows, counts, new_head, new_rows)
    new_head.computed_by = head.computed_by
    made = dataclasses.replace(run, options=plain, head=new_head, rows=new_rows)
    save_checkpoint(output.parent, output.name, take_snapshot(made, {}), world)
    _say(world, counts, output)
    return output


def _count(run: Run, head: ShardedHead) -> torch.Tensor:
    """Return how many training images chose each row of this rank, [C_local, K]."""
    counts = new_counts(head)
    run.network.eval()
    with whole_parameters(run.network):
        for batch in run.loader.epoch(0):
            images = batch.input(run.world.device, run.network.input_layout)
            labels = batch.labels.to(run.world.device)
            with torch.no_grad():
                embeddings = run.network(images)
            count_choices(head, embeddings, labels, counts)
    return counts


def _say(world: World, counts: torch.Tensor, output: Path) -> None:
    chosen = counts.max(dim=1).values.sum() if len(counts) else counts.sum()
    both = sum_over_ranks(torch.stack([chosen, counts.sum()]).double(), world.head_group)
    if world.is_main:
        share = float(both[0] / both[1])
        print(f"{output}: one row a class; {share:.1%} of the images are nearest to it")
