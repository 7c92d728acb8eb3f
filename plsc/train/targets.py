"""What a run is evaluated on: pair files, and the held-out set with its top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from plsc.data.class_names import ClassNames
from plsc.data.order import spread
from plsc.data.pairs import read_pairs
from plsc.data.sources.base import class_names_of
from plsc.errors import DataError, refusing
from plsc.evaluate.embed import ClassificationResult, EvaluatedNetwork, ImagesOf, classify
from plsc.evaluate.verification import VerificationResult, read_pair_list, verify
from plsc.heads import Head
from plsc.parallel.world import World
from plsc.storage.disk import check_inside
from plsc.train.data import align_source, open_labelled

TestReader = Callable[[str, str], tuple[Sequence[Any], Sequence[str]]]
"""``reader(dataset_dir, val_targets)``, like plsc.utils.jpeg_reader.test."""
NAME = "val"  # in results and metrics
DEFAULT_TARGET = "lfw"
_FOLDS = 10


@dataclass(frozen=True)
class Target:
    """The P pairs of a file.

    images: N encoded images or faces to align, or arrays from a reader. is_same: bool [P]. pairs: the images
    of each pair, int64 [P, 2]; None: 2p and 2p + 1.
    """

    METRICS: ClassVar = VerificationResult.METRICS

    name: str
    images: Sequence[Any]
    is_same: np.ndarray
    pairs: np.ndarray | None = None


def open_pairs(
    path: str,
    name: str,
    folder: str | None = None,
    *,
    allowed: Sequence[str] = (),
    landmarks: str | None = None,
    is_strict: bool = True,
) -> Target:
    """Return the pairs of a .bin file, or of a list of pairs, whose images are below `folder`.

    allowed: other folders where the images may be. landmarks, is_strict: see `align_source`.
    """
    if path.endswith(".bin"):
        stored = read_pairs(path)
        return Target(name, stored.images, stored.is_same)
    listed = read_pair_list(path, folder, allowed)
    numbers = np.arange(len(listed.images))
    images = ImagesOf(align_source(listed.images, landmarks, is_strict), numbers)
    return Target(name, images, listed.is_same, listed.pairs)


def load_targets(
    names: str,
    folder: Path,
    batch: int,
    limit: int | float = 1.0,
    test_reader: TestReader | None = None,
    *,
    allowed: Sequence[str] = (),
    landmarks: str | None = None,
    is_strict: bool = True,
) -> list[Target]:
    """Return the pair files and lists of these names, separated by commas.

    folder: of the dataset. limit: of the batches per file, of `batch` images; at least ten pairs are left.
    allowed, landmarks, is_strict: see `open_pairs`. Raises DataError for a missing or damaged file, or one
    with too few pairs for ten folds.
    """
    if test_reader is not None:
        targets = _read_targets(test_reader, str(folder), names)
    else:
        targets = []
        for name in filter(None, (part.strip() for part in names.split(","))):
            stored, listed = folder / f"{name}.bin", folder / name
            place = next(filter(Path.is_file, (stored, listed, Path(name))), None)
            if place is None:
                raise DataError(f"there is no pair file {stored}, {listed} or {name}")
            check_inside(place, folder)
            how: Any = {"allowed": allowed, "landmarks": landmarks, "is_strict": is_strict}
            targets.append(open_pairs(str(place), name, **how))
    for target in targets:
        same = int(target.is_same.sum())
        if len(target.is_same) < _FOLDS or same in (0, len(target.is_same)):
            raise DataError(
                f"{target.name} has {len(target.is_same)} pairs, {same} of them of the same class; expected "
                f"at least {_FOLDS} pairs, with both same and different classes"
            )
    return [_limited(target, spread(target.is_same, batch / 2, limit, _FOLDS)) for target in targets]


def _limited(target: Target, chosen: np.ndarray) -> Target:
    if len(chosen) == len(target.is_same):
        return target
    pairs = np.arange(len(target.images)).reshape(-1, 2) if target.pairs is None else target.pairs
    numbers, rows = np.unique(pairs[chosen], return_inverse=True)
    images = _chosen(target.images, numbers)
    return Target(target.name, images, target.is_same[chosen], rows.reshape(-1, 2))


def _chosen(items: Sequence[Any], numbers: np.ndarray) -> Sequence[Any]:
    if isinstance(items, ImagesOf):
        return items[numbers]
    return [items[number] for number in numbers.tolist()]


def _read_targets(test_reader: TestReader, folder: str, names: str) -> list[Target]:
    """Return the pair files of a test reader. Raises OptionError for a wrong reader or result."""
    expected = "expected ([(images, is_same), ...], names), as plsc.utils.jpeg_reader.test returns"
    with refusing("cannot use test_reader or its result", expected):
        pair_sets, set_names = test_reader(folder, names)
        return [
            Target(name, list(arrays[0]), np.asarray(is_same, dtype=bool))
            for name, (arrays, is_same) in zip(set_names, pair_sets, strict=True)
        ]


@dataclass(frozen=True)
class HeldOutSet:
    """The images of `data.val_dir`, N encoded images, and their class numbers, int64 [N]."""

    METRICS: ClassVar = ClassificationResult.METRICS

    images: Sequence[Any]
    labels: np.ndarray
    name: str = NAME


def open_held_out(
    place: str,
    class_num: int,
    class_names: ClassNames | None,
    world: World,
    batch: int,
    limit: int | float = 1.0,
    *,
    format_arguments: Mapping[str, Any] | None = None,
    landmarks: str | None = None,
    is_strict: bool = True,
) -> HeldOutSet:
    """Return the held-out set of `data.val_dir`.

    class_num, class_names: the classes of the head; labels that are names are numbered like them. limit: of
    the batches, of `batch` images. The others: see `open_labelled`. Raises DataError if there are no images,
    or an image has a class that the head lacks.
    """
    source = open_labelled(place, format_arguments, landmarks, is_strict)
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
    elif class_names is not None:
        _check_numbers(labels, class_names, place)
    unknown = np.flatnonzero((labels < 0) | (labels >= class_num))
    if len(unknown):
        first = int(unknown[0])
        label = f"label {stored[first]}" if own is None else f"class '{own[stored.item(first)]}'"
        raise DataError(
            f"{label} at {source.name(first)} of data.val_dir {place} is not one of the {class_num:,} "
            f"classes of the training data ({len(unknown):,} of {len(labels):,} images have such labels); "
            "fix the labels, or remove these images"
        )
    if own is None and class_names is not None:
        world.log(f"data.val_dir: the labels in {place} are class numbers")
    chosen = spread(labels, batch, limit)
    return HeldOutSet(ImagesOf(source, chosen), labels[chosen])


def _check_numbers(labels: np.ndarray, class_names: ClassNames, place: str) -> None:
    """Raise DataError for a string of digits in a file that may be a class number or a name."""
    values = set(labels.tolist())
    for number in np.flatnonzero(class_names.lengths()).tolist():
        name = class_names[number]
        value = int(name) if name.isdecimal() and len(name) < 19 else number
        if value != number and value in values:
            raise DataError(
                f"label {value} in data.val_dir {place} may be a class number, or the name of class "
                f"{number}; use labels in a column class_name, or the format argument label_map"
            )


def evaluate_targets(
    evaluated: EvaluatedNetwork, targets: Sequence[Target | HeldOutSet], head: Head | None = None
) -> dict[str, Any]:
    """Return a VerificationResult per pair file, a ClassificationResult for a held-out set; a collective.

    Results are identical on all ranks. head: needed for a held-out set, whose images are not mirrored.
    """
    results: dict[str, Any] = {}
    world, batch_size = evaluated.world, evaluated.batch_size
    for target in targets:
        if isinstance(target, HeldOutSet):
            assert isinstance(head, Head)
            own = evaluated.embed(target.images, target.name, flip=False, gather=False)
            result: Any = classify(head, own, target.labels, batch_size=batch_size, world=world)
        else:
            result = verify_target(evaluated.embed(target.images, target.name), target, world)
        results[target.name] = result
    return results


def verify_target(embeddings: np.ndarray, target: Target, world: World) -> VerificationResult:
    """Return the result of one rank on all ranks, so that it is identical; a collective."""
    result = vars(verify(embeddings, target.is_same, _FOLDS, target.pairs)) if world.is_main else None
    return VerificationResult(**world.broadcast_object(result))
