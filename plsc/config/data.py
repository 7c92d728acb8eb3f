"""The options of what is read, and how; the data sets of `data.datasets`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plsc.config.head import HeadOptions
from plsc.config.option import (
    at_least,
    between,
    declare,
    more_than,
    not_empty,
    of_model,
    of_run,
    one_of,
    read_fields,
)
from plsc.errors import OptionError, suggest

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # part of the keys in a checkpoint, which dots divide
HEAD_OPTIONS = ("class_num", "loss_type", "margin", "scale", "sample_ratio")
"""Options of the group ``head`` that a data set may have of its own."""


def is_name(text: str) -> bool:
    """Whether a data set may have this name."""
    return _NAME.fullmatch(text) is not None


def _name(text: str) -> str | None:
    return None if is_name(text) else "1 to 64 letters, digits, _ and -"


def _of_head(name: str) -> Any:
    return field(default=None, metadata=HeadOptions.__dataclass_fields__[name].metadata)


@dataclass(frozen=True)
class DataSet:
    """A data set with a label space and a head of its own.

    path: as `data.dataset_dir`; weight: its share of each step's images, next to the weights of the others.
    The rest: options of its head; None: those of the run.
    """

    name: str = declare(None, "of the data set", check=_name)
    path: str = declare(None, "folder, file or URL, as set_dataset_dir takes it", check=not_empty)
    weight: float = declare(1.0, "share of a step's images, by the side of the others", check=more_than(0))
    class_num: int | None = _of_head("class_num")
    loss_type: str | None = _of_head("loss_type")
    margin: float | None = _of_head("margin")
    scale: float | str | None = _of_head("scale")
    sample_ratio: float | None = _of_head("sample_ratio")

    def as_dict(self) -> dict[str, Any]:
        """Return what `data.datasets` holds of it: what is set, as plain values."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


def read_data_sets(values: Sequence[Mapping[str, Any]]) -> list[DataSet]:
    """Return the data sets that `data.datasets` lists. Raises OptionError for one that is wrong."""
    found: dict[str, DataSet] = {}
    for value in values:
        name = value.get("name")
        is_named = isinstance(name, str) and is_name(name)
        fields, others = read_fields(DataSet, value, f"data set {name}" if is_named else "a data set")
        for key in others:
            raise OptionError(f"a data set has no {key!r}; {suggest(str(key), fields)}")
        if name in found:
            raise OptionError(f"there are two data sets {name!r}; give each a name of its own")
        found[fields["name"]] = DataSet(**fields)
    return list(found.values())


def _three_shares(values: tuple[float, ...]) -> str | None:
    good = len(values) == 3 and all(0 <= value <= 1 for value in values)
    return None if good else "three numbers from 0 to 1: brightness, contrast, saturation"


def _data_sets(values: tuple[dict[str, Any], ...]) -> None:
    read_data_sets(values)


@dataclass(frozen=True)
class DataOptions:
    """What is read, and how."""

    dataset_dir: str = declare(
        "./train_data",
        "the training data: a folder (label.txt and images/, one folder of images per class, or base64 "
        "parts), a file or shards of .rec, .parquet, .tar, .csv, .jsonl or .lmdb, or an fsspec URL of one",
        "set_dataset_dir(directory)",
        not_empty,
    )
    datasets: tuple[dict[str, Any], ...] = declare(
        (),
        "several data sets with a head each, instead of dataset_dir: each has a name and a path, and may "
        "have a weight, class_num, loss_type, margin, scale and sample_ratio; add_dataset adds one",
        "set_datasets(datasets)",
        _data_sets,
    )
    train_image_num: int | None = of_run(
        None,
        "images per epoch, for readers that cannot tell; when not set, counted",
        "set_train_image_num(num)",
        at_least(1),
    )
    val_targets: str | None = declare(
        None,
        "names of pair files (name.bin in the dataset folder), separated by commas; "
        "when not set, 'lfw' if lfw.bin is there",
        "set_val_targets(targets)",
    )
    num_workers: int = declare(
        2, "threads or processes per rank that read images ahead; 0 reads between the steps",
        "set_num_workers(num)", between(0, 1024),
    )  # fmt: skip
    loader: str = declare(
        "auto",
        "what reads images: threads, processes (for Python code of your own), or auto, which chooses",
        "set_loader(kind)",
        one_of("auto", "threads", "processes"),
    )
    order: str = of_run(
        "global",
        "order of an epoch: global (all shuffled), block (neighbours stay near: disks, remote stores), "
        "sequential, or rank_files (rank r reads part r of file_list.txt alone, shuffled)",
        "set_order(order)",
        one_of("global", "block", "sequential", "rank_files"),
    )
    block_samples: int = of_run(
        1024, "order block: neighbouring samples that are read together", "set_block_samples(num)",
        at_least(1),
    )  # fmt: skip
    pool_samples: int = of_run(
        65536, "order block: samples that are shuffled among each other", "set_pool_samples(num)",
        at_least(1),
    )  # fmt: skip
    reader_shards_itself: bool = of_run(
        False,
        "call a generator reader as reader(rank, ranks): it yields this rank's samples only; one with the "
        "attribute shards_itself = True always is",
        "set_reader_shards_itself(flag)",
    )
    cache: str = declare(
        "none",
        "keep what the first epoch reads: none, memory or disk",
        "set_cache(where)",
        one_of("none", "memory", "disk"),
    )
    cache_bytes: int = declare(
        2 * 2**30,
        "the most bytes that the cache of a rank takes",
        "set_cache_bytes(num)",
        at_least(1),
    )
    cache_decoded: bool = declare(
        False,
        "keep pixels of the network's size, not encoded images: no decoding again, about 8 times the bytes",
        "set_cache_decoded(flag)",
    )
    cache_dir: str | None = declare(
        None,
        "local folder of the disk cache; when not set, the system's for temporary files",
        "set_cache_dir(directory)",
        not_empty,
    )
    last_batch: str = of_run(
        "pad",
        "the last batch of an epoch: pad (repeats the epoch's first samples), keep (smaller) or drop",
        "set_last_batch(policy)",
        one_of("pad", "keep", "drop"),
    )
    bad_images: str = of_run(
        "stop",
        "a sample that cannot be used: stop the run, skip (left out), or replace (another, drawn by the "
        "seed); what is passed over is counted and listed in bad_samples.txt",
        "set_bad_images(policy)",
        one_of("stop", "skip", "replace"),
    )
    crop_padding: int = of_run(
        0, "augmentation: pad by so many black pixels and cut out at random", "set_crop_padding(pixels)",
        between(0, 4096),
    )  # fmt: skip
    colour_jitter: tuple[float, ...] = of_run(
        (0.0, 0.0, 0.0),
        "augmentation: vary brightness, contrast and saturation by factors in [1 - x, 1 + x]",
        "set_colour_jitter(strengths)",
        _three_shares,
    )
    low_resolution: float = of_run(
        0.0, "augmentation: share of images shrunk to 25-100 % of their size and enlarged again",
        "set_low_resolution(share)", between(0, 1),
    )  # fmt: skip
    random_erasing: float = of_run(
        0.0, "augmentation: share of images of which a rectangle, 2-20 % of the area, turns grey",
        "set_random_erasing(share)", between(0, 1),
    )  # fmt: skip
    flip: bool = of_model(
        True,
        "mirror half of the training images, and add the mirrored image's embedding in evaluation",
        "set_flip(flip)",
    )
    image_column: str | None = declare(
        None,
        "column (CSV, JSON lines, Parquet) or suffix (tar) of the image; when not set, the usual names",
        "set_image_column(name)",
        not_empty,
    )
    label_column: str | None = declare(
        None,
        "column (CSV, JSON lines, Parquet) or suffix (tar) of the label; when not set, the usual names",
        "set_label_column(name)",
        not_empty,
    )
    label_map: str | None = declare(
        None,
        "file of class names and their ids, .json or lines of name<TAB>id; when not set, the ids are the "
        "ranks of the sorted names",
        "set_label_map(path)",
        not_empty,
    )
    class_depth: int | None = declare(
        None,
        "depth of the folders that are classes; when not set, 1, and class folders that hold folders of "
        "images are refused",
        "set_class_depth(depth)",
        at_least(1),
    )
