"""Map embeddings of one network to those of another, without their images.

The map W [D_old, D_new] is fitted on pairs of unit vectors: the embeddings of an image by both networks, or
the class weights of a class in both. Candidates are the rotation (orthogonal Procrustes, Schönemann 1966) and
ridge regressions, all computed from X'X and X'Y, which one pass over the pairs sums up. Pairs kept aside
choose one of them, and others measure its error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plsc.errors import DataError

_ASIDE, _MOST_ASIDE = 4, 10_000  # a quarter of the pairs of each kind, half of them to choose
_LEAST = 80  # pairs
_PENALTIES = 10.0 ** np.arange(-4, 2)  # of a ridge regression, relative to the mean eigenvalue of X'X
_LEAST_OF_BOUND, _LEVEL = 200, 0.95
_MATCHING = 0.9  # share of pairs that are nearer to each other than to another pair


@dataclass(frozen=True)
class Pairs:
    """Embeddings by both networks; `read` yields parts, [n, D_old] and [n, D_new], of any norm."""

    count: int
    read: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class EmbeddingMap:
    """A map from old to new embeddings.

    Attributes:
        matrix: float32 [D_old, D_new].
        expected: float32 [D_old, D_new]: the mean of the new embeddings, given the old one.
        line: offset and slope: the expected cosine, given the norm of that mean.
        about: `method`, such as ``rotation``; `classes` and `images`, the numbers of pairs that it was fitted
            on; `cosine`, the mean between mapped and real embeddings, measured on pairs kept aside; `bound`,
            which the cosine of 95 % of images reaches, or None: fewer than 200 images.
    """

    matrix: np.ndarray
    expected: np.ndarray
    line: tuple[float, float]
    about: Mapping[str, Any]

    def apply(self, old: np.ndarray) -> np.ndarray:
        """Return unit vectors, float32 [n, D_new], for unit vectors [n, D_old]; a zero vector is kept."""
        return _unit(old.astype(np.float32, copy=False) @ self.matrix)

    def errors(self, old: np.ndarray) -> np.ndarray:
        """Return the expected error of each mapped vector: 1 - its cosine with the real embedding, [n].

        Where old embeddings leave open what the new one is, the mean of the possible ones is short: its norm
        is the expected cosine with a unit vector. Pairs kept aside calibrate it.
        """
        offset, slope = self.line
        norms = np.linalg.norm(old.astype(np.float32, copy=False) @ self.expected, axis=1)
        return 1 - np.clip(offset + slope * norms, -1, 1)


def fit_map(classes: Pairs | None = None, images: Pairs | None = None) -> EmbeddingMap:
    """Fit a map on pairs of class weights, of embeddings of images, or on what is better: either, or both.

    Its error is measured on images if there are at least 80.

    Raises:
        DataError: there are too few pairs, they do not belong together, or one is not finite.
    """
    kinds = {name: pairs for name, pairs in (("classes", classes), ("images", images)) if pairs is not None}
    sums = {name: _summed(pairs) for name, pairs in kinds.items() if pairs.count}
    count = sum(pairs.count for pairs in kinds.values())
    size = next((len(one.squares) for one in sums.values()), 0)
    if count < (needed := max(_LEAST, 3 * size // 2)):
        counts = " and ".join(f"{pairs.count:,} {name}" for name, pairs in kinds.items())
        raise DataError(
            f"both networks have {counts or 'nothing'} in common; a map needs {needed:,}: pass the "
            f"embeddings of {needed:,} images or more by both networks (--anchors-from, --anchors-to)"
        )
    judges = sums["images" if images is not None and images.count >= _LEAST else "classes"]
    choosing, measuring = judges.aside(0), judges.aside(1)
    fitted: dict[tuple[tuple[str, ...], str], np.ndarray] = {}
    for names in itertools.chain(*(itertools.combinations(sums, n + 1) for n in range(len(sums)))):
        pooled = _Sums.pooled([sums[name] for name in names])
        fitted |= {(names, method): matrix for method, matrix in _candidates(pooled)}
    scores = {key: float(_cosines(matrix, *choosing).mean()) for key, matrix in fitted.items()}
    (names, method), matrix = (best := max(scores, key=lambda key: scores[key])), fitted[best]
    ridge = max((key for key in scores if key[1].startswith("ridge")), key=lambda key: scores[key])
    cosines = _cosines(matrix, *measuring)
    _check_match(matrix, *measuring)
    has_bound = images is not None and images.count >= _LEAST_OF_BOUND
    about = {
        "method": method,
        **{name: kinds[name].count if name in names else 0 for name in ("classes", "images")},
        "cosine": round(float(cosines.mean()), 4),
        "bound": round(_lower_bound(cosines), 4) if has_bound else None,
    }
    expected = fitted[ridge].astype(np.float32)
    line = _line(np.linalg.norm(choosing[0] @ expected, axis=1), _cosines(matrix, *choosing))
    return EmbeddingMap(matrix.astype(np.float32), expected, line, about)


@dataclass
class _Sums:
    """X'X [D_old, D_old] and X'Y [D_old, D_new] of the pairs that are fitted, and the pairs kept aside."""

    squares: np.ndarray
    products: np.ndarray
    kept: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @staticmethod
    def pooled(parts: list[_Sums]) -> _Sums:
        return _Sums(
            np.sum([one.squares for one in parts], axis=0), np.sum([one.products for one in parts], axis=0)
        )

    def aside(self, half: int) -> tuple[np.ndarray, np.ndarray]:
        """Return every second of the pairs kept aside."""
        old, new = (np.concatenate(parts)[half::2] for parts in zip(*self.kept, strict=True))
        return old, new


def _summed(pairs: Pairs) -> _Sums:
    """Read the pairs once."""
    aside = min(pairs.count // _ASIDE, _MOST_ASIDE)
    is_kept = np.zeros(pairs.count, bool)
    is_kept[np.random.default_rng(0).choice(pairs.count, aside, replace=False)] = True
    sums, first = None, 0
    for part in pairs.read():
        old, new = (_unit(np.asarray(one, np.float64)) for one in part)
        kept = is_kept[first : first + len(old)]
        first += len(old)
        if not (np.isfinite(old).all() and np.isfinite(new).all()):
            raise DataError(f"one of the pairs {first - len(old):,}..{first - 1:,} is not finite; remove it")
        sums = sums or _Sums(np.zeros((old.shape[1],) * 2), np.zeros((old.shape[1], new.shape[1])))
        sums.kept.append((old[kept].astype(np.float32), new[kept].astype(np.float32)))
        old, new = old[~kept], new[~kept]
        sums.squares += old.T @ old
        sums.products += old.T @ new
    assert sums is not None
    return sums


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


def _candidates(sums: _Sums) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and matrix of each map that may be chosen."""
    if sums.products.shape[0] == sums.products.shape[1]:
        yield "identity", np.eye(len(sums.products))  # the new network was trained from the old one
    yield "rotation", rotation(sums.products)
    mean = np.trace(sums.squares) / len(sums.squares)  # eigenvalue
    for penalty, matrix in zip(
        _PENALTIES, ridges(sums.squares, sums.products, _PENALTIES * mean), strict=True
    ):
        yield f"ridge {penalty:g}", matrix


def _cosines(matrix: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return (_unit(old @ matrix) * new).sum(axis=1)


def _check_match(matrix: np.ndarray, old: np.ndarray, new: np.ndarray) -> None:
    """Raise DataError unless nearly all pairs are nearer to each other than to another pair."""
    own, other = _cosines(matrix, old, new), _cosines(matrix, old, np.roll(new, len(new) // 2, axis=0))
    share = float((own > other).mean())
    if share < _MATCHING:
        raise DataError(
            f"of the pairs kept aside, only {share:.0%} are nearer to each other than to another pair (half "
            "would be by chance): the classes were renamed or numbered otherwise, the images differ, or the "
            "networks have too little in common; pass the embeddings of the same images by both networks "
            "(--anchors-from, --anchors-to)"
        )


def _lower_bound(cosines: np.ndarray) -> float:
    """Return what a new image's cosine reaches with a probability of 95 %, if it is drawn as these were.

    The quantile of split conformal prediction (Vovk et al. 2005).
    """
    place = math.floor((len(cosines) + 1) * (1 - _LEVEL) + 1e-9)
    return float(np.sort(cosines)[place - 1])


def _line(norms: np.ndarray, cosines: np.ndarray) -> tuple[float, float]:
    """Return offset and slope, at least 0, of the least squares line of cosines over norms."""
    centred = norms - norms.mean()
    slope = max(0.0, float(centred @ cosines / max(float(centred @ centred), 1e-12)))
    return float(cosines.mean()) - slope * float(norms.mean()), slope


def _unit(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms, norms, 1)
