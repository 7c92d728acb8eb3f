"""Find faults of a dataset from embeddings: wrong labels, classes that are one, duplicates.

The network must not have learned the labels that it judges. A dataset may have two views, of networks that
were each trained on one half of the images: a view judges the images that its network has not seen.

How sure a proposal is: the share of the suspects in excess of the right images or classes that are expected
to score as high. That number is extrapolated from lower scores, or measured where different classes are
known: see `Found.of`.

Duplicates are neighbours by embedding, compared pixel by pixel: images that agree as well as an image and its
copy, cropped, scaled, brightened and saved again as JPEG: as the 10 % quantile of such copies of the
dataset's own images.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image as PillowImage
from PIL import ImageEnhance

from plsc.data.decode import decode_image
from plsc.data.lists import place_in_class
from plsc.data.overview import in_threads
from plsc.data.sources import Source
from plsc.errors import naming
from plsc.gallery.gallery import RECALL, SAMPLE, import_faiss, nearest, recall_of

_CLASSES = 10  # neighbours of a class that may be the same
_ROWS, _CHUNK = 2**14, 2**11
_KEPT = 100_000  # images that tell how often the nearest class is right
_VOTERS, _WEIGHT = 10, 0.3  # neighbours of an image, and what they count, next to a cosine
_HEAVIER = 0.9  # exponent: the tails of images fall slower than between small scores
_FAR = 2  # times the 1 % quantile of the halves of classes
LEAST_SURE, SHOWN = 0.5, 100  # of what is proposed; suspects that are shown without a proposal


@dataclass(frozen=True)
class View:
    """Embeddings of N images by one network.

    unit: normalised, float32 [N, D]. unseen: the images that it was not trained on, bool [N].
    """

    unit: np.ndarray
    unseen: np.ndarray


@dataclass(frozen=True)
class Found:
    """Suspects, the most suspicious first.

    sure: probability that each is a fault, float [n]; 0 where the data cannot say. subjects: int64 [n, k].
    """

    sure: np.ndarray
    subjects: np.ndarray

    def __iter__(self) -> Iterator[tuple[float, list[int]]]:
        return zip(self.sure.tolist(), self.subjects.tolist(), strict=True)

    @classmethod
    def of(
        cls,
        scores: np.ndarray,
        subjects: np.ndarray,
        right: Callable[[np.ndarray], np.ndarray],
        least: float = -np.inf,
    ) -> Found:
        """Keep those that are more likely faults than not, and the next 100.

        scores: float [n]; the higher, the more like a fault; at most `least`: none. right: returns how many
        right subjects are expected above some levels, which fall. The probability of a fault is the share of
        the subjects in excess of that, falling with the score.
        """
        order = np.argsort(-scores, kind="stable")
        ranked = scores[order]
        until = right(np.append((ranked[1:] + ranked[:-1]) / 2, -np.inf)[: len(ranked)])
        share = np.where(ranked > least, 1 - np.diff(until, prepend=0.0), 0)
        sure = np.clip(_falling(share), 0, 1)
        kept = slice((sure >= LEAST_SURE).sum() + SHOWN)
        return cls(sure[kept], subjects[order[kept]])


def _tail(step: float, above: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return how many right subjects are above levels: exponentially fewer from 0 on.

    above: numbers of subjects above 0 and one and two steps later, of which few are faults.
    """
    zero, first, second = above.tolist()
    rate = min((first - second + 1) / (zero - first + 1), 0.99) ** _HEAVIER
    total = (zero - first + 1) / (1 - rate)
    return lambda levels: total * rate ** np.maximum(levels / step, 0)


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


def neighbours(unit: np.ndarray, lists: np.ndarray, k: int) -> np.ndarray:
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
    some = np.random.default_rng(0).choice(len(unit), min(SAMPLE, len(unit)), replace=False)
    if recall_of(faiss.knn(unit[some], unit, min(k, len(unit)), metric)[1], heap.I[some]) < RECALL:
        return nearest(unit, unit, k)
    return np.where(heap.I < 0, heap.I[:, :1], heap.I)


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

    def sameness(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return the mean cosine between the classes one[i] and other[i] minus that within them, [n].

        Within a class of one image, it is 0.
        """
        pairs, products = self.counts * (self.counts - 1), np.empty(len(one), np.float32)
        squares = np.einsum("cd,cd->c", self.sums, self.sums)
        within = (squares - self.counts) / np.maximum(pairs, 1) * (pairs > 0)
        for first in range(0, len(one), _ROWS):
            rows = slice(first, first + _ROWS)
            products[rows] = np.einsum("nd,nd->n", self.sums[one[rows]], self.sums[other[rows]])
        between = products / np.maximum(self.counts[one] * self.counts[other], 1)
        return between - (within[one] + within[other]) / 2


@dataclass(frozen=True)
class Labels:
    """How the images fit their classes, [N] each.

    The fit to a class is the cosine with its centre plus 0.3 times the share of the ten nearest images that
    have this class. own: fit to the class without the image; nan if no image is left. other: the highest fit
    to another class, `likely`. lead: by how much it exceeds that of the next one. random: fit to a random
    class. near: of each view, the image itself and its ten nearest images, int64 [N, 11].
    """

    own: np.ndarray
    other: np.ndarray
    likely: np.ndarray
    lead: np.ndarray
    random: np.ndarray
    near: list[np.ndarray]

    def scores(self) -> np.ndarray:
        """Return how much more an image belongs to another class than to its own; -2: this is not known."""
        return np.nan_to_num(self.other - self.own, nan=-2)


def compare_labels(
    views: Sequence[View], labels: np.ndarray, kept: np.ndarray, classes: int, before: Labels | None = None
) -> Labels:
    """Compare each image with the classes, of which the kept images count.

    before: labels of the same images, whose neighbours are used; then only the images that are not kept, and
    about 100,000 that are, are compared.
    """
    real, found = np.float32, np.zeros((3, len(labels)), np.float32)
    own, likely = np.full(len(labels), np.nan, real), np.zeros(len(labels), np.int64)
    some = ~kept | (np.random.default_rng(5).random(len(labels)) * len(labels) < _KEPT)
    rng, near = np.random.default_rng(1), []
    for number, view in enumerate(views):
        centres = _Centres.of(view.unit, labels, kept, classes)
        unit = _normalised(centres.sums)
        judged = np.arange(len(labels)) if before is None else np.flatnonzero(view.unseen & some)
        numbers = nearest(view.unit[judged], unit, 3)
        if before is None:
            lists = np.stack(
                [labels, np.where(numbers[:, 0] == labels, numbers[:, :2][:, -1], numbers[:, 0])], 1
            )
            near.append(neighbours(view.unit, lists, _VOTERS + 1))
        else:
            near.append(before.near[number])
        for first in range(0, len(judged), _CHUNK):
            rows = judged[first : first + _CHUNK]
            candidates = numbers[first : first + _CHUNK][view.unseen[rows]]
            rows = rows[view.unseen[rows]]
            images, given, voters = view.unit[rows], labels[rows], near[number][rows]
            voted = np.where(kept[voters] & (voters != rows[:, None]), labels[voters], -1)
            wrong = (given + rng.integers(1, max(classes, 2), len(rows))) % classes
            options = np.concatenate([wrong[:, None], candidates, voted], 1)
            votes = (options[:, :, None] == voted[:, None, :]).sum(2)
            fit = np.einsum("nod,nd->no", unit[options], images) + _WEIGHT / _VOTERS * votes
            found[2, rows] = fit[:, 0]
            fit[(options == given[:, None]) | (options < 0)] = -2
            best = fit.argmax(1)
            likely[rows], found[0, rows] = options[np.arange(len(rows)), best], fit.max(1)
            fit[options == likely[rows, None]] = -2
            found[1, rows] = found[0, rows] - fit.max(1)
            others = centres.sums[given] - images * kept[rows, None]
            cosine = np.einsum("nd,nd->n", _normalised(others), images)
            cosine += _WEIGHT / _VOTERS * (voted == given[:, None]).sum(1)
            own[rows] = np.where(centres.counts[given] > kept[rows], cosine, np.nan)
    return Labels(own, found[0], likely, found[1], found[2], near)


def wrong_labels(found: Labels) -> Found:
    """Find images with a wrong label; an image alone in its class is not judged.

    Planted: random labels, and the most similar other class as the label. The tail of right images begins at
    0, and is measured below a quantile of the planted faults that are harder to find: the highest one below
    which faults are not many.
    """
    rows = np.flatnonzero(~np.isnan(found.own))
    own, other, scores = found.own[rows], found.other[rows], found.scores()[rows]
    planted = [np.fmax(own, other) - found.random[rows], np.abs(own - other)]
    if not len(rows):
        return Found(np.empty(0), rows[:, None])
    ascending = np.sort(scores)
    quantiles = (min(np.quantile(one, share) for one in planted) for share in (0.75, 0.5, 0.25, 0.1))
    steps = [max(float(value), 1e-6) / 2 for value in quantiles]
    above = [_above(ascending, np.array([0, step, 2 * step])) for step in steps]
    # Where none falls, the longest steps are the most cautious: short ones would be extrapolated far.
    place = next((k for k, (zero, one, two) in enumerate(above) if zero - one >= 2 * (one - two)), 0)
    right = _tail(steps[place], above[place])
    return Found.of(scores, rows[:, None], right, 0.0)


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


def same_classes(views: Sequence[View], labels: np.ndarray, kept: np.ndarray, classes: int) -> Found:
    """Find pairs of classes that agree as much as 95 % of the random halves of a class, which are planted.

    How sure this is is unknown: different classes that look the same to the network agree as much.
    """
    every = [_Centres.of(view.unit, labels, kept, classes) for view in views]
    units = [_normalised(centres.sums) for centres in every]
    both = distinct([pairs_in(nearest(unit, unit, _CLASSES)) for unit in units])
    both = both[(every[0].counts[both] > 1).all(1)]
    score = np.mean([centres.sameness(*both.T) for centres in every], 0)
    halves = _halves(views, labels, kept, classes)
    order = np.argsort(-score, kind="stable")
    order = order[: np.sum(score >= np.quantile(halves, 0.05)) if len(halves) else 0]
    return Found(np.zeros(len(order)), both[order])


def shared_classes(unit: np.ndarray, labels: np.ndarray, classes: int, first: int) -> Found:
    """Find pairs of a class below `first` and one from it on that are one; each is nearest to the other.

    The classes of one dataset are different ones. So pairs of them that are nearest to each other, among all
    classes of both, show how many pairs of the two datasets are so by chance; plus 2.5 times the standard
    error. A pair that agrees far less than random halves of a class do is at most a question.
    """
    kept = np.ones(len(unit), bool)
    centres = _Centres.of(unit, labels, kept, classes)
    means, numbers, rest = _normalised(centres.sums), np.arange(classes), classes - first
    near = nearest(means, means, 2)
    best = np.where(near[:, 0] == numbers, near[:, -1], near[:, 0])
    several = centres.counts > 1
    ones = np.flatnonzero((best[best] == numbers) & (best > numbers) & several & several[best])
    pairs = np.stack([ones, best[ones]], 1)
    scores, is_shared = centres.sameness(*pairs.T), (pairs < first).sum(1) == 1
    different, halves = np.sort(scores[~is_shared]), _halves([View(unit, kept)], labels, kept, classes)
    least = _FAR * min(np.quantile(halves, 0.01), 0) if len(halves) else np.inf
    ratio = 2 * first * rest / max(first * (first - 1) + rest * (rest - 1), 1)

    def by_chance(levels: np.ndarray) -> np.ndarray:
        count = _above(different, levels)
        return ratio * (count + 2.5 * np.sqrt(count + 1))

    return Found.of(scores[is_shared], pairs[is_shared], by_chance, least)


def _halves(views: Sequence[View], labels: np.ndarray, kept: np.ndarray, classes: int) -> np.ndarray:
    """Return the `sameness` of random halves of each class that has four kept images."""
    ranks = np.argsort(np.random.default_rng(2).permutation(len(labels)))
    halves = 2 * labels
    halves[kept] += place_in_class(labels[kept], ranks[kept]) % 2
    parts = [_Centres.of(view.unit, halves, kept, 2 * classes) for view in views]
    has_two = 2 * np.flatnonzero(parts[0].counts[1::2] > 1)
    return np.mean([one.sameness(has_two, has_two + 1) for one in parts], 0)


# Duplicates.

_SIDE, _NEAR, _COPIES, _PAIRS = 32, 5, 1000, 4096
_PLAIN = 8  # levels of gray: an image with fewer agrees with no copy


@dataclass(frozen=True)
class Pixels:
    """N images in gray, uint8 [N, 32, 32], and the first 8 bytes of the SHA-256 of each file, uint64 [N]."""

    gray: np.ndarray
    digests: np.ndarray


def read_pixels(source: Source, numbers: np.ndarray) -> Pixels:
    """Read images of a source, numbers: int64 [N], with a thread per processor; DataError names a bad one."""
    gray, digests = np.zeros((len(numbers), _SIDE, _SIDE), np.uint8), np.zeros(len(numbers), np.uint64)

    def read(row: int) -> None:
        number = numbers.item(row)
        with naming(source.name, number):
            data, _ = source[number]
            assert isinstance(data, bytes)  # `read_listing` has refused other datasets than files
            gray[row] = decode_image(data, (1, _SIDE, _SIDE))[0].numpy()
        digests[row] = int.from_bytes(hashlib.sha256(data).digest()[:8], "little")

    deque(in_threads(read, range(len(numbers))), 0)
    return Pixels(gray, digests)


def agreement(one: np.ndarray, other: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the highest correlation, over all cyclic shifts, of pairs of images, float [n].

    one, other: the images, uint8 [N, 32, 32]. pairs: numbers in `one` and in `other`, int64 [n, 2].
    """
    found = np.empty(len(pairs))
    for first in range(0, len(pairs), _PAIRS):
        rows = slice(first, first + _PAIRS)
        mine, theirs = _spectra(one[pairs[rows, 0]]), _spectra(other[pairs[rows, 1]])
        found[rows] = np.fft.irfft2(mine * theirs.conj(), s=one.shape[1:]).max((1, 2))
    return found


def _spectra(gray: np.ndarray) -> np.ndarray:
    pixels = gray.astype(np.float32)
    pixels -= pixels.mean((1, 2), keepdims=True)
    pixels /= np.maximum(np.linalg.norm(pixels, axis=(1, 2), keepdims=True), 1e-3)
    return np.fft.rfft2(pixels)


def find_duplicates(near: Sequence[np.ndarray], pixels: Pixels, copies: np.ndarray) -> Found:
    """Return pairs of images that are duplicates.

    near: the nearest images by view, `Labels.near`. copies: the agreement of images with their copies
    (`planted_copies`).
    """
    order = np.argsort(pixels.digests, kind="stable")
    is_same = np.diff(pixels.digests[order]) == 0
    pairs = [np.stack([order[:-1], order[1:]], 1)[is_same]]
    pairs += [pairs_in(numbers[:, : _NEAR + 1]) for numbers in near]
    return agreeing(pixels, pixels, distinct(pairs), copies)


def agreeing(one: Pixels, other: Pixels, pairs: np.ndarray, copies: np.ndarray) -> Found:
    """Return those of the pairs, int64 [n, 2], that agree as nine in ten copies do, or are the same file."""
    first, second = pairs.T
    scores = agreement(one.gray, other.gray, pairs)
    scores[one.digests[first] == other.digests[second]] = 1
    enough = np.quantile(copies, 0.1) if len(copies) else 1
    order = np.argsort(-scores, kind="stable")[: (scores >= enough).sum()]
    return Found(np.minimum(scores[order], 1), pairs[order])


def planted_copies(source: Source, numbers: np.ndarray, pixels: Pixels) -> np.ndarray:
    """Return the agreement of images with their copies, for up to 1,000 random images of several colours."""
    rng = np.random.default_rng(5)
    rows = rng.permutation(np.flatnonzero(np.ptp(pixels.gray, (1, 2)) >= _PLAIN))[:_COPIES]
    copies = [_copy(source, numbers.item(row), rng) for row in rows]
    gray = np.array(copies, np.uint8).reshape(-1, _SIDE, _SIDE)
    return agreement(pixels.gray, gray, np.stack([rows, np.arange(len(rows))], 1))


def _copy(source: Source, number: int, rng: np.random.Generator) -> np.ndarray:
    """Return the gray pixels of a copy: up to 1 % cropped, 50 to 100 % of the size, brighter, as JPEG."""
    data, _ = source[number]
    pixels = decode_image(data, (3, 256, 256)).permute(1, 2, 0).contiguous().numpy()
    left, top, right, bottom = (rng.uniform(0, 0.01, 4) * 256).round().astype(int).tolist()
    picture = PillowImage.fromarray(pixels).crop((left, top, 256 - right, 256 - bottom))
    side = int(rng.uniform(0.5, 1) * 256)
    picture = ImageEnhance.Brightness(picture.resize((side, side))).enhance(rng.uniform(0.9, 1.1))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=int(rng.integers(60, 96)))
    return decode_image(file.getvalue(), (1, _SIDE, _SIDE))[0].numpy()
