"""Class weights of new classes, computed from images."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from plsc.checkpoint import Manifest, read_manifest
from plsc.checkpoint.classes import change_classes
from plsc.config import find_option
from plsc.data.sources import Source, open_source
from plsc.data.sources.base import class_names_of
from plsc.errors import DataError, OptionError
from plsc.evaluate.embed import ImagesOf
from plsc.heads.geometry import normalised
from plsc.models import BaseModel
from plsc.parallel.world import World
from plsc.predict.network import Trained, load_trained

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
            are the new class numbers, or count the new classes from 0.
        model: the network or the name of its class, if it is a custom one.

    Raises OptionError, DataError or CheckpointError, and writes nothing then. See
    `plsc.checkpoint.classes.change_classes`.
    """
    manifest = read_manifest(source)
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
