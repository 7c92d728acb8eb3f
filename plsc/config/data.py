"""Options of the training data and its loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plsc.config.option import (
    WRONG,
    Size,
    arguments_of,
    at_least,
    between,
    convert,
    declare,
    described_fields,
    not_empty,
    of_model,
    of_run,
    one_of,
    with_arguments,
)


@dataclass(frozen=True)
class OrderArguments:
    """Arguments of the orders of samples."""

    balance: float = declare(
        0.5,
        "balanced: share of a class of n images in an epoch, in proportion to n^balance; 0: equal; 1: as in "
        "the data",
        check=between(0, 1),
    )
    images_per_class: int = declare(4, "classes: images of each class in a global batch", check=at_least(1))
    block_samples: int = declare(1024, "block: neighbouring samples per block", check=at_least(1))
    pool_samples: int = declare(65536, "block: samples that are shuffled together", check=at_least(1))


ORDER_ARGUMENTS = {
    "balanced": ("balance",),
    "classes": ("images_per_class",),
    "block": ("block_samples", "pool_samples"),
}
"""The arguments of each order of samples."""


@dataclass(frozen=True)
class FormatArguments:
    """How a dataset is read, where its format leaves it open; None: detected."""

    image_column: str | None = declare(
        None, "column (tar: file suffix) of the images; None: detected by name", check=not_empty
    )
    label_column: str | None = declare(
        None, "column (tar: file suffix) of the labels; None: detected by name", check=not_empty
    )
    label_map: str | None = declare(
        None,
        "file of class names and ids: .json, or lines of name, tab, id; None: sorted names",
        check=not_empty,
    )
    image_folder: str | None = declare(
        None,
        "folder or URL of the paths in a list; None: that of the file",
        check=not_empty,
    )
    allowed: str | tuple[str, ...] = declare((), "prefixes of URLs that lists may name: s3://bucket/")


def cache_place(text: str) -> tuple[str, int] | None:
    """Return ``memory`` or a folder, and bytes, of a `data.cache` such as ``memory:4G``; else None."""
    place, _, size = text.rpartition(":")
    count = convert(size, Size)
    return (place, count) if place.strip() and count is not WRONG and count > 0 else None


@dataclass(frozen=True)
class DataOptions:
    """Training data and its loading."""

    dataset_dir: str = declare(
        "./train_data",
        "training data: a path or fsspec URL (formats: docs/data.md)",
        "set_dataset_dir(directory, **format_arguments)",
        not_empty,
    )
    format_arguments: dict[str, Any] | None = declare(
        None,
        f"how the dataset is read: {described_fields(FormatArguments)}",
        "set_dataset_dir(**format_arguments)",
        arguments_of(FormatArguments, "data.format_arguments"),
    )
    train_image_num: int | None = of_run(
        None, "images per epoch of a reader, if known", "set_train_image_num(num)", at_least(1)
    )
    val_targets: str | None = declare(
        None,
        "pair files in the dataset folder, without .bin, or text lists such as pairs.txt, separated by "
        "commas; None: 'lfw' if lfw.bin exists",
        "set_val_targets(targets)",
    )
    val_dir: str | None = declare(
        None,
        "dataset of held-out images of the same classes, to measure top-1 and top-5 accuracy",
        "set_val_dir(directory)",
        not_empty,
    )
    num_workers: int = declare(
        2,
        "threads per rank (processes for a Dataset or transform of yours) that load images; 0: load between "
        "steps",
        "set_num_workers(num)",
        between(0, 1024),
    )
    order: str | dict[str, Any] = of_run(  # noqa: RUF009
        "global",
        "order of the samples: global (all shuffled), block (blocks of neighbours shuffled), "
        "sequential, balanced (small classes "
        "more often), or classes (images_per_class images of each class in a batch); or a mapping with name "
        f"and arguments: {described_fields(OrderArguments)}",
        "set_order(order, **arguments)",
        with_arguments(
            one_of("global", "block", "sequential", "balanced", "classes"),
            OrderArguments,
            ORDER_ARGUMENTS,
        ),
    )
    cache: str = declare(
        "none",
        "where samples are kept after the first epoch, and how many bytes per rank: none, memory:4G, or a "
        "folder, such as /scratch:40G",
        "set_cache(where)",
        lambda text: None if text == "none" or cache_place(text) else "none, memory:SIZE or FOLDER:SIZE",
    )
    last_batch: str = of_run(
        "pad",
        "incomplete last batch of an epoch: pad (with the epoch's first samples), keep or drop",
        "set_last_batch(policy)",
        one_of("pad", "keep", "drop"),
    )
    bad_images: str = of_run(
        "stop",
        "what to do with an unusable sample: stop, or skip it",
        "set_bad_images(policy)",
        one_of("stop", "skip"),
    )
    flip: bool = of_model(
        True,
        "flip training images with probability 0.5; in evaluation, add the flipped image's embedding",
        "set_flip(flip)",
    )
    landmarks: str | None = declare(
        None,
        "file in the dataset folder with five landmarks per image, to align faces "
        "(docs/evaluate.md#align-faces)",
        "set_landmarks(path)",
        not_empty,
    )

    @property
    def allowed(self) -> str | Sequence[str]:
        """Prefixes of URLs that lists may name."""
        return (self.format_arguments or {}).get("allowed", ())
