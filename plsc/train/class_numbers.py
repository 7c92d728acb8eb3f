"""The numbers of classes that have names: those of the checkpoint that a run resumes, if it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from plsc.checkpoint import Manifest
from plsc.checkpoint.classes.map import MAP_NAME
from plsc.checkpoint.load import read_class_names
from plsc.data.class_names import ClassNames, class_names_of
from plsc.data.sources.base import IndexedSource, Source
from plsc.errors import CheckpointError

OpenedCheckpoint = tuple[Path, Manifest]


def number_classes(
    source: Source | None, checkpoint: OpenedCheckpoint | None, head: str = ""
) -> tuple[ClassNames | None, str]:
    """Give the classes of a source the numbers that they have in a checkpoint, by their names.

    Names that are new become those of the checkpoint's classes without a name, in their order. Where one
    side has no names, labels are numbers of classes. head: the name of one of several. Returns the names of
    all classes, if there are some, and a line about what changed.

    Raises CheckpointError if one side has a class that the other lacks.
    """
    own = None if source is None else class_names_of(source)
    if checkpoint is None:
        return own, ""
    path, manifest = checkpoint
    saved = read_class_names(path, manifest, head)
    if own is None or saved is None:
        is_renumbered = (path / MAP_NAME).is_file()
        note = f"classes were renumbered: labels must follow {path / MAP_NAME}"
        return saved if own is None else own, note * is_renumbered
    numbers = saved.numbered(own)
    _check_equal(path, head, own, saved, numbers)
    assert isinstance(source, IndexedSource)
    source.renumber(numbers)
    return saved.with_names(own, numbers), _describe(path, own, saved, numbers)


def _check_equal(
    path: Path, head: str, own: ClassNames, saved: ClassNames, numbers: np.ndarray
) -> None:
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


def _describe(path: Path, own: ClassNames, saved: ClassNames, numbers: np.ndarray) -> str:
    is_new = saved.lengths()[numbers] == 0
    moved = int((numbers != np.arange(len(numbers))).sum())
    said = []
    if moved:
        said.append(f"{moved} have other labels than by their sorted names")
    if is_new.any():
        first = int(np.argmax(is_new))
        said.append(f"{is_new.sum()} are new, the first is '{own[first]}' (class {numbers[first]})")
    if not said:
        return ""
    return f"classes are numbered by their names in {path}: {'; '.join(said)}"
