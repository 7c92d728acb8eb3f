"""The training data of a run: from the options and the user's reader to a loader."""

from __future__ import annotations

import multiprocessing
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plsc.config import Config
from plsc.config.data import DataOptions
from plsc.data.augment import Augmentation
from plsc.data.cache import CachedSource, DiskCache, MemoryCache
from plsc.data.class_names import ClassNames, first_and_last_class
from plsc.data.files import read_file_list
from plsc.data.loader import SourceLoader, choose_kind
from plsc.data.mixture import MixturePlan
from plsc.data.order import BatchPlan
from plsc.data.reader import ReaderLoader
from plsc.data.samples import Recipe
from plsc.data.sources import ImageFolderSource, check_labels, open_source
from plsc.data.sources.base import Source
from plsc.data.sources.base64_lines import Base64Source
from plsc.data.sources.torch_dataset import TorchDatasetSource
from plsc.data.transform import Transform
from plsc.errors import DataError, OptionError
from plsc.parallel.world import World
from plsc.seeds import hash_key
from plsc.train.build_head import TrainingSet
from plsc.train.class_numbers import OpenedCheckpoint, number_classes

Loader = SourceLoader | ReaderLoader

# Labels that make more classes than both, and so hardly any with an image, are taken for a slip.
_MANY_CLASSES = 10**7
_MUCH_EMPTIER = 1000  # classes for an image


@dataclass
class Feed:
    """The loader, the number of samples if it is known, of classes, and what is odd about them.

    first_sample: where this rank's part of the dataset begins, when it reads no other. is_of_ranks: which
    samples a step takes depends on the number of ranks. sets: the data sets, where there are several.
    class_names: of each head, '' where there is one, whose classes have names.
    """

    loader: Loader
    num_samples: int | None
    class_num: int
    notes: str = ""
    first_sample: int = 0
    is_of_ranks: bool = False
    sets: list[TrainingSet] = field(default_factory=list)
    class_names: dict[str, ClassNames] = field(default_factory=dict)


def is_generator_reader(reader: Any) -> bool:
    """Whether this is a function that returns a generator, and not an indexed dataset."""
    return callable(reader) and not hasattr(reader, "__getitem__")


def open_training_source(options: Config, reader: Any) -> Source:
    """Return the source of a dataset object, or of the dataset folder when there is none."""
    if reader is not None:
        if not (hasattr(reader, "__getitem__") and hasattr(reader, "__len__")):
            raise OptionError(
                f"the reader is of type {type(reader).__name__}; expected a function that returns a "
                "generator, or a map-style torch Dataset"
            )
        return TorchDatasetSource(reader)
    data = options.data
    return open_source(
        data.dataset_dir,
        image_column=data.image_column,
        label_column=data.label_column,
        label_map=data.label_map,
        class_depth=data.class_depth,
    )


def build_feed(
    options: Config,
    world: World,
    reader: Any,
    transform: Transform | None,
    global_batch: int,
    checkpoint: OpenedCheckpoint | None = None,
) -> Feed:
    """Return the loader of the training data; a collective.

    checkpoint: the one that the run resumes. Raises OptionError, DataError or CheckpointError.
    """
    is_generator = reader is not None and is_generator_reader(reader)
    if is_generator or options.data.order == "rank_files":
        make = _feed_from_generator if is_generator else _feed_from_rank_files
        feed = make(options, world, reader, transform, global_batch)
        kept, note = number_classes(None, checkpoint)
        feed.notes = join_notes(note, feed.notes)
        feed.class_names = {} if kept is None else {"": kept.resized(feed.class_num)}
        return feed
    source = open_training_source(options, reader)
    check_save_dir(source, options)
    class_num, names, note = count_named_classes(source, options, checkpoint)
    data = options.data
    plan = BatchPlan(
        len(source),
        global_batch,
        world.size,
        options.train.seed,
        data.last_batch,
        data.order,
        data.block_samples,
        data.pool_samples,
    )
    recipe = make_recipe(options, transform, class_num)
    loader = source_loader(source, plan, world.rank, recipe, options, world)
    notes = join_notes(note, loader.describe())
    return Feed(loader, len(source), class_num, notes, class_names=names)


def _feed_from_generator(
    options: Config, world: World, reader: Any, transform: Transform | None, global_batch: int
) -> Feed:
    data, class_num = options.data, options.head.class_num
    if class_num is None:
        raise OptionError("a generator reader cannot tell its classes; call set_class_num")
    if transform is not None:
        raise OptionError(
            "train_transform is for a dataset; a generator reader transforms its images itself"
        )
    if data.loader == "threads" and data.num_workers:
        raise OptionError(
            "data.loader is 'threads', but a generator reader draws from Python's and torch's global "
            "generators, which threads share; use 'processes', or set_num_workers(0)"
        )
    loader = ReaderLoader(
        reader,
        global_batch=global_batch,
        rank=world.rank,
        ranks=world.size,
        image_shape=_image_shape(options),
        class_num=class_num,
        seed=options.train.seed,
        last_batch=data.last_batch,
        num_samples=data.train_image_num,
        shards_itself=data.reader_shards_itself,
        ahead=data.num_workers > 0 and "fork" in multiprocessing.get_all_start_methods(),
        pin_memory=world.device.type == "cuda",
    )
    return Feed(
        loader,
        data.train_image_num,
        class_num,
        loader.describe(),
        is_of_ranks=loader.shards_itself,
    )


def _feed_from_rank_files(
    options: Config, world: World, reader: Any, transform: Transform | None, global_batch: int
) -> Feed:
    """Each rank has a plan of its own over its own part, of as many samples as every other rank's."""
    if reader is not None:
        raise OptionError("data.order 'rank_files' reads the files of file_list.txt, not a reader")
    if global_batch % world.size:
        raise OptionError(
            f"data.order 'rank_files' needs the same batch on every rank, but the global batch is "
            f"{global_batch} on {world.size} ranks"
        )
    source = open_rank_source(options.data.dataset_dir, world)
    class_num, note = count_classes(source, options, world)
    plan = BatchPlan(
        len(source),
        global_batch // world.size,
        1,
        hash_key(options.train.seed, world.rank),
        options.data.last_batch,
    )
    first = world.rank * len(source)
    recipe = make_recipe(options, transform, class_num, first_sample=first)
    loader = source_loader(source, plan, 0, recipe, options, world)
    notes = join_notes(note, loader.describe())
    return Feed(loader, len(source) * world.size, class_num, notes, first, is_of_ranks=True)


NO_AUGMENTATION = {
    "data.flip": False,
    "data.crop_padding": 0,
    "data.colour_jitter": (0.0, 0.0, 0.0),
    "data.low_resolution": 0.0,
    "data.random_erasing": 0.0,
}
"""The options of all augmentations that `make_recipe` reads, as they leave images alone."""


def make_recipe(
    options: Config, transform: Transform | None, class_num: int, first_sample: int = 0
) -> Recipe:
    """Return how a sample becomes an image, as the options say; see `Recipe`."""
    data = options.data
    brightness, contrast, saturation = data.colour_jitter
    augmentation = Augmentation(
        flip=data.flip,
        crop_padding=data.crop_padding,
        low_resolution=data.low_resolution,
        colour=(brightness, contrast, saturation),
        erase=data.random_erasing,
    )
    return Recipe(
        _image_shape(options),
        options.train.seed,
        augmentation,
        transform,
        data.bad_images,
        class_num,
        first_sample,
    )


def source_loader(
    source: Source,
    plan: BatchPlan | MixturePlan,
    rank: int,
    recipe: Recipe,
    options: Config,
    world: World,
) -> SourceLoader:
    """Return the loader of a source, behind a cache if the options ask for one."""
    data = options.data
    kind, reason = choose_kind(data.loader, source, recipe, data.num_workers)
    if data.cache != "none":
        if kind == "processes" and data.num_workers:
            way_out = "set_num_workers(0)" if data.loader == "auto" else "set_loader('auto')"
            raise OptionError(
                f"data.cache '{data.cache}' is shared by threads, but this run reads by processes, "
                f"{reason}; {way_out}, or leave the cache out"
            )
        source = CachedSource(
            source, _open_cache(data, len(source)), recipe.image_shape, data.cache_decoded
        )
    return SourceLoader(
        source,
        plan,
        rank,
        recipe,
        kind=data.loader,
        num_workers=data.num_workers,
        pin_memory=world.device.type == "cuda",
    )


def _open_cache(data: DataOptions, num_samples: int) -> MemoryCache | DiskCache:
    if data.cache == "memory":
        return MemoryCache(data.cache_bytes)
    folder = Path(data.cache_dir or tempfile.gettempdir())
    return DiskCache(folder, data.cache_bytes, num_samples)


def check_save_dir(source: Source, options: Config) -> None:
    """Refuse to save into a folder whose folders are classes."""
    save_dir = Path(options.checkpoint.save_dir).resolve()
    if isinstance(source, ImageFolderSource) and save_dir.is_relative_to(source.root.resolve()):
        raise OptionError(
            f"checkpoint.save_dir {options.checkpoint.save_dir} is inside {options.data.dataset_dir}, "
            "where every folder is a class; choose another"
        )


def count_named_classes(
    source: Source, options: Config, checkpoint: OpenedCheckpoint | None, head: str = ""
) -> tuple[int, dict[str, ClassNames], str]:
    """Return the number of classes, their names by head if they have some, and notes about labels.

    The classes of a source are numbered by `number_classes` before. head: the name of one of several.
    """
    names, note = number_classes(source, checkpoint, head)
    class_num, more = count_classes(source, options, least=0 if names is None else len(names))
    if names is None:
        return class_num, {}, join_notes(note, more)
    line = ""
    if getattr(source, "class_names", None) is not None:  # and not the checkpoint alone has names
        line = f"classes: {first_and_last_class(source, names)}"
    return class_num, {head: names.resized(class_num)}, join_notes(note, more, line)


def count_classes(
    source: Source, options: Config, world: World | None = None, least: int = 0
) -> tuple[int, str]:
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
    (largest,) = world.agree_max(max(int(labels.max()), least - 1))
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
    note = ""
    if is_bad.any():
        note = f"note: {is_bad.sum()} samples have labels outside 0..{class_num - 1}"
    if world.size > 1:  # a class without images here may have some on another rank
        return class_num, note
    return class_num, join_notes(note, _note_empty_classes(labels[~is_bad], class_num))


def _note_empty_classes(labels: np.ndarray, class_num: int) -> str:
    """Return a line about classes without an image, or nothing: labels that count from 1, perhaps."""
    has_image = np.zeros(class_num, dtype=bool)
    has_image[labels] = True
    empty = np.flatnonzero(~has_image)
    if not len(empty):
        return ""
    return (
        f"note: {len(empty)} of {class_num} classes have no image, the first is {empty[0]}; labels "
        "count from 0"
    )


def _image_shape(options: Config) -> tuple[int, int, int]:
    channels, height, width = options.model.image_shape
    return channels, height, width


def join_notes(*notes: str) -> str:
    """Return the notes that are not empty, a line each."""
    return "\n".join(note for note in notes if note)


def open_rank_source(data_dir: str, world: World) -> Source:
    """Return the source of this rank's part: the r-th of those that ``data_dir/file_list.txt`` names.

    The parts of other ranks need not be on this machine. Raises DataError on all ranks if there is not one
    part for each rank, if one cannot be opened, or if their counts differ: then the ranks would not make
    the same steps. A collective.
    """
    source: Source | None = None
    problem = ""
    try:
        source = _open_part(data_dir, _own_part(data_dir, world))
    except DataError as error:
        problem = str(error)
    everywhere = world.all_gather_object((0 if source is None else len(source), problem))
    for rank, (_, text) in enumerate(everywhere):
        if text:
            raise DataError(f"rank {rank}: {text}")
    counts = [count for count, _ in everywhere]
    few, many = counts.index(min(counts)), counts.index(max(counts))
    if counts[few] != counts[many] or source is None:
        raise DataError(
            f"data.order 'rank_files' needs as many samples on every rank, but rank {few} has "
            f"{counts[few]} and rank {many} has {counts[many]}; partition the data for {world.size} "
            "ranks anew, or use another order"
        )
    return source


def _open_part(data_dir: str, part: str) -> Source:
    """Return the source of one part: base64 lines, unless its name tells another format."""
    is_plain_text = Path(part).suffix.lower() in ("", ".txt", ".b64", ".base64", ".tsv")
    if is_plain_text and not Path(part).is_dir():
        return Base64Source(data_dir, files=[part])
    return open_source(part)


def _own_part(data_dir: str, world: World) -> str:
    parts = read_file_list(data_dir, must_exist=False)
    if len(parts) != world.size:
        raise DataError(
            f"data.order 'rank_files' needs a part for each rank, but {data_dir}/file_list.txt names "
            f"{len(parts)} for {world.size} ranks; start {len(parts)} ranks, or partition the data anew"
        )
    return parts[world.rank]
