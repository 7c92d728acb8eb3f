"""The classes of a dataset: number, names, and numbering in a resumed run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from plsc.checkpoint import Manifest
from plsc.checkpoint.classes.change import MAP_NAME
from plsc.checkpoint.load import read_class_names
from plsc.config import Config
from plsc.data.class_names import ClassNames, class_names_of, first_and_last_class
from plsc.data.sources import check_labels
from plsc.data.sources.base import IndexedSource, Source
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.parallel.world import World
from plsc.storage.urls import shown

OpenedCheckpoint = tuple[Path, Manifest]
# Labels that imply more classes than both limits are rejected as a likely typo.
_MANY_CLASSES = 10**7
_MUCH_EMPTIER = 1000  # classes per image


def count_named_classes(
    source: Source, options: Config, checkpoint: OpenedCheckpoint | None
) -> tuple[int, ClassNames | None, list[str]]:
    """Return the number of classes, their names or None, and notes about the labels.

    Calls `number_classes` first.
    """
    names, notes = number_classes(source, checkpoint)
    class_num, more = count_classes(source, options, least=0 if names is None else len(names))
    notes += more
    if names is None:
        return class_num, None, notes
    if getattr(source, "class_names", None) is not None:  # names are not only in the checkpoint
        notes.append(f"classes: {first_and_last_class(source, names)}")
    return class_num, names.resized(class_num), notes


def check_unseen(place: str, names: ClassNames | None, checkpoint: OpenedCheckpoint) -> None:
    """Raise DataError if a dataset is the one that was trained, or has classes with names of trained ones.

    place: of the dataset, as messages show it.
    """
    path, manifest = checkpoint
    trained_place = manifest.options.get("data", {}).get("dataset_dir")
    if names is None and isinstance(trained_place, str) and place == shown(trained_place):
        raise DataError(f"the classes of {place} were trained; choose images of other classes")
    for head in manifest.heads:
        trained = read_class_names(path, manifest, head)
        if trained is None or names is None:
            continue
        both = np.flatnonzero((trained.numbers_of(names) >= 0) & (names.lengths() > 0))
        if len(both):
            raise DataError(
                f"{len(both):,} of the {len(names):,} classes of {place} were trained, such as "
                f"'{names[int(both[0])]}'; choose images of other classes"
            )


def count_classes(
    source: Source, options: Config, world: World | None = None, least: int = 0
) -> tuple[int, list[str]]:
    """Return the number of classes, at least `least`, and notes about the labels.

    world: set it if each rank has a different part of the labels.
    """
    world = world or World.single()
    count = len(source) * world.size
    if not count:
        raise DataError("the dataset contains no samples; check data.dataset_dir")
    labels = source.labels()
    (largest,) = world.all_reduce_max(max(int(labels.max()), least - 1))
    class_num = options.head.class_num or largest + 1
    if options.head.class_num is None and class_num > max(_MANY_CLASSES, _MUCH_EMPTIER * count):
        where = f" at {source.name(int(labels.argmax()))}" if labels.max() == largest else ""
        raise OptionError(
            f"the label {largest}{where} would mean {class_num:,} classes for {count:,} images, which is "
            f"likely a typo; fix the label, or confirm with head.class_num {class_num}"
        )
    if class_num < 2:
        raise OptionError(
            f"all {count} images have the same class, or head.class_num is 1; expected 2 or more classes: is "
            f"{options.data.dataset_dir} the right folder, not its parent?"
        )
    is_bad = (labels < 0) | (labels >= class_num)
    if options.data.bad_images == "stop" or is_bad.all():
        check_labels(source, class_num)
    notes = []
    if options.data.train_image_num not in (None, count):
        notes.append(f"note: data.train_image_num is ignored, as the dataset has {count:,} images")
    if is_bad.any():
        notes.append(f"note: {is_bad.sum()} samples have labels outside 0..{class_num - 1}")
    if world.size > 1:  # a class without images on this rank may have images on another one
        return class_num, notes
    counts = np.bincount(labels[~is_bad], minlength=class_num)
    notes.append(
        f"images per class: least {counts.min():,}, median {np.median(counts):,g}, most {counts.max():,}"
    )
    if not counts.all():
        notes.append(
            f"note: {np.sum(counts == 0)} of {class_num} classes have no images, the first one is "
            f"class {np.argmin(counts)} (labels count from 0)"
        )
    return class_num, notes


def number_classes(
    source: Source | None, checkpoint: OpenedCheckpoint | None
) -> tuple[ClassNames | None, list[str]]:
    """Number the classes of a source as in a checkpoint, matching them by name.

    New names are assigned to the unnamed classes of the checkpoint, in order. If source or checkpoint has no
    class names, labels are class numbers. Returns the names of all classes, or None, and notes about changes.

    Raises CheckpointError if source or checkpoint has a class that the other lacks.
    """
    own = None if source is None else class_names_of(source)
    if checkpoint is None:
        return own, []
    path, manifest = checkpoint
    saved = read_class_names(path, manifest)
    if own is None or saved is None:
        note = f"the classes of the checkpoint were renumbered: labels must match {path / MAP_NAME}"
        return saved if own is None else own, [note] if (path / MAP_NAME).is_file() else []
    assert isinstance(source, IndexedSource)
    numbers, named = saved.numbered(own), own.lengths() > 0
    # Some formats have no name of a class without images: it may be any that the dataset lacks.
    empty = np.setdiff1d(np.flatnonzero(~named), source.labels())
    free = np.setdiff1d(np.arange(len(saved)), numbers[named])[: len(empty)]
    numbers[empty[: len(free)]] = free
    _check_equal(path, own, saved, numbers)
    source.renumber(numbers)
    own, known = own.take(np.flatnonzero(named)), numbers[named]
    return saved.with_names(own, known), _describe(path, own, saved, known)


def _check_equal(path: Path, own: ClassNames, saved: ClassNames, numbers: np.ndarray) -> None:
    """Raise CheckpointError for classes that the checkpoint or the dataset lacks."""
    added = np.flatnonzero(numbers >= len(saved))
    if len(added):
        raise CheckpointError(
            f"{path} lacks {len(added)} of the {len(own)} classes of the dataset, the first one is "
            f"'{own[added[0]]}'; remove them from the dataset, or add them with: plsc checkpoint classes "
            f"{path} NEW --grow {len(added)}"
        )
    lacking = saved.lengths() > 0
    lacking[numbers] = False
    if lacking.any():
        first = int(np.argmax(lacking))
        raise CheckpointError(
            f"the dataset lacks {lacking.sum()} of the {len(saved)} classes of {path}, the first one is "
            f"'{saved[first]}' (class {first}); restore them, or drop them with: plsc checkpoint classes "
            f"{path} NEW --drop FILE"
        )


def _describe(path: Path, own: ClassNames, saved: ClassNames, numbers: np.ndarray) -> list[str]:
    is_new = saved.lengths()[numbers] == 0
    moved = int((numbers != np.arange(len(numbers))).sum())
    changes = [f"{moved} labels differ from the sorted order of names"] if moved else []
    if is_new.any():
        first = int(np.argmax(is_new))
        changes.append(f"{is_new.sum()} are new, the first one is '{own[first]}' (class {numbers[first]})")
    return [f"classes are numbered as in {path}: {'; '.join(changes)}"] if changes else []
