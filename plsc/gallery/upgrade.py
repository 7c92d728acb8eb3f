"""Move a gallery to a new network, without its images: `plsc gallery upgrade`.

The map W [D_old, D_new] is fitted on pairs of unit vectors: the class weights of a class in both runs, or the
embeddings of an image by both networks. Classes are the same if they have the same name, or, in runs without
class names, the same number. Candidates are the rotation (orthogonal Procrustes, Schönemann 1966) and ridge
regressions, all computed from X'X and X'Y, which one pass over the pairs sums up. Pairs kept aside choose one
of them, and others measure its error.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plsc.data.files import name_key
from plsc.errors import CheckpointError, DataError, PlscError
from plsc.gallery.embedder import Embedder
from plsc.gallery.gallery import Gallery, copy_entries, is_folder, mode_of, opened_gallery, write_gallery
from plsc.gallery.store import New
from plsc.predict.embeddings import EMBEDDINGS, NAMES, open_embeddings

_IMAGES = "pass the embeddings of the same images by both networks (--anchors-from, --anchors-to)"
_ROWS = 8192  # pairs read at a time
_ASIDE, _MOST_ASIDE = 4, 10_000  # a quarter of the pairs of each kind, half of them to choose
_RUNS = 8  # of consecutive pairs kept aside: images of a person are often next to each other
_LEAST, _LEAST_OF_BOUND, _LEVEL = 80, 200, 0.95  # pairs of a map; images of a bound, and its level
_PENALTIES = 10.0 ** np.arange(-4, 2)  # of ridge regressions, relative to the mean eigenvalue of X'X
_MATCHING = 0.9  # share of pairs that are nearer to each other than to another pair
_Rows = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Pairs:
    """Rows of embeddings [.., D_old] and [.., D_new] of any norm: row rows[0][i] belongs to row rows[1][i].

    old, new: arrays, or what reads rows when it is indexed.
    """

    old: Any
    new: Any
    rows: _Rows

    def __len__(self) -> int:
        return len(self.rows[0])


@dataclass(frozen=True)
class EmbeddingMap:
    """A map from old to new embeddings.

    Attributes:
        matrix: float32 [D_old, D_new].
        about: `method`; `classes` and `images`, the numbers of pairs that it was fitted on, of `anchors`
            images; `cosine`, the mean between mapped and real embeddings, `measured_on` pairs kept aside;
            `is_upper_bound`: on class weights; of fully trained networks they are centres of many images, so
            images have a lower cosine (after one epoch, images may have a higher one);
            `bound`, which the cosine of 95 % of images reaches, or None: fewer than 200 images.
    """

    matrix: np.ndarray
    about: Mapping[str, Any]

    def apply(self, old: np.ndarray) -> np.ndarray:
        """Return unit vectors, float32 [n, D_new], for unit vectors [n, D_old]; a zero vector is kept."""
        return _unit(old @ self.matrix)


def fit_map(classes: Pairs | None, images: Pairs | None = None) -> EmbeddingMap:
    """Fit a map on class weights, on embeddings of images, or on both, whichever is best.

    Its error is measured on images if there are at least 80, otherwise on the kind of which there are more.

    Raises:
        DataError: there are too few pairs, they do not belong together, or one is not finite.
    """
    kinds = {name: pairs for name, pairs in (("classes", classes), ("images", images)) if pairs is not None}
    size = max((pairs.old.shape[1] for pairs in kinds.values()), default=0)
    if sum(map(len, kinds.values())) < (needed := max(_LEAST, 3 * size // 2)):
        counts = " and ".join(f"{len(pairs):,} {name}" for name, pairs in kinds.items())
        raise DataError(
            f"both networks have {counts} in common, but a map needs {needed:,} of them; {_IMAGES}"
        )
    sums = {name: _summed(pairs) for name, pairs in kinds.items() if len(pairs)}
    anchors = len(kinds.get("images", ()))
    measured = "images" if anchors >= _LEAST else max(kinds, key=lambda name: len(kinds[name]))
    _, _, old, new = sums[measured]
    half = len(old) // 2
    choosing, measuring = (old[:half], new[:half]), (old[half:], new[half:])
    fitted: dict[tuple[tuple[str, ...], str], np.ndarray] = {}
    for names in itertools.chain(*(itertools.combinations(sums, n + 1) for n in range(len(sums)))):
        squares, products = (np.sum([sums[name][i] for name in names], axis=0) for i in (0, 1))
        fitted |= {(names, method): matrix for method, matrix in _candidates(squares, products)}
    scores = {key: float(_cosines(matrix, *choosing).mean()) for key, matrix in fitted.items()}
    names, method = best = max(scores, key=lambda key: scores[key])
    cosines = np.sort(_measured(fitted[best], *measuring))
    # The quantile of split conformal prediction (Vovk et al. 2005).
    lowest = cosines[max(0, math.floor((len(cosines) + 1) * (1 - _LEVEL) + 1e-9) - 1)]
    about = {
        "method": method,
        **{name: len(kinds[name]) if name in names else 0 for name in ("classes", "images")},
        "anchors": anchors,
        "measured_on": "images" if measured == "images" else "class weights",
        "cosine": round(float(cosines.mean()), 4),
        "is_upper_bound": measured != "images",
        "bound": round(float(lowest), 4) if anchors >= _LEAST_OF_BOUND else None,
    }
    return EmbeddingMap(fitted[best].astype(np.float32), about)


def rotation(products: np.ndarray) -> np.ndarray:
    """Return the W with orthonormal rows or columns for which the sum of |xW - y|^2 is least, [D_old, D_new].

    products: X'Y, [D_old, D_new].
    """
    u, _, vt = np.linalg.svd(products, full_matrices=False)
    return u @ vt


def ridges(squares: np.ndarray, products: np.ndarray, penalties: np.ndarray) -> Iterator[np.ndarray]:
    """Yield, per penalty p, the W for which the sum of |xW - y|^2 and p |W|^2 is least, [D_old, D_new].

    squares: X'X, [D_old, D_old]. products: X'Y, [D_old, D_new].
    """
    values, vectors = np.linalg.eigh(squares)
    rotated = vectors.T @ products
    for penalty in penalties:
        yield vectors @ (rotated / (np.maximum(values, 0) + penalty)[:, None])


def _candidates(squares: np.ndarray, products: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and matrix of each map that may be chosen."""
    if products.shape[0] == products.shape[1]:
        yield "identity", np.eye(len(products))  # the new network was trained from the old one
    yield "rotation", rotation(products)
    penalties = _PENALTIES * np.trace(squares) / len(squares)
    yield from zip(
        (f"ridge {one:g}" for one in _PENALTIES), ridges(squares, products, penalties), strict=True
    )


def _summed(pairs: Pairs) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read the pairs once; return X'X and X'Y, and old and new of the pairs kept aside."""
    count, period = min(len(pairs) // _ASIDE, _MOST_ASIDE), -(-len(pairs) // _RUNS)
    is_kept = np.arange(len(pairs)) % period < min(-(-count // _RUNS), period // 2)
    size = pairs.old.shape[1]
    squares, products, kept = np.zeros((size, size)), np.zeros((size, pairs.new.shape[1])), []
    for low in range(0, len(pairs), _ROWS):
        part = slice(low, low + _ROWS)
        old, new = (
            _unit(np.asarray(one[rows[part]], np.float64))
            for one, rows in zip((pairs.old, pairs.new), pairs.rows, strict=True)
        )
        if not (np.isfinite(old).all() and np.isfinite(new).all()):
            raise DataError(f"one of the pairs {low:,}..{low + len(old) - 1:,} is not finite; remove it")
        kept.append((old[is_kept[part]].astype(np.float32), new[is_kept[part]].astype(np.float32)))
        old, new = old[~is_kept[part]], new[~is_kept[part]]
        squares += old.T @ old
        products += old.T @ new
    aside_old, aside_new = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    return squares, products, aside_old, aside_new


def _cosines(matrix: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return (_unit(old @ matrix) * new).sum(axis=1)


def _measured(matrix: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the cosines of pairs. Raises DataError unless nearly all are nearer than to another pair."""
    own, other = _cosines(matrix, old, new), _cosines(matrix, old, np.roll(new, len(new) // 2, axis=0))
    if (share := float((own > other).mean())) < _MATCHING:
        raise DataError(
            f"of the pairs kept aside, only {share:.0%} are nearer to each other than to another pair: the "
            f"classes were renamed or numbered otherwise, or the images differ; {_IMAGES}"
        )
    return own


def _unit(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms, norms, 1)


def fit_upgrade(old: Embedder, new: Embedder, anchors: tuple[str, str] | None = None) -> EmbeddingMap:
    """Fit a map on the classes that both runs have, and on images.

    anchors: folders of ``plsc predict``: the embeddings of the same images by the old and the new network.
    With them, a problem of the class weights is only logged.

    Raises:
        DataError: as `fit_map`, or the classes or images are not the same.
        CheckpointError: a run has no class weights, or only one adds the mirrored image.
    """
    if old.fingerprint.startswith("flip-") != new.fingerprint.startswith("flip-"):
        raise CheckpointError(f"only one of {old.place} and {new.place} adds the mirrored image (--flip)")
    images = _pairs_of_images(old, new, anchors) if anchors else None
    try:
        classes = _pairs_of_classes(old, new)
    except PlscError as error:
        if images is None:
            raise
        logging.getLogger(__name__).warning("class weights are not used: %s", error)
        classes = None
    return fit_map(classes, images)


def _pairs_of_classes(old: Embedder, new: Embedder) -> Pairs:
    (ours, names), (theirs, others) = old.classes(), new.classes()
    if ours.ndim == 3 or theirs.ndim == 3:
        raise CheckpointError(f"a class has several sub-centres, which have no order; {_IMAGES}")
    if names is None and others is None:
        numbers = np.arange(min(len(ours), len(theirs)))
        return Pairs(ours, theirs, (numbers, numbers))
    if names is None or others is None:
        raise DataError(f"only one of {old.place} and {new.place} has class names; {_IMAGES}")
    found = others.numbers_of(names)
    numbers = np.flatnonzero((found >= 0) & (names.lengths() > 0))
    return Pairs(ours, theirs, (numbers, found[numbers]))


def _pairs_of_images(old: Embedder, new: Embedder, anchors: tuple[str, str]) -> Pairs:
    opened = [open_embeddings(folder) for folder in anchors]
    for folder, found, run in zip(anchors, opened, (old, new), strict=True):
        if (weights := found.index["model"]["weights"]) != run.fingerprint:
            both = f"weights {weights:.16}, not {run.fingerprint:.16}"
            raise CheckpointError(f"{folder} was computed with another network than {run.place} ({both})")
    names = [list(map(name_key, found[NAMES][:].tolist())) for found in opened]
    if names[0] != names[1]:
        raise DataError(f"{anchors[0]} and {anchors[1]} differ in images (by their paths) or their order")
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
        vectors: Any = self._map.apply(np.stack([one.vector for one in entries])) if entries else []
        return [
            replace(one, vector=row, mapped=self.record) for one, row in zip(entries, vectors, strict=True)
        ]


def upgrade_gallery(
    source: str,
    target: str,
    runs: tuple[Embedder, Embedder],
    anchors: tuple[str, str] | None = None,
) -> str:
    """Write a gallery of the old network as one of the new network; return what was done, as text.

    Args:
        source, target: as of `copy_gallery`.
        runs: the old and the new one.
        anchors: as of `fit_upgrade`.

    Raises:
        DataError: as `copy_gallery` and `fit_upgrade`; or the gallery is a mapped one.
        CheckpointError: the gallery is not of the old network.
    """
    old, new = runs
    with opened_gallery(source, old.fingerprint) as origin:
        if origin.model != old.fingerprint:
            both = f"weights {origin.model:.16}, not {old.fingerprint:.16}"
            raise CheckpointError(f"{source} was made with another network than {old.place} ({both})")
        _unmapped(origin.read(0, 1), source)  # before the work
        found = fit_upgrade(old, new, anchors)
        mapped = _Mapped(origin, source, found, new.fingerprint)
        if isinstance(origin, Gallery) and is_folder(target):  # a million entries in a minute
            how: Any = {"model": mapped.model, "mapped": mapped.record, "mode": mode_of(source)}
            write_gallery(target, lambda: map(found.apply, origin.parts()), origin.names, **how)
            text = f"{len(origin):,} entries"
        else:
            text = copy_entries(mapped, source, target)
    about = found.about
    text += f"; {about['method']}, fitted on {about['classes']:,} classes and {about['images']:,} images"
    text += f"; mean cosine with {about['measured_on']} that were kept aside: {about['cosine']:.4f}"
    if about["is_upper_bound"]:
        text += ", an upper bound if both networks are fully trained"
    if about["bound"] is None:
        return f"{text}; for what 95 % of images reach, {_IMAGES}: 200 or more"
    return f"{text}; 95 % of images reach {about['bound']:.4f}"


def _unmapped(entries: list[New], source: str) -> list[New]:
    if any(one.mapped for one in entries):
        raise DataError(f"{source} has entries that were mapped from an older network; upgrade its gallery")
    return entries
