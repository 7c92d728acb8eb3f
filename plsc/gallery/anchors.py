"""Move a gallery to a new network: the pairs of embeddings by both, and the mapped gallery.

Class weights need no images: the same class has one in each run. Classes are the same if they have the same
name, or, in runs without class names, the same number.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plsc.actions.embeddings import NAMES, open_embeddings
from plsc.actions.predict import EMBEDDINGS
from plsc.checkpoint import load_weights
from plsc.checkpoint.remote import fetch
from plsc.data.class_names import ClassNames
from plsc.errors import CheckpointError, DataError, OptionError, PlscError
from plsc.export import open_model
from plsc.export.folder import MODEL_NAME, checksum_of
from plsc.gallery.embedder import class_weights_of
from plsc.gallery.gallery import Gallery, write_gallery
from plsc.gallery.places import batches, copy_entries, is_folder, opened_gallery
from plsc.gallery.store import New
from plsc.gallery.upgrade import IMAGES, EmbeddingMap, Pairs, fit_map
from plsc.parallel.world import World
from plsc.storage.urls import is_url


@dataclass(frozen=True)
class Run:
    """A checkpoint, or a folder of ``plsc export``; fingerprint and classes as of `Embedder`."""

    place: str
    fingerprint: str
    classes: Callable[[], tuple[np.ndarray, ClassNames | None]]


def open_run(place: str, head: str | None = None) -> Run:
    """Open a checkpoint (folder or URL) or an export; head: of several heads, the one with the classes."""
    path = fetch(place, World.single("cpu")) if is_url(place) else Path(place)
    if (path / MODEL_NAME).is_file():
        served = open_model(path)
        return Run(place, served.fingerprint, served.class_weights)
    return Run(place, checksum_of(load_weights(path)), lambda: class_weights_of(path, head))


def fit_upgrade(old: Run, new: Run, anchors: tuple[str, str] | None = None) -> EmbeddingMap:
    """Fit a map on the classes that both runs have, and on images.

    anchors: folders of ``plsc predict``: the embeddings of the same images by the old and the new network.
    With them, a problem of the class weights is only logged.

    Raises:
        DataError: as `fit_map`, or the classes or images are not the same.
        CheckpointError: the runs have the same network, or one has no class weights.
    """
    if old.fingerprint == new.fingerprint:
        raise CheckpointError(f"{old.place} and {new.place} have the same network; pass the new one as --to")
    images = _pairs_of_images(old, new, anchors) if anchors else None
    try:
        classes = _pairs_of_classes(old, new)
    except PlscError as error:
        if images is None:
            raise
        logging.getLogger(__name__).warning("class weights are not used: %s", error)
        classes = None
    return fit_map(classes, images)


def _pairs_of_classes(old: Run, new: Run) -> Pairs:
    (ours, names), (theirs, others) = old.classes(), new.classes()
    if ours.ndim == 3 or theirs.ndim == 3:
        raise CheckpointError(f"a class has several sub-centres, which have no order; {IMAGES}")
    if names is None and others is None:
        numbers = np.arange(min(len(ours), len(theirs)))
        return Pairs(ours, theirs, (numbers, numbers))
    if names is None or others is None:
        raise DataError(f"only one of {old.place} and {new.place} has class names; {IMAGES}")
    found = others.numbers_of(names)
    numbers = np.flatnonzero((found >= 0) & (names.lengths() > 0))
    return Pairs(ours, theirs, (numbers, found[numbers]))


def _pairs_of_images(old: Run, new: Run, anchors: tuple[str, str]) -> Pairs:
    opened = [open_embeddings(folder) for folder in anchors]
    for folder, found, run in zip(anchors, opened, (old, new), strict=True):
        if EMBEDDINGS not in found:
            raise DataError(f"{folder} has no embeddings; predict again with the field 'value'")
        if (weights := found.index["model"]["weights"]) != run.fingerprint:
            raise CheckpointError(
                f"{folder} was computed with another network than {run.place} (weights {weights:.16}, not "
                f"{run.fingerprint:.16}); predict again with it"
            )
    if not np.array_equal(*(found[NAMES][:] for found in opened)):
        raise DataError(f"{anchors[0]} and {anchors[1]} differ in images or their order; predict both again")
    numbers = np.arange(len(opened[0]))
    return Pairs(opened[0][EMBEDDINGS], opened[1][EMBEDDINGS], (numbers, numbers))


class _Mapped:
    """The entries of a gallery with mapped vectors, to be copied."""

    def __init__(self, origin: Any, source: str, found: EmbeddingMap, model: str) -> None:
        self._origin, self._source, self._map = origin, source, found
        self.model, self.size = model, found.matrix.shape[1]
        self.record = json.dumps({"from": origin.model, **found.about})

    def __len__(self) -> int:
        return len(self._origin)

    def read(self, after: int, count: int) -> list[New]:
        entries = _unmapped(self._origin.read(after, count), self._source)
        vectors: Any = self._map.apply(_stacked(entries)) if entries else []
        return [
            replace(one, vector=row, mapped=self.record) for one, row in zip(entries, vectors, strict=True)
        ]


def upgrade_gallery(
    source: str,
    target: str,
    runs: tuple[Run, Run],
    anchors: tuple[str, str] | None = None,
    worst: str | None = None,
) -> str:
    """Write a gallery of the old network as one of the new network; return what was done, as text.

    Args:
        source, target: as of `copy_gallery`.
        runs: the old and the new one.
        anchors: as of `fit_upgrade`.
        worst: a file to write: the entries, those with the largest expected error first, with their ids.

    Raises:
        DataError: as `copy_gallery` and `fit_upgrade`; or the gallery is a mapped one.
        CheckpointError: the gallery is not of the old network.
    """
    old, new = runs
    with opened_gallery(source, old.fingerprint) as origin:
        if origin.model != old.fingerprint:
            raise CheckpointError(
                f"{source} was made with another network (weights {origin.model:.16}) than {old.place} "
                f"({old.fingerprint:.16}); pass the run that made it as --from"
            )
        _unmapped(origin.read(0, 1), source)  # before the work
        found = fit_upgrade(old, new, anchors)
        if worst is not None:  # first: nothing is written if this fails
            try:
                _write_worst(worst, batches(origin), found)
            except OSError as error:
                raise OptionError(f"{worst} cannot be written ({error.strerror}); choose another") from error
        mapped = _Mapped(origin, source, found, new.fingerprint)
        if isinstance(origin, Gallery) and is_folder(target):  # a million entries in a minute
            how: Any = {"model": mapped.model, "mapped": mapped.record}
            write_gallery(target, lambda: map(found.apply, origin.parts()), origin.names, **how)
            text = f"{len(origin):,} entries"
        else:
            text = copy_entries(mapped, source, target)
    about = found.about
    text += f"; {about['method']}, fitted on {about['classes']:,} classes and {about['images']:,} images"
    text += f"; mean cosine with the real embeddings of pairs kept aside: {about['cosine']:.4f}"
    return text + (f"; 95 % of images reach {about['bound']:.4f}" if about["bound"] is not None else "")


def _unmapped(entries: list[New], source: str) -> list[New]:
    if any(one.mapped for one in entries):
        raise DataError(
            f"{source} has entries that were mapped from an older network; errors would add up: upgrade the "
            "gallery of that network"
        )
    return entries


def _write_worst(path: str, parts: Any, found: EmbeddingMap) -> None:
    rows = []
    for part in parts:
        errors = found.errors(_stacked(part)).tolist()
        rows += [(error, one.id, one.name) for error, one in zip(errors, part, strict=True)]
    with Path(path).open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write("id\texpected_error\tname\n")
        file.writelines(
            f"{number}\t{error:.4f}\t{name}\n" for error, number, name in sorted(rows, reverse=True)
        )


def _stacked(entries: list[New]) -> np.ndarray:
    return np.stack([one.vector for one in entries])
