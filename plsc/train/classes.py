"""The classes of a data set: how many, what they are called, which numbers they have in a resumed run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from plsc.checkpoint import Manifest
from plsc.checkpoint.classes.map import MAP_NAME
from plsc.checkpoint.load import read_class_names
from plsc.config import Config
from plsc.data.class_names import ClassNames, class_names_of, first_and_last_class
from plsc.data.sources import check_labels
from plsc.data.sources.base import IndexedSource, Source
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.parallel.world import World

OpenedCheckpoint = tuple[Path, Manifest]

# Labels that make more classes than both, and so hardly any with an image, are likely a typo.
_MANY_CLASSES = 10**7
_MUCH_EMPTIER = 1000  # classes per image


def count_named_classes(
    source: Source, options: Config, checkpoint: OpenedCheckpoint | None, head: str = ""
) -> tuple[int, ClassNames | None, list[str]]:
    """Return the number of classes, their names if they have some, and notes about labels.

    The classes of the source are numbered by `number_classes` before. head: the name of one of several.
    """
    names, notes = number_classes(source, checkpoint, head)
    class_num, more = count_classes(source, options, least=0 if names is None else len(names))
    notes += more
    if names is None:
        return class_num, None, notes
    if getattr(source, "class_names", None) is not None:  # and not the checkpoint alone has names
        notes.append(f"classes: {first_and_last_class(source, names)}")
    return class_num, names.resized(class_num), notes


def count_classes(
    source: Source, options: Config, world: World | None = None, least: int = 0
) -> tuple[int, list[str]]:
    """Return the number of classes, `least` or more, and notes about labels.

    world: if each rank has labels of its own.
    """
    world = world or World.single()
    count = len(source) * world.size
    if not count:
        raise DataError("the dataset holds no samples; check the dataset folder")
    if options.data.train_image_num not in (None, count):
        raise OptionError(
            f"data.train_image_num is {options.data.train_image_num}, but the dataset has {count} "
            "images; leave it out, or mend the dataset"
        )
    labels = source.labels()
    (largest,) = world.all_reduce_max(max(int(labels.max()), least - 1))
    class_num = options.head.class_num or largest + 1
    if options.head.class_num is None and class_num > max(_MANY_CLASSES, _MUCH_EMPTIER * count):
        where = f" at {source.name(int(labels.argmax()))}" if labels.max() == largest else ""
        raise OptionError(
            f"the label {largest}{where} makes {class_num:,} classes, for {count:,} images; if they are so "
            f"many, set_class_num({class_num}), else mend the label"
        )
    if options.head.class_num == 1:
        raise OptionError(
            f"head.class_num is 1; a classifier needs two or more, and the labels go up to {largest}: leave "
            "it out, or correct set_class_num"
        )
    if class_num < 2:
        raise OptionError(
            f"all {count} images are of one class; a classifier needs two or more: is "
            f"{options.data.dataset_dir} the right folder, not one above it?"
        )
    is_bad = (labels < 0) | (labels >= class_num)
    if options.data.bad_images == "stop" or is_bad.all():
        check_labels(source, class_num)
    notes = []
    if is_bad.any():
        notes.append(f"note: {is_bad.sum()} samples have labels outside 0..{class_num - 1}")
    has_image = np.zeros(class_num, dtype=bool)
    has_image[labels[~is_bad]] = True
    # A class without images here may have some on another rank.
    if world.size == 1 and not has_image.all():
        notes.append(
            f"note: {class_num - has_image.sum()} of {class_num} classes have no image, the first is "
            f"{np.argmin(has_image)}; labels count from 0"
        )
    return class_num, notes


def number_classes(
    source: Source | None, checkpoint: OpenedCheckpoint | None, head: str = ""
) -> tuple[ClassNames | None, list[str]]:
    """Give the classes of a source the numbers that they have in a checkpoint, by their names.

    Names that are new become those of the checkpoint's classes without a name, in their order. Where one
    side has no names, labels are numbers of classes. head: the name of one of several. Returns the names of
    all classes, if there are some, and notes about what changed.

    Raises CheckpointError if one side has a class that the other lacks.
    """
    own = None if source is None else class_names_of(source)
    if checkpoint is None:
        return own, []
    path, manifest = checkpoint
    saved = read_class_names(path, manifest, head)
    if own is None or saved is None:
        note = f"classes were renumbered: labels must follow {path / MAP_NAME}"
        return saved if own is None else own, [note] if (path / MAP_NAME).is_file() else []
    numbers = saved.numbered(own)
    _check_equal(path, head, own, saved, numbers)
    assert isinstance(source, IndexedSource)
    source.renumber(numbers)
    return saved.with_names(own, numbers), _describe(path, own, saved, numbers)


def _check_equal(path: Path, head: str, own: ClassNames, saved: ClassNames, numbers: np.ndarray) -> None:
    """Raise CheckpointError for classes that the checkpoint or the data set lacks."""
    title = f"the data set {head}" if head else "the data set"
    # The classes of several heads cannot be changed.
    renaming = "give the data set another name, so that its head begins afresh"
    added = np.flatnonzero(numbers >= len(saved))
    if len(added):
        command = f"add them by plsc checkpoint classes {path} NEW --grow {len(added)}"
        raise CheckpointError(
            f"{path} lacks {len(added)} of the {len(own)} classes of {title}, the first is "
            f"'{own[added[0]]}'; take them out of it, or {renaming if head else command}"
        )
    lacking = saved.lengths() > 0
    lacking[numbers] = False
    if lacking.any():
        first = int(np.argmax(lacking))
        command = f"drop them by plsc checkpoint classes {path} NEW --drop FILE"
        raise CheckpointError(
            f"{title} lacks {lacking.sum()} of the {len(saved)} classes of {path}, the first is "
            f"'{saved[first]}' (class {first}); put them back, or {renaming if head else command}"
        )


def _describe(path: Path, own: ClassNames, saved: ClassNames, numbers: np.ndarray) -> list[str]:
    is_new = saved.lengths()[numbers] == 0
    moved = int((numbers != np.arange(len(numbers))).sum())
    said = [f"{moved} have other labels than by their sorted names"] if moved else []
    if is_new.any():
        first = int(np.argmax(is_new))
        said.append(f"{is_new.sum()} are new, the first is '{own[first]}' (class {numbers[first]})")
    return [f"classes are numbered by their names in {path}: {'; '.join(said)}"] if said else []
