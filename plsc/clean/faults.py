"""Find faults of a dataset from embeddings: wrong labels, classes that are one or two, duplicates.

The network must not have learned the labels that it judges. A dataset may have two views, of networks that
were each trained on one half of the images: a view judges the images that its network has not seen.

How sure a proposal is: the same fault is planted into the dataset's own images, such as two random halves of
a class for two classes that are one. The score of such planted faults is the distribution that the scores of
true faults have. See `how_sure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass

import numpy as np

from plsc.data.split import place_in_class
from plsc.gallery.vectors import import_faiss

_EXACT = 20_000  # rows that are searched without inverted lists
_RECALL, _SAMPLE = 0.98, 1000
_CLASSES = 10  # neighbours of a class that may be the same
_MEMBERS = 256  # images of a class that are compared with each other
_ROWS = 2**14
_KEPT = 100_000  # images that tell how often the nearest class is right
_WORST_FIT = 2.5
LEAST_SURE = 0.5  # of what is proposed
_LEAST = 3  # faults above a level, so that chance does not decide


@dataclass(frozen=True)
class View:
    """Embeddings of N images by one network.

    unit: normalised, float32 [N, D]. unseen: the images that it was not trained on, bool [N].
    """

    unit: np.ndarray
    unseen: np.ndarray


@dataclass(frozen=True)
class Found:
    """Faults with how sure they are, float [n], surest first.

    subjects: int64 [n, k]. expected: estimated number of all such faults of the dataset.
    """

    sure: np.ndarray
    subjects: np.ndarray
    expected: float

    @classmethod
    def of(cls, scores: np.ndarray, planted: np.ndarray, subjects: np.ndarray) -> Found:
        """Keep those that are more likely faults than not."""
        sure, expected = how_sure(scores, planted)
        order = np.argsort(-scores, kind="stable")
        order = order[sure[order] >= LEAST_SURE]
        return cls(sure[order], subjects[order], expected)


def how_sure(scores: np.ndarray, planted: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the probability that each of n subjects is a fault, float [n], and the number of faults.

    scores: of the subjects, float [n]; the higher, the more like a fault. planted: scores of planted faults.

    If there are E faults that score like the planted ones, the subjects above t are E times the share of the
    planted ones above t, for every t that other subjects do not reach. E is the largest number that never
    exceeds the subjects (compare Storey 2002, on the number of true null hypotheses). A network that was
    trained with the faults shows them weaker than it shows planted ones: the distances of the planted scores
    from the median subject are multiplied by the factor from 1 to 0.6 that fits best. If none fits within a
    factor of 2.5, there are no faults. Levels above which fewer than 3 faults would be are left out.

    A probability is the expected number of faults in an interval of scores over that of subjects, falling
    with the score.
    """
    nothing = np.zeros(len(scores)), 0.0
    if not len(scores) or not len(planted) or np.median(planted) <= np.median(scores):
        return nothing
    ascending, middle = np.sort(scores), np.median(scores)
    best = (_WORST_FIT, 0.0, planted)
    for factor in np.linspace(1, 0.6, 41):
        faults = np.sort(middle + factor * (planted - middle))
        levels = np.quantile(faults, np.linspace(0.05, 0.95, 19))
        counts, shares = _above(ascending, levels), _above(faults, levels) / len(faults)
        is_sound = shares * counts[0] >= _LEAST
        if not is_sound.any():
            continue
        counts = (counts[is_sound] + 1e-9) / shares[is_sound]
        fit = counts.max() / counts.min()
        if fit < best[0]:
            best = (fit, float(counts.min()), faults)
    _, expected, faults = best
    if not expected:
        return nothing
    order = np.argsort(-scores, kind="stable")
    between = np.append((scores[order][1:] + scores[order][:-1]) / 2, -np.inf)
    until = expected * _above(faults, between) / len(faults)
    sure = np.empty(len(scores))
    sure[order] = np.clip(_falling(np.diff(until, prepend=0.0)), 0, 1)
    return sure, expected


def _above(ascending: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the number of values that are at least each level."""
    return len(ascending) - np.searchsorted(ascending, levels)


def _falling(values: np.ndarray) -> np.ndarray:
    """Return the closest falling sequence, by least squares (pool adjacent violators)."""
    sums: list[float] = []
    sizes: list[int] = []
    for value in values.tolist():
        total, size = value, 1
        while sums and sums[-1] * size <= total * sizes[-1]:
            total, size = total + sums.pop(), size + sizes.pop()
        sums.append(total)
        sizes.append(size)
    return np.repeat(np.array(sums) / np.array(sizes), sizes)


def nearest(queries: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return cosines and numbers of the k nearest rows, [n, k], and the measured recall.

    From 20,000 rows on, by inverted lists, of which as many are searched as a recall of 0.98 needs on 1,000
    queries; if that is a quarter of them, exact search is faster. A row may be repeated, with cosine -1.
    """
    faiss = import_faiss()
    from faiss.contrib.big_batch_search import big_batch_search

    k, metric = min(k, len(rows)), faiss.METRIC_INNER_PRODUCT
    if len(rows) <= _EXACT:
        return (*faiss.knn(queries, rows, k, metric), 1.0)
    rng = np.random.default_rng(0)
    lists = int(2 * np.sqrt(len(rows)))
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(rows.shape[1]), rows.shape[1], lists, faiss.ScalarQuantizer.QT_fp16, metric, False
    )
    index.cp.niter = 5
    trained = rng.choice(len(rows), min(len(rows), 39 * lists), replace=False)
    index.train(rows[trained])
    index.add(rows)
    some = queries[rng.choice(len(queries), min(_SAMPLE, len(queries)), replace=False)]
    exact = faiss.knn(some, rows, k, metric)[1]
    recall, index.nprobe = 0.0, 2
    while recall < _RECALL:
        index.nprobe *= 2
        if index.nprobe >= lists // 4:
            return (*faiss.knn(queries, rows, k, metric), 1.0)
        recall = _recall(exact, index.search(some, k)[1])
    with redirect_stdout(None):  # it prints its progress
        cosines, numbers = big_batch_search(index, queries, k)  # matrix products, list by list
    return (*_without_gaps(cosines, numbers), recall)


def neighbours(unit: np.ndarray, lists: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return, as `nearest`, the k images that are nearest to each of N images, itself included.

    Searched among those whose nearest class is one of the image's two nearest classes; or by `nearest`, if
    the measured recall of that is below 0.98. lists: these classes, the nearest one first, int64 [N, 2].
    """
    faiss = import_faiss()
    metric, heap = faiss.METRIC_INNER_PRODUCT, faiss.ResultHeap(len(unit), k, keep_max=True)
    ends = np.arange(1, lists.max() + 1)
    members, asking = (
        np.split(order, np.searchsorted(flat[order], ends))
        for flat in (lists[:, 0], lists.ravel())
        for order in [np.argsort(flat, kind="stable")]
    )
    for rows, places in zip(members, asking, strict=True):
        for first in range(0, len(places) if len(rows) else 0, _ROWS):
            some = places[first : first + _ROWS] // 2
            cosines, found = faiss.knn(unit[some], unit[rows], min(k, len(rows)), metric)
            heap.add_result_subset(some, cosines, rows[found])
    heap.finalize()
    some = np.random.default_rng(0).choice(len(unit), min(_SAMPLE, len(unit)), replace=False)
    recall = _recall(faiss.knn(unit[some], unit, min(k, len(unit)), metric)[1], heap.I[some])
    if recall < _RECALL:
        return nearest(unit, unit, k)
    return (*_without_gaps(heap.D, heap.I), recall)


def _recall(exact: np.ndarray, found: np.ndarray) -> float:
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(exact, found, strict=True)]))


def _without_gaps(cosines: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Replace the missing neighbours of lists that have fewer than k rows by the nearest one, cosine -1."""
    missing = numbers < 0
    return np.where(missing, -1, cosines), np.where(missing, numbers[:, :1], numbers)


def pairs_in(neighbours: np.ndarray) -> np.ndarray:
    """Return the pairs of each row and its neighbours, int64 [n * k, 2]; neighbours: int64 [n, k]."""
    return np.stack([np.repeat(np.arange(len(neighbours)), neighbours.shape[1]), neighbours.ravel()], 1)


def distinct(pairs: Sequence[np.ndarray]) -> np.ndarray:
    """Return each pair of different numbers once, the lower number first, int64 [n, 2]."""
    both = np.unique(np.sort(np.concatenate(pairs), 1), axis=0)
    return both[both[:, 0] < both[:, 1]]


@dataclass(frozen=True)
class _Centres:
    """Sums of the kept images of each class, float32 [C, D], and their numbers, [C]."""

    sums: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, unit: np.ndarray, labels: np.ndarray, kept: np.ndarray, classes: int) -> _Centres:
        sums = np.zeros((classes, unit.shape[1]), np.float32)
        order = np.flatnonzero(kept)[np.argsort(labels[kept], kind="stable")]
        for first in range(0, len(order), _ROWS):
            rows = order[first : first + _ROWS]
            starts = np.flatnonzero(np.diff(labels[rows], prepend=-1))
            sums[labels[rows[starts]]] += np.add.reduceat(unit[rows], starts)
        return cls(sums, np.bincount(labels[kept], minlength=classes))

    def within(self) -> np.ndarray:
        """Return the mean cosine of two images of each class, [C]; 0 for classes of one image."""
        pairs = self.counts * (self.counts - 1)
        squares = np.einsum("cd,cd->c", self.sums, self.sums)
        return (squares - self.counts) / np.maximum(pairs, 1) * (pairs > 0)

    def sameness(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return the mean cosine between the classes one[i] and other[i] minus that within them, [n]."""
        within, products = self.within(), np.empty(len(one), np.float32)
        for first in range(0, len(one), _ROWS):
            rows = slice(first, first + _ROWS)
            products[rows] = np.einsum("nd,nd->n", self.sums[one[rows]], self.sums[other[rows]])
        between = products / np.maximum(self.counts[one] * self.counts[other], 1)
        return between - (within[one] + within[other]) / 2


@dataclass(frozen=True)
class Labels:
    """How the images fit their classes, [N] each.

    own: cosine with the centre of the other images of the class; nan if there are none. other: cosine with
    the nearest other class, `likely`. lead: by how much the latter is nearer than the next one. planted:
    `scores` of the images if they had random labels.
    """

    own: np.ndarray
    other: np.ndarray
    likely: np.ndarray
    lead: np.ndarray
    planted: np.ndarray

    def scores(self) -> np.ndarray:
        """Return how much more an image belongs to another class than to its own; -2: this is not known."""
        return np.nan_to_num(self.other - self.own, nan=-2)

    def two_nearest(self, labels: np.ndarray) -> np.ndarray:
        """Return an image's label and `likely`, int64 [N, 2]; the class that it belongs to more is first."""
        both = np.stack([labels, self.likely], 1)
        return np.where(self.scores()[:, None] > 0, both[:, ::-1], both)


def compare_labels(views: Sequence[View], labels: np.ndarray, kept: np.ndarray, classes: int) -> Labels:
    """Compare each image with the centres of the classes, which are those of the kept images."""
    real, whole = np.float32, np.int64
    found = Labels(*(np.zeros(len(labels), kind) for kind in (real, real, whole, real, real)))
    found.own[:] = np.nan
    rng = np.random.default_rng(1)
    for view in views:
        centres = _Centres.of(view.unit, labels, kept, classes)
        unit = _normalised(centres.sums)
        judged = np.flatnonzero(view.unseen)
        cosines, numbers, _ = nearest(view.unit[judged], unit, 3)
        cosines[numbers == labels[judged, None]] = -2
        order = np.argsort(-cosines, 1)
        best = np.take_along_axis(cosines, order, 1)
        likely = np.take_along_axis(numbers, order, 1)[:, 0]
        for first in range(0, len(judged), _ROWS):
            some = slice(first, first + _ROWS)
            rows = judged[some]
            images, own = view.unit[rows], labels[rows]
            others = centres.sums[own] - images * kept[rows, None]
            cosine = np.einsum("nd,nd->n", _normalised(others), images)
            found.own[rows] = np.where(centres.counts[own] > kept[rows], cosine, np.nan)
            found.other[rows], found.likely[rows] = best[some, 0], likely[some]
            found.lead[rows] = best[some, 0] - best[some, :2][:, -1]  # one class has no other one
            wrong = (own + rng.integers(1, max(classes, 2), len(rows))) % classes
            random = np.einsum("nd,nd->n", unit[wrong], images)
            found.planted[rows] = np.fmax(found.own[rows], found.other[rows]) - random
    return found


def wrong_labels(found: Labels) -> Found:
    """Find images with a wrong label; planted: random labels. An image alone in its class is not judged."""
    rows = np.flatnonzero(~np.isnan(found.own))
    return Found.of(found.scores()[rows], found.planted[rows], rows[:, None])


def likely_classes(views: Sequence[View], labels: np.ndarray, kept: np.ndarray, classes: int) -> Labels:
    """Compare, as `compare_labels`, the images that are not kept, and up to about 100,000 that are."""
    some = np.random.default_rng(5).random(len(labels)) * len(labels) < _KEPT
    judges = [View(view.unit, view.unseen & (some | ~kept)) for view in views]
    return compare_labels(judges, labels, kept, classes)


def sure_of_class(found: Labels, kept: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Return the probability that `likely` is the right class of wrongly labelled images, float [n].

    It is the share of right nearest classes among the kept images with an equal lead.
    """
    judged = kept & ~np.isnan(found.own)
    own, other = found.own[judged], found.other[judged]
    lead = np.abs(own - other)
    lead = np.where(own > other, lead, np.minimum(lead, found.lead[judged]))
    order = np.argsort(-lead, kind="stable")
    shares = _falling((own > other)[order].astype(float))
    place = np.searchsorted(-lead[order], -found.lead[images])
    return shares[np.minimum(place, len(shares) - 1)]


def _normalised(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)


def same_classes(
    views: Sequence[View], labels: np.ndarray, kept: np.ndarray, classes: int, first: int | None = None
) -> Found:
    """Find pairs of classes that are one; planted: random halves of a class.

    first: only pairs of a class below this number and one from it on.
    """
    halves = _halved(labels, kept)
    pairs, scores, planted = [], [], []
    every = [_Centres.of(view.unit, labels, kept, classes) for view in views]
    for centres in every:
        unit = _normalised(centres.sums)
        pairs.append(pairs_in(nearest(unit[:first], unit[first or 0 :], _CLASSES)[1] + (first or 0)))
    both = distinct(pairs)
    both = both[(every[0].counts[both] > 1).all(1)]
    for view, centres in zip(views, every, strict=True):
        scores.append(centres.sameness(*both.T))
        parts = _Centres.of(view.unit, halves, kept, 2 * classes)
        has_two = np.flatnonzero(parts.counts[1::2] > 1)
        planted.append(parts.sameness(2 * has_two, 2 * has_two + 1))
    return Found.of(np.mean(scores, 0), np.mean(planted, 0), both)


def _halved(labels: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return labels, twice as many, after dividing the kept images of each class at random."""
    ranks = np.argsort(np.random.default_rng(2).permutation(len(labels)))
    halves = 2 * labels
    halves[kept] += place_in_class(labels[kept], ranks[kept]) % 2
    return halves


def mixed_classes(
    views: Sequence[View], labels: np.ndarray, kept: np.ndarray, classes: int
) -> tuple[Found, dict[int, np.ndarray]]:
    """Find classes that are two, and the images of the smaller part of each; planted: two classes as one."""
    rng = np.random.default_rng(3)
    order = np.flatnonzero(kept)[np.argsort(labels[kept], kind="stable")]
    members = np.split(order, np.cumsum(np.bincount(labels[kept], minlength=classes))[:-1])
    judged = [number for number, rows in enumerate(members) if len(rows) >= 4]
    scores, parts, planted = [], {}, []
    for place, number in enumerate(judged):
        rows = rng.permutation(members[number])[:_MEMBERS]
        score, side = _two(views, rows)
        scores.append(score)
        parts[number] = _part(views, rows[side], rows[~side], members[number])
        if len(judged) == 1:
            break
        another = judged[(place + rng.integers(1, len(judged))) % len(judged)]
        other = rng.permutation(members[another])[:_MEMBERS]
        both = np.concatenate([rows[: (len(rows) + 1) // 2], other[: (len(other) + 1) // 2]])
        planted.append(_two(views, both)[0])
    found = Found.of(np.array(scores), np.array(planted), np.array(judged)[:, None])
    return found, parts


def _two(views: Sequence[View], rows: np.ndarray) -> tuple[float, np.ndarray]:
    """Divide images in two; return how distinct the parts are, and which images the smaller one has.

    By the first principal component, then by the mean cosine with each part. Distinct: the lower mean cosine
    within a part minus the one between the parts.
    """
    cosines = np.mean([view.unit[rows] @ view.unit[rows].T for view in views], 0)
    centred = cosines - cosines.mean(0) - cosines.mean(1)[:, None] + cosines.mean()
    side = np.linalg.eigh(centred)[1][:, -1] > 0
    for _ in range(10):
        sizes = np.array([(~side).sum(), side.sum()])
        if sizes.min() < 2:
            return -1.0, side
        sums = np.stack([cosines[:, ~side].sum(1), cosines[:, side].sum(1)], 1)
        own = np.stack([~side, side], 1)
        moved = np.argmax((sums - own) / (sizes - own), 1).astype(bool)
        if (moved == side).all():
            break
        side = moved
    within = [
        (sums[own[:, part], part].sum() - sizes[part]) / (sizes[part] * (sizes[part] - 1)) for part in (0, 1)
    ]
    between = sums[side, 0].sum() / sizes.prod()
    return float(min(within) - between), side if sizes[1] <= sizes[0] else ~side


def _part(views: Sequence[View], one: np.ndarray, other: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Return a part of a class: the images `one`, and the members of neither part that are nearer to it."""
    rest = np.setdiff1d(members, np.concatenate([one, other]))
    if not len(rest):
        return one
    lean = [view.unit[rest] @ (view.unit[one].mean(0) - view.unit[other].mean(0)) for view in views]
    return np.concatenate([one, rest[np.mean(lean, 0) > 0]])


def classes_without_centre(views: Sequence[View], labels: np.ndarray, classes: int) -> Found:
    """Find classes of three or more images that agree no more than random images, which are planted.

    Of two images that disagree, one may be right.
    """
    several = np.flatnonzero(np.bincount(labels, minlength=classes) > 2)
    everything, mixed = np.ones(len(labels), bool), np.random.default_rng(4).permutation(labels)
    scores, planted = [], []
    for view in views:
        scores.append(-_Centres.of(view.unit, labels, everything, classes).within()[several])
        planted.append(-_Centres.of(view.unit, mixed, everything, classes).within()[several])
    return Found.of(np.mean(scores, 0), np.mean(planted, 0), several[:, None])
