"""Class weights computed from images: of new classes, and the dominant sub-centre of each class."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from plsc.checkpoint import Manifest, read_manifest, save_checkpoint
from plsc.checkpoint.classes import change_classes
from plsc.config import Options, find_option
from plsc.data.sources import Source, open_source
from plsc.data.sources.base import class_names_of
from plsc.errors import DataError, OptionError
from plsc.evaluate.embed import ImagesOf
from plsc.heads import ShardedHead, copy_dominant, count_choices, new_counts
from plsc.heads.geometry import normalised
from plsc.models import BaseModel
from plsc.parallel.world import World
from plsc.predict.network import Trained, load_trained
from plsc.train.build import build_trained_head
from plsc.train.callbacks import Run, UserParts
from plsc.train.folder import RunFolder
from plsc.train.restore import restore
from plsc.train.run import build_run, settle
from plsc.train.snapshot import take_snapshot

logger = logging.getLogger(__name__)


_AT_A_TIME = 4096  # images whose embeddings are kept in memory


def grow_from_images(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    count: int,
    images: str | os.PathLike[str],
    model: BaseModel | str | None = None,
) -> Manifest:
    """Add `count` classes to the checkpoint `source`, initialised from images; write it to `destination`.

    Args:
        source: the checkpoint, which is unchanged.
        destination: the checkpoint to write.
        count: number of new classes.
        images: a dataset in any format (docs/data.md) with at least one image per new class. Its labels
            are the new class numbers, or count the new classes from 0. Class folders are as deep as before.
        model: the network or the name of its class, if it is a custom one.

    Raises OptionError, DataError or CheckpointError, and writes nothing then. See
    `plsc.checkpoint.classes.change_classes`.
    """
    manifest = read_manifest(source)
    data = manifest.options.get("data", {})
    saved = find_option("data.format_arguments").saved(data.get("format_arguments")) or {}
    depth = saved.get("class_depth")
    try:
        opened = open_source(os.fspath(images), class_depth=depth or 1)
    except OptionError:  # a format without class folders
        opened = open_source(os.fspath(images))
    first = manifest.head.class_num
    labels, base = _new_labels(opened, first, count, os.fspath(images))
    world = World.single("cuda" if torch.cuda.is_available() else "cpu")
    trained = load_trained(Path(source), model, world)
    with tempfile.TemporaryFile() as file:
        sums = _sum_directions(trained, opened, labels, count, file, os.fspath(images))
        names = class_names_of(opened)
        return change_classes(
            source,
            destination,
            grow=count,
            directions=sums,
            names=None if names is None else names.resized(base + count).take(base + np.arange(count)),
        )


def _sum_directions(
    trained: Trained, source: Source, labels: np.ndarray, count: int, file: IO[bytes], name: str
) -> np.ndarray:
    """Return the sum of the unit embeddings of each class, float32 [count, D], memory-mapped in `file`.

    labels: int64 [N], labels of the images in 0..count - 1. name: name of the source, for messages.
    """
    sums = np.memmap(file, np.float32, "w+", shape=(count, trained.config.model.emb_size))
    for start in range(0, len(source), _AT_A_TIME):
        some: Any = ImagesOf(source, range(start, min(len(source), start + _AT_A_TIME)))
        where = f"{name}, counted from sample {start}" if start else name
        unit, _ = normalised(torch.from_numpy(trained.embed(some, where)))
        np.add.at(sums, labels[start : start + len(some)], unit.numpy())
    return sums


def _new_labels(source: Source, first: int, count: int, name: str) -> tuple[np.ndarray, int]:
    """Return the new class of each image, in 0..count - 1, and the label of the first one.

    Raises DataError if a class has no image.
    """
    labels = source.labels()
    lowest, highest = int(labels.min()), int(labels.max())
    base = 0 if lowest == 0 else first
    if lowest < base or highest >= base + count:
        wanted = f"{first}..{first + count - 1} or 0..{count - 1}"
        raise DataError(f"the labels of {name} are {lowest}..{highest}; expected {wanted}, the new classes")
    has_image = np.zeros(count, dtype=bool)
    has_image[labels - base] = True
    if not has_image.all():
        missing = first + int(np.argmin(has_image))
        raise DataError(f"{name} has no image for some of the {count} new classes, such as class {missing}")
    return labels - base, base


def run_dominant(options: Options, world: World, user: UserParts, output: Path) -> Path:
    """Keep, per class, the sub-centre closest to most of its training images; a collective.

    The network of `checkpoint.load_dir` embeds the training set. Writes the checkpoint `output`: the same run
    at the same step, with one weight vector per class, from which training can resume. Raises OptionError if
    there are no sub-centres or `output` exists.
    """
    place = options.checkpoint
    folder = RunFolder(world, place.save_dir, place.upload_dir, place.load_dir, place.download_dir)
    path, manifest = folder.find()
    if output.exists() or output.is_symlink():
        raise OptionError(f"{output} exists already; choose a new path")
    plain = settle(options, (path, manifest), world.size, user.model)
    as_predicted = plain.changed({"data.flip": False})
    plain_user = dataclasses.replace(user, train_transform=None)
    run = build_run(as_predicted, world, plain_user, (path, manifest))
    head = run.head
    if not isinstance(head, ShardedHead) or head.centers == 1:
        raise OptionError(f"{path} has one weight vector per class; expected head.sub_centers of 2 or more")
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
    world.log(f"wrote {output} with the dominant sub-centre of each class")
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
