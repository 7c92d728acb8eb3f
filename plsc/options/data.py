"""The options of what is read, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plsc.option import at_least, between, declare, not_empty, of_model, of_run, one_of
from plsc.options.data_set import read_data_sets


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
