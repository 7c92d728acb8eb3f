"""Move a gallery to a new network: pairs of embeddings by both, the map fitted on them, the mapped gallery.

Class weights need no images: the same class has one in each run. Classes are the same if they have the same
name, or, in runs without class names, the same number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plsc.actions.embeddings import NAMES, open_embeddings
from plsc.actions.predict import EMBEDDINGS
from plsc.checkpoint import load_weights, read_manifest
from plsc.checkpoint.load import OpenCheckpoint, read_class_names
from plsc.checkpoint.manifest import CLASS_WEIGHTS, Role
from plsc.checkpoint.remote import fetch
from plsc.data.class_names import ClassNames
from plsc.errors import CheckpointError, DataError, PlscError
from plsc.export import open_model
from plsc.export.folder import MODEL_NAME, checksum_of
from plsc.gallery.gallery import Gallery
from plsc.gallery.places import AnyStore, batches, copy_entries, opened_gallery
from plsc.gallery.store import New
from plsc.gallery.upgrade import EmbeddingMap, Pairs, fit_map
from plsc.parallel.world import World
from plsc.run.build_heads import choose_head
from plsc.storage.urls import is_url

_ROWS = 8192  # pairs read at a time
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A checkpoint, or a folder of ``plsc export``, whose network is not opened.

    Attributes:
        shown: the path or URL.
        fingerprint: as of `ServedModel`.
        classes: context manager that returns the class names, the number of classes and a function, which
            returns the class weights of some classes, [n, D]. Raises CheckpointError if there are none.
    """

    shown: str
    fingerprint: str
    classes: Callable[[], contextlib.AbstractContextManager[_Classes]]


@dataclass(frozen=True)
class _Classes:
    count: int
    names: ClassNames | None
    rows: Callable[[np.ndarray], np.ndarray]


def open_run(place: str, head: str | None = None) -> Run:
    """Open a checkpoint (folder or URL) or an export; head: of several heads, the one of the classes.

    Raises CheckpointError if there is none, or it is damaged.
    """
    path = fetch(place, World.single("cpu")) if is_url(place) else Path(place)
    if (path / MODEL_NAME).is_file():
        served = open_model(path)

        @contextlib.contextmanager
        def exported() -> Iterator[_Classes]:
            weight, names = served.class_weights()
            yield _Classes(len(weight), names, weight.__getitem__)

        return Run(place, served.fingerprint, exported)

    @contextlib.contextmanager
    def stored() -> Iterator[_Classes]:
        manifest = read_manifest(path)
        name = choose_head(path, manifest, head)
        with OpenCheckpoint(path, manifest) as opened:
            weight = opened.select((CLASS_WEIGHTS,))[Role(CLASS_WEIGHTS, "weight", name)]
            if len(weight.shape) == 3:
                raise CheckpointError(
                    f"{place} has {weight.shape[1]} sub-centres per class, which have no order; keep one "
                    "with plsc dominant, or pass --anchors-from and --anchors-to"
                )
            names = read_class_names(path, manifest, name)
            yield _Classes(weight.shape[0], names, lambda rows: weight.values(rows).numpy())

    return Run(place, checksum_of(load_weights(path)), stored)


def fit_upgrade(old: Run, new: Run, anchors: tuple[str, str] | None = None) -> EmbeddingMap:
    """Fit a map on the classes that both runs have, and on images.

    Args:
        old: the run that made the gallery.
        new: the run to map to.
        anchors: two folders of ``plsc predict``: the embeddings of the same images by old and new. With them,
            a problem of the class weights is only logged.

    Raises:
        DataError: there are too few common classes and images, or they do not belong together.
        CheckpointError: the runs have the same network, or no class weights.
    """
    if old.fingerprint == new.fingerprint:
        raise CheckpointError(f"{old.shown} and {new.shown} have the same network; pass the new one as --to")
    images = _images(old, new, anchors) if anchors else None
    with contextlib.ExitStack() as stack:
        try:
            classes = _common_classes(old, new, *(stack.enter_context(run.classes()) for run in (old, new)))
        except PlscError as error:
            if images is None:
                raise
            logger.warning("class weights are not used: %s", error)
            classes = None
        return fit_map(classes, images)


def _common_classes(old: Run, new: Run, ours: _Classes, theirs: _Classes) -> Pairs:
    if (ours.names is None) != (theirs.names is None):
        named, other = (old, new) if theirs.names is None else (new, old)
        raise DataError(
            f"{named.shown} has class names, and {other.shown} has none: classes cannot be paired; pass "
            "the embeddings of the same images by both networks (--anchors-from, --anchors-to)"
        )
    if ours.names is None or theirs.names is None:
        numbers = np.arange(min(ours.count, theirs.count))
        rows = numbers
    else:
        found = theirs.names.numbers_of(ours.names)
        rows = np.flatnonzero((found >= 0) & (ours.names.lengths() > 0))
        numbers = found[rows]

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for low in range(0, len(rows), _ROWS):
            yield ours.rows(rows[low : low + _ROWS]), theirs.rows(numbers[low : low + _ROWS])

    return Pairs(len(rows), read)


def _images(old: Run, new: Run, anchors: tuple[str, str]) -> Pairs:
    opened = [open_embeddings(folder) for folder in anchors]
    for folder, found, run in zip(anchors, opened, (old, new), strict=True):
        if EMBEDDINGS not in found:
            raise DataError(f"{folder} has no embeddings; predict again with the field 'value'")
        if (weights := found.index["model"]["weights"]) != run.fingerprint:
            raise CheckpointError(
                f"{folder} was computed with another network than {run.shown} (weights {weights:.16}, not "
                f"{run.fingerprint:.16}); predict again with it"
            )
    if not np.array_equal(opened[0][NAMES][:], opened[1][NAMES][:]):
        raise DataError(
            f"{anchors[0]} and {anchors[1]} have different images, or another order of them; predict the "
            "same images with both networks"
        )
    ours, theirs = (found[EMBEDDINGS] for found in opened)

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for low in range(0, len(ours), _ROWS):
            yield ours[low : low + _ROWS], theirs[low : low + _ROWS]

    return Pairs(len(ours), read)


class _Mapped:
    """The entries of a gallery with mapped vectors, to be copied."""

    is_classes = False

    def __init__(self, origin: Gallery | AnyStore, found: EmbeddingMap, model: str) -> None:
        self._origin, self._map = origin, found
        self.model, self.size = model, found.matrix.shape[1]
        self._record = json.dumps({"from": origin.model, **found.about})
        self.ids = origin.ids

    def read(self, after: int, count: int) -> list[New]:
        entries = self._origin.read(after, count)
        if not entries:
            return []
        vectors = self._map.apply(np.stack([one.vector for one in entries]))
        return [
            replace(one, vector=vector, mapped=self._record)
            for one, vector in zip(entries, vectors, strict=True)
        ]


def upgrade_gallery(
    source: str,
    target: str,
    old: str,
    new: str,
    anchors: tuple[str, str] | None = None,
    head: str | None = None,
    worst: str | os.PathLike[str] | None = None,
) -> str:
    """Write a gallery of the old network as one of the new network; return what was done, as text.

    Args:
        source, target: places as of `copy_gallery`.
        old, new: checkpoints or exports, see `open_run`.
        anchors: see `fit_upgrade`.
        head: see `open_run`.
        worst: a file to write: the entries, those with the largest expected error first, with their ids.

    Raises:
        DataError: as `copy_gallery` and `fit_upgrade`; or the gallery is a mapped one.
        CheckpointError: the gallery is not of the old network.
    """
    ours, theirs = open_run(old, head), open_run(new, head)
    with opened_gallery(source, ours.fingerprint) as origin:
        if origin.model != ours.fingerprint:
            raise CheckpointError(
                f"{source} was made with another network (weights {origin.model:.16}) than {old} "
                f"({ours.fingerprint:.16}); pass the run that made it as --from"
            )
        if origin.mapped():
            raise DataError(
                f"{source} has entries that were mapped from an older network, and errors would add up; "
                "upgrade the gallery of that network"
            )
        found = fit_upgrade(ours, theirs, anchors)
        text = copy_entries(_Mapped(origin, found, theirs.fingerprint), source, target)
        if worst is not None:
            _write_worst(Path(worst), origin, source, found)
    about: dict[str, Any] = dict(found.about)
    bound = "" if about["bound"] is None else f"; 95 % of images reach {about['bound']:.4f}"
    return (
        f"{text}; {about['method']} of {about['classes']:,} classes and {about['images']:,} images: cosine "
        f"{about['cosine']:.4f} with the real embeddings of pairs kept aside{bound}"
    )


def _write_worst(path: Path, origin: Gallery | AnyStore, source: str, found: EmbeddingMap) -> None:
    entries, errors = [], []
    for part in batches(origin, source, 0):
        entries += [(one.id, one.name) for one in part]
        errors.append(found.errors(np.stack([one.vector for one in part])))
    error = np.concatenate([np.empty(0), *errors])
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write("id\texpected_error\tname\n")
        for row in np.argsort(-error, kind="stable").tolist():
            file.write(f"{entries[row][0]}\t{error[row]:.4f}\t{entries[row][1]}\n")
