"""Training on several data sets, each with a head of its own: their options, and one loader for all."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from plsc.config import Config, find_option
from plsc.data.class_names import ClassNames
from plsc.data.mixture import JoinedSource, MixturePlan, Share, split_batch
from plsc.data.order import BatchPlan, count_steps
from plsc.data.sources.base import Source
from plsc.data.transform import Transform
from plsc.errors import DataError, OptionError
from plsc.heads import MARGINS
from plsc.keys import hash_key
from plsc.options.data_set import HEAD_OPTIONS, DataSet
from plsc.parallel.world import World
from plsc.train.build_head import MARGIN_OPTIONS, ONLY_SHARDED, TrainingSet, margin_of
from plsc.train.class_numbers import OpenedCheckpoint
from plsc.train.feed import (
    Feed,
    check_save_dir,
    count_named_classes,
    join_notes,
    make_recipe,
    open_training_source,
    source_loader,
)


def build_joint_feed(
    options: Config,
    world: World,
    reader: Any,
    transform: Transform | None,
    global_batch: int,
    checkpoint: OpenedCheckpoint | None = None,
) -> Feed:
    """Return the loader of all data sets of `data.datasets`; see `build_feed`."""
    _check(options, reader)
    wanted = options.data_sets()
    counts = split_batch(global_batch, [one.weight for one in wanted])
    own_options = []
    for one in wanted:
        with _naming(one.name):
            own = options_of(options, one)
            margin_of(own)  # all options are looked at before any data
            own_options.append(own)
    sources, sets, notes = [], [], []
    class_names: dict[str, ClassNames] = {}
    if "data.dataset_dir" in options.explicit:
        notes.append(
            f"note: of {options.data.dataset_dir} only the pair files are used: the images to "
            "train on are those of the data sets that were added"
        )
    for one, own, per_step in zip(wanted, own_options, counts, strict=True):
        with _naming(one.name):
            source = open_training_source(own, None)
            check_save_dir(source, own)
            class_num, names, note = count_named_classes(source, own, checkpoint, one.name)
        class_names.update(names)
        seed = hash_key(options.train.seed, zlib.crc32(one.name.encode()))
        sets.append(TrainingSet(one.name, own, class_num, len(source), per_step, seed))
        sources.append(source)
        notes.append(_describe(sets[-1], global_batch))
        if note:
            notes.append(f"{one.name}: {note}")
    feed = _joint_feed(options, world, transform, sources, sets, notes)
    feed.class_names = class_names
    return feed


def _joint_feed(
    options: Config,
    world: World,
    transform: Transform | None,
    sources: list[Source],
    sets: list[TrainingSet],
    notes: list[str],
) -> Feed:
    class_nums = [one.class_num for one in sets]
    source = JoinedSource([one.name for one in sets], sources, class_nums)
    if options.data.train_image_num not in (None, len(source)):
        raise OptionError(
            f"data.train_image_num is {options.data.train_image_num}, but the data sets have {len(source)} "
            "images; leave it out, or mend them"
        )
    steps = _epoch_steps(options, len(source), sum(one.per_step for one in sets))
    plan = MixturePlan(tuple(_share(one, options) for one in sets), world.size, steps)
    recipe = make_recipe(options, transform, sum(class_nums))
    loader = source_loader(source, plan, world.rank, recipe, options, world)
    return Feed(
        loader,
        len(source),
        sum(class_nums),
        join_notes(*notes, loader.describe()),
        sets=sets,
    )


def _epoch_steps(options: Config, num_samples: int, global_batch: int) -> int:
    """Return the steps of an epoch of the run."""
    steps = options.train.epoch_steps
    if steps is None:
        steps = count_steps(num_samples, global_batch, options.data.last_batch)
    if steps == 0:
        raise DataError(
            f"last_batch 'drop' leaves no step: all data sets have {num_samples} samples, fewer than the "
            f"global batch of {global_batch}; use a smaller batch, 'pad', or set_epoch_steps"
        )
    return steps


def options_of(options: Config, one: DataSet) -> Config:
    """Return the options of a run with those of one of its data sets in place.

    A data set with a loss of its own takes of the run's options for margins the scale alone: the others
    were chosen for another loss. One whose head is not sharded takes none of those for sharded rows.
    """
    loss_type = one.loss_type or options.head.loss_type
    name = loss_type.removeprefix("dist_")
    left_out: set[str] = set()
    if name != options.head.loss_type.removeprefix("dist_"):
        has_scale = "scale" in inspect.signature(MARGINS[name].__init__).parameters
        left_out.update(path for path in MARGIN_OPTIONS if path != "head.scale" or not has_scale)
    if not loss_type.startswith("dist_"):
        left_out.update(ONLY_SHARDED)
    given = {f"head.{key}": getattr(one, key) for key in HEAD_OPTIONS}
    given = {path: value for path, value in given.items() if value is not None}
    values = {path: find_option(path).default for path in left_out}
    values |= {"data.datasets": (), "data.train_image_num": None, "data.dataset_dir": one.path}
    return replace(
        options.changed({**values, "head.class_num": None, **given}),
        explicit=options.explicit - left_out | given.keys(),
        adopted=options.adopted - left_out,
    )


def _check(options: Config, reader: Any) -> None:
    """Raise OptionError for what several data sets do not go with."""
    if reader is not None:
        raise OptionError(
            "train_reader is set beside several data sets (data.datasets); leave one of the two out"
        )
    if "head.class_num" in options.explicit and options.head.class_num is not None:
        raise OptionError(
            "head.class_num is set, but each of several data sets has classes of its own; give class_num "
            "to add_dataset, or leave it out"
        )
    if options.data.order == "rank_files":
        raise OptionError(
            "data.order 'rank_files' is for one data set; use 'global', 'block' or 'sequential'"
        )
    if options.data.last_batch == "keep":
        raise OptionError(
            "data.last_batch is 'keep', but every step over several data sets has the same number of images "
            "of each; use 'pad' or 'drop'"
        )


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Let errors say which data set they are about."""
    try:
        yield
    except DataError as error:
        raise error.at(f"data set {name}") from error
    except OptionError as error:
        raise OptionError(f"data set {name}: {error}") from error


def _share(one: TrainingSet, options: Config) -> Share:
    data = options.data
    plan = BatchPlan(
        one.num_samples,
        global_batch=1,
        ranks=1,
        seed=one.seed,
        order=data.order,
        block_samples=data.block_samples,
        pool_samples=data.pool_samples,
    )
    return Share(plan, one.per_step)


def _describe(one: TrainingSet, global_batch: int) -> str:
    return (
        f"data set {one.name}: {one.num_samples:,} images of {one.class_num:,} classes "
        f"({one.options.data.dataset_dir}), {one.options.head.loss_type}, {one.per_step} of the "
        f"{global_batch} images of a step"
    )
