"""The training data of a run: its classes, and the source, order and loader built from the options."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from plsc.checkpoint.classes import MAP_NAME
from plsc.checkpoint.load import read_class_names
from plsc.checkpoint.manifest import OpenedCheckpoint
from plsc.config import Config
from plsc.config.data_and_model import cache_place
from plsc.config.option import name_and_arguments, shown_value
from plsc.data.batch import Transform
from plsc.data.class_names import ClassNames
from plsc.data.loader import Recipe, SourceLoader, choose_kind
from plsc.data.order import BalancedPlan, BatchPlan, ClassesPlan
from plsc.data.reader import ReaderLoader
from plsc.data.sources import ImageFolderSource, check_labels, open_source
from plsc.data.sources.base import (
    CachedSource,
    FileSource,
    IndexedSource,
    SampleCache,
    Source,
    TorchDatasetSource,
    class_names_of,
)
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.parallel.world import World
from plsc.storage.urls import shown
from plsc.values import Input

# Labels that imply more classes than both limits are rejected as a likely typo.
_MANY_CLASSES = 10_000
_MUCH_EMPTIER = 10  # classes per image

Loader = SourceLoader | ReaderLoader


@dataclass(frozen=True)
class TrainingData:
    """The training data of a run.

    Attributes:
        loader: loader of the batches of this rank.
        num_samples: number of samples, None if unknown.
        class_num: number of classes.
        notes: log lines about the data.
        is_of_ranks: whether the samples of a step depend on the number of ranks.
        class_names: names of the classes, if they have any.
    """

    loader: Loader
    num_samples: int | None
    class_num: int
    notes: list[str]
    is_of_ranks: bool = False
    class_names: ClassNames | None = None

    def count_images(self) -> Tensor | None:
        """Return the images per class, int64 [C]; None for a generator reader."""
        if isinstance(self.loader, ReaderLoader):
            return None
        labels = self.loader.source.labels()
        is_good = (labels >= 0) & (labels < self.class_num)
        return torch.from_numpy(np.bincount(labels[is_good], minlength=self.class_num))


def open_training_data(
    options: Config,
    world: World,
    reader: Any,
    transform: Transform | None,
    global_batch: int,
    checkpoint: OpenedCheckpoint | None = None,
    example: Input | None = None,
) -> TrainingData:
    """Return the training data and its loader.

    checkpoint: the checkpoint that the run resumes. example: the example input of a network that takes no
    images. Raises OptionError, DataError or CheckpointError.
    """
    data, seed, is_strict = options.data, options.train.seed, options.data.bad_images == "stop"
    if example is not None:
        wrong = ["data.flip"] * (data.flip and "data.flip" in options.explicit)
        _check_not_images(reader, transform, data.cache, wrong)
    if reader is not None and is_generator_reader(reader, "train_reader"):
        return _open_generator(options, world, reader, transform, global_batch, checkpoint, example)

    source: Source
    if reader is not None:
        check_no_landmarks(data.landmarks, "a reader")
        source = TorchDatasetSource(reader)
    else:
        source = open_labelled(data.dataset_dir, data.format_arguments, data.landmarks, is_strict)
    check_save_dir(source, options.checkpoint.save_dir)
    class_num, names, notes = count_named_classes(source, checkpoint, options.head.class_num, is_strict)
    limit = options.train.limit_train_batches
    plan = plan_of(
        source, data.order, global_batch, world.size, seed, last_batch=data.last_batch, limit=limit
    )
    recipe = Recipe(
        options.model.image_shape,
        options.train.seed,
        data.flip,
        transform,
        data.bad_images,
        class_num,
        example=example,
    )
    # What is aligned is small, and aligned only once.
    source = cached(source, data.cache, recipe, data.num_workers, keeps_decoded=data.landmarks is not None)
    pin_memory = world.device.type == "cuda"
    loader = SourceLoader(
        source, plan, world.rank, recipe, num_workers=data.num_workers, pin_memory=pin_memory
    )
    return TrainingData(loader, len(source), class_num, notes, class_names=names)


def _check_not_images(reader: Any, transform: Transform | None, cache: str, wrong: list[str]) -> None:
    """Raise OptionError for files of images, and for what only images have; wrong: options of them."""
    wrong = [*wrong, *["train_transform"] * (transform is not None), *["data.cache"] * (cache != "none")]
    if reader is None or wrong:
        what = f"{', '.join(wrong)} is only for images" if wrong else "the samples come from files of images"
        raise OptionError(
            f"the network has an example_input, so its input is no image, but {what}; pass samples that are "
            "ready for the network as train_reader"
        )


def _open_generator(
    options: Config,
    world: World,
    reader: Any,
    transform: Transform | None,
    global_batch: int,
    checkpoint: OpenedCheckpoint | None,
    example: Input | None,
) -> TrainingData:
    data, class_num = options.data, options.head.class_num
    if class_num is None:
        raise OptionError("the number of classes of a generator reader is unknown; set head.class_num")
    order, _ = name_and_arguments(data.order)
    for is_set, what in (
        (data.landmarks is not None, "data.landmarks is set; align the images in the reader"),
        (
            order in ("balanced", "classes"),
            f"data.order '{order}' needs all labels in advance; use a Dataset",
        ),
        (transform is not None, "train_transform is set; transform the images in the reader"),
    ):
        if is_set:
            raise OptionError(f"train_reader is a generator reader, but {what}")
    num_samples = data.train_image_num or _length_of(reader)
    # The forked process cannot start workers itself.
    has_workers = getattr(getattr(reader, "__self__", None), "num_workers", 0) > 0
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    loader = ReaderLoader(
        reader,
        global_batch=global_batch,
        rank=world.rank,
        ranks=world.size,
        image_shape=options.model.image_shape,
        class_num=class_num,
        seed=options.train.seed,
        last_batch=data.last_batch,
        num_samples=num_samples,
        limit=options.train.limit_train_batches,
        ahead=data.num_workers > 0 and can_fork and not has_workers,
        pin_memory=world.device.type == "cuda",
        example=example,
    )
    names, notes = number_classes(None, checkpoint)
    names = None if names is None else names.resized(class_num)
    return TrainingData(loader, num_samples, class_num, notes, loader.shards_itself, names)


def open_labelled(
    place: str,
    format_arguments: Mapping[str, Any] | None = None,
    landmarks: str | None = None,
    is_strict: bool = True,
) -> Source:
    """Return the source of a labelled dataset.

    landmarks: file of the landmarks by which faces are aligned. Raises DataError if images lack landmarks,
    unless `is_strict` is False, so that they are handled one by one.
    """
    source = open_source(place, **(format_arguments or {}), landmarks=landmarks)
    if is_strict and isinstance(source, FileSource):
        source.check_landmarks()
    return source


def align_source(source: Source, landmarks: str | None, is_strict: bool) -> Source:
    """Return a source without labels or classes, whose images are aligned if there are `landmarks`.

    Raises OptionError if the images are not files, DataError if an image has no landmarks, as above.
    """
    if isinstance(source, FileSource):
        source.add_landmarks(landmarks)
        if is_strict:
            source.check_landmarks()
    else:
        check_no_landmarks(landmarks, "a list of images")
    return source


def check_no_landmarks(landmarks: str | None, what: str) -> None:
    """Raise OptionError if there are landmarks; what: the data, which have no file names."""
    if landmarks is not None:
        raise OptionError(
            f"data.landmarks is set, but {what} does not use it; align the images yourself, or remove the "
            "option"
        )


def plan_of(
    source: Source, order: str | Mapping[str, Any], global_batch: int, ranks: int, seed: int, **limits: Any
) -> BatchPlan:
    """Return the plan of `data.order`; limits: ``last_batch`` and ``limit`` of BatchPlan."""
    name, arguments = name_and_arguments(order)
    shape: Any = {"num_samples": len(source), "global_batch": global_batch, "ranks": ranks, "seed": seed}
    if name not in ("balanced", "classes"):
        return BatchPlan(**shape, order=name, **limits, **arguments)
    kind = BalancedPlan if name == "balanced" else ClassesPlan
    return kind(**shape, order=name, labels=source.labels(), **limits, **arguments)


def check_save_dir(source: Source, save_dir: str) -> None:
    """Raise OptionError if the save folder would become a class folder of the dataset."""
    if not isinstance(source, ImageFolderSource) or isinstance(source.root, str):
        return
    if Path(save_dir).resolve().is_relative_to(source.root.resolve()):
        raise OptionError(
            f"checkpoint.save_dir {save_dir} is inside {source.root}, where every folder is a class; choose "
            "another folder"
        )


def cached(source: Source, cache: str, recipe: Recipe, num_workers: int, keeps_decoded: bool) -> Source:
    """Return a source with a cache, unless it is ``none``; see `data.cache`."""
    if (wanted := cache_place(cache)) is None:
        return source
    if choose_kind(source, recipe) == "processes" and num_workers:
        raise OptionError(
            f"data.cache '{cache}' works only with threads, but your transform or Dataset runs in processes; "
            "set data.num_workers to 0, or remove the cache"
        )
    place, limit = wanted
    folder = None if place == "memory" else Path(place)
    stored = SampleCache(folder, limit, len(source))
    return CachedSource(source, stored, recipe.image_shape, keeps_decoded)


def count_named_classes(
    source: Source,
    checkpoint: OpenedCheckpoint | None,
    class_num: int | None,
    is_strict: bool,
) -> tuple[int, ClassNames | None, list[str]]:
    """Return the number of classes, their names or None, and notes about the labels.

    Numbers the classes as in the checkpoint. The other arguments are those of `count_classes`.
    """
    names, notes = number_classes(source, checkpoint)
    class_num, more = count_classes(source, class_num, is_strict, least=len(names or ()))
    if names is None:
        return class_num, None, notes + more
    return class_num, names.resized(class_num), notes + more


def count_classes(
    source: Source, class_num: int | None, is_strict: bool, least: int = 0
) -> tuple[int, list[str]]:
    """Return the number of classes, at least `least`, and notes about the labels.

    class_num: as set by the user, or None. is_strict: a label out of range raises DataError.
    """
    count = len(source)
    if not count:
        raise DataError("the dataset contains no samples; check data.dataset_dir")
    labels = source.labels()
    highest = int(labels.max())
    largest = max(highest, least - 1)
    if class_num is None and highest >= max(_MANY_CLASSES, _MUCH_EMPTIER * count, least):
        where = source.name(int(labels.argmax()))
        raise OptionError(
            f"the label {largest} at {where} would mean {largest + 1:,} classes for {count:,} images, which "
            f"is likely a typo; fix the label, or confirm with head.class_num {largest + 1}"
        )
    class_num = class_num or largest + 1
    if class_num < 2:
        raise OptionError(
            f"all {count} images have the same class, or head.class_num is 1; expected 2 or more classes: is "
            "data.dataset_dir the right folder, not its parent?"
        )
    is_bad = (labels < 0) | (labels >= class_num)
    if is_strict or is_bad.all():
        check_labels(source, class_num)
    notes = []
    if is_bad.any():
        notes.append(f"note: {is_bad.sum()} samples have labels outside 0..{class_num - 1}")
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
    numbers = saved.numbered(own)
    _check_equal(path, own, saved, numbers)
    source.renumber(numbers)
    return saved.with_names(own, numbers), []


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


def check_unseen(place: str, names: ClassNames | None, checkpoint: OpenedCheckpoint) -> None:
    """Raise DataError if a dataset is the one that was trained, or has classes with names of trained ones.

    place: of the dataset, as messages show it.
    """
    path, manifest = checkpoint
    trained_place = manifest.options.get("data", {}).get("dataset_dir")
    if names is None and isinstance(trained_place, str) and place == shown(trained_place):
        raise DataError(f"the classes of {place} were trained; choose images of other classes")
    trained = read_class_names(path, manifest)
    if trained is None or names is None:
        return
    both = np.flatnonzero((trained.numbers_of(names) >= 0) & (names.lengths() > 0))
    if len(both):
        raise DataError(
            f"{len(both):,} of the {len(names):,} classes of {place} were trained, such as "
            f"'{names[int(both[0])]}'; choose images of other classes"
        )


def is_generator_reader(reader: Any, name: str) -> bool:
    """Return whether a reader is a function that returns a generator, not a map-style dataset.

    Raises OptionError, with the reader's name, if it is neither.
    """
    if callable(reader) and not hasattr(reader, "__getitem__"):
        return True
    is_dataset = hasattr(reader, "__getitem__") and hasattr(reader, "__len__")
    if not is_dataset or isinstance(reader, (str, bytes, Mapping, type)):
        raise OptionError(
            f"{name} is {shown_value(reader)}; expected a function that returns a generator of (image, "
            "label), a torch Dataset or a DataLoader (for a folder or file, set data.dataset_dir)"
        )
    return False


def as_reader(reader: Any, name: str) -> Any:
    """Return a DataLoader or IterableDataset as a function that returns its iterator; others unchanged."""
    if isinstance(getattr(reader, "sampler", None), DistributedSampler):
        raise OptionError(
            f"{name} has a DistributedSampler, but plsc divides the samples over the ranks; remove it"
        )
    return reader.__iter__ if isinstance(reader, (DataLoader, IterableDataset)) else reader


def _length_of(reader: Any) -> int | None:
    """Return the number of samples per epoch of `as_reader(loader)`; None if it is unknown."""
    loader = getattr(reader, "__self__", None)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    count = len(loader.sampler)  # type: ignore[arg-type]
    return count - count % loader.batch_size if loader.drop_last and loader.batch_size else count
