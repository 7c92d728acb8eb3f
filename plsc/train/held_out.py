"""The held-out set: labelled images on which top-1 and top-5 accuracy are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from plsc.config import Config
from plsc.data.class_names import ClassNames, class_names_of
from plsc.data.order import spread
from plsc.errors import DataError, OptionError
from plsc.evaluate.classification import ClassificationResult
from plsc.evaluate.embed import ImagesOf
from plsc.train.data import open_training_source

NAME = "val"  # in results and metrics


@dataclass(frozen=True)
class HeldOutSet:
    """The images of `data.val_dir`, N encoded images, and their class numbers, int64 [N]."""

    METRICS: ClassVar = ClassificationResult.METRICS

    images: Sequence[Any]
    labels: np.ndarray
    name: str = NAME


def open_held_out(
    options: Config,
    class_num: int,
    class_names: ClassNames | None,
    targets: Sequence[str],
    limit: int | float,
    ranks: int,
) -> list[HeldOutSet]:
    """Return the held-out set of `data.val_dir` in a list, which is empty if the option is not set.

    class_num, class_names: the classes of the head; labels that are names are numbered like them. targets:
    names of the pair files. limit: limit of the batches.

    Raises:
        DataError: there are no images, or an image has a class that the head lacks.
        OptionError: a pair file has the same name in the results.
    """
    place = options.data.val_dir
    if place is None:
        return []
    if NAME in targets:
        raise OptionError(
            f"data.val_targets has a pair file named {NAME!r}, which is the name of the results on "
            "data.val_dir; rename the file"
        )
    source = open_training_source(options.changed({"data.dataset_dir": place}), None)
    if not len(source):
        raise DataError(f"data.val_dir {place} contains no images; choose another dataset")
    stored, own = source.labels(), class_names_of(source)
    labels = np.array(stored, np.int64)
    if own is not None:
        if class_names is None:
            raise DataError(
                f"the labels in data.val_dir {place} are class names, such as '{own[0]}', but the classes of "
                "the training data have no names; use class numbers, or the format argument label_map"
            )
        labels = class_names.numbers_of(own)[labels]
    unknown = np.flatnonzero((labels < 0) | (labels >= class_num))
    if len(unknown):
        first = int(unknown[0])
        label = f"label {stored[first]}" if own is None else f"class '{own[stored.item(first)]}'"
        raise DataError(
            f"{label} at {source.name(first)} of data.val_dir {place} is not one of the {class_num:,} "
            f"classes of the training data ({len(unknown):,} of {len(labels):,} images have such labels); "
            "fix the labels, or remove these images"
        )
    chosen = spread(labels, options.train.test_batch_size * ranks, limit)
    return [HeldOutSet(ImagesOf(source, chosen), labels[chosen])]
