"""Verification of pairs of images: the lists of pairs, ten-fold accuracy, TAR at FAR, ROC, AUC and EER.

The accuracy follows the LFW protocol (Huang et al., 2007, "Labeled Faces in the Wild") as implemented by
insightface, so it is comparable with published results: squared L2 distances of normalised embeddings,
thresholds 0, 0.01, ..., 3.99, ten contiguous folds without shuffling. Each fold is evaluated with the best
threshold of the other nine; the lowest one wins a tie.

Scores are cosines rounded to multiples of 2^-20, distances 2 - 2 * score: rounding orders no equal pairs.

A list of pairs is text: a line is ``<path> <path> <flag>``, separated by tabs or commas, or by blanks if no
path contains one. The flag is 1 or True for the same class; 0, -1 or False for different ones. Column names
in the first line are ignored. In the layout of LFW's pairs.txt, the first line has one or two integers (folds
and pairs per fold), and each other line is ``<name> <n> <n>`` or ``<name> <n> <name> <n>``. Image n of a name
is ``<name>/<name>_000n.jpg``. Blank lines, CRLF and a UTF-8 byte order mark are accepted. A first line
``# images: <folder>`` tells where the images are, for a list that lies elsewhere.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from plsc.data.decode import IMAGE_SUFFIXES
from plsc.data.files import PathTable, listed_path
from plsc.data.sources.base import FileSource, check_start, printable
from plsc.errors import DataError
from plsc.evaluate.curves import (
    area_under,
    check_pairs,
    curve_and_thresholds,
    equal_error_rate,
    tar_at_far,
)
from plsc.evaluate.identification import check_finite
from plsc.evaluate.report import Result, Table
from plsc.storage.blocks import streamed, text_lines
from plsc.storage.urls import base_name, exists, is_url, join, local_path, located, parent_of, place_of, shown

GRID = 2**20  # scores per unit: on a grid, rounding errors do not order equal pairs
THRESHOLDS = np.arange(0, 4, 0.01)  # squared L2 distance of unit vectors, 0..4
FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # false accept rates at which the true accept rate is reported
_CHUNK = 8192  # pairs per chunk in double precision
_Z95 = 1.959963984540054  # 97.5% quantile of the normal distribution
_MAX_LINE_BYTES = 16384  # of a list
IMAGES = "# images: "
_EXPECTED = "expected '<path> <path> <0 or 1>', or tabs between them if a path contains a blank"
_FLAGS = {b"1": b"1", b"true": b"1", b"0": b"0", b"-1": b"0", b"false": b"0"}
_COLUMN_NAMES = re.compile(rb"[^\W\d]\w*([\t,; ]+[^\W\d]\w*){2}")
_EXPECTED_LFW = (
    "expected '<name> <n> <n>' or '<name> <n> <name> <n>', as the first line is that of LFW's list"
)


@dataclass(frozen=True)
class PairList:
    """P pairs of the images of a source, each image once; ``pairs``: int64 [P, 2]; ``is_same``: bool [P]."""

    images: ListedImages
    pairs: np.ndarray
    is_same: np.ndarray

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.is_same)


class ListedImages(FileSource):
    """The images of a list, below a folder or URL; `lines` has the first line that names each.

    is_named_by_list: the folder comes from the list, so that it may have private files.
    """

    def __init__(
        self,
        root: Path | str,
        paths: PathTable,
        lines: np.ndarray,
        title: str,
        is_named_by_list: bool = False,
    ) -> None:
        super().__init__(root, paths, np.full(len(lines), -1))
        self._lines, self._title, self._is_named_by_list = lines, title, is_named_by_list

    def _stored_at(self, index: int) -> bytes:
        stored = super()._stored_at(index)
        if self._is_named_by_list:
            check_start(stored)
        return stored

    def _stored_many(self, indices: np.ndarray) -> Iterator[bytes | None]:
        return repeat(None) if self._is_named_by_list else super()._stored_many(indices)

    def name(self, index: int) -> str:
        """Return ``a.jpg (pairs.txt:12)``."""
        return f"{super().name(index)} ({self._title}:{self._lines[index]})"

    def check(self) -> None:
        """Raise DataError for the first image that is missing; images at a URL are not checked."""
        if isinstance(self.root, str):
            return
        for index in range(len(self)):
            place = self.path(index)
            if not is_url(place) and not os.path.isfile(place):  # noqa: PTH113 - False for a long name
                text = f"{self.name(index)}: there is no such image in {self.root}"
                raise DataError(text, kind="missing")


def read_pair_list(
    path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None, allowed: Sequence[str] = ()
) -> PairList:
    """Read a list of pairs, at a path or URL.

    Args:
        path: the text file.
        folder: folder or URL of the images; by default that of the first line, or of the list. allowed: as of
            `located`.

    Raises:
        DataError: the list cannot be read, a line is invalid, or an image is missing; it names the line.
    """
    place = local_path(os.fspath(path))
    title = base_name(shown(place))
    root = parent_of(place) if folder is None else os.fspath(folder)
    paths, numbers = PathTable(), dict[bytes, int]()
    first_lines, pairs, flags = array("q"), array("q"), array("b")
    lfw: _Lfw | None = None
    is_named_by_list = False
    for number, line in lines_of(place):
        if number == 1 and line.startswith(IMAGES.encode()):
            named = os.fsdecode(line).removeprefix(IMAGES)
            if folder is None:
                root, is_named_by_list = place_of(root, located(named, root, allowed, place)), True
            continue
        if lfw is None and not flags and _is_lfw_header(line):
            lfw = _Lfw(line, root)
            continue
        try:
            *both, flag = lfw.parse(line) if lfw is not None else _parse(line)
            for one in both:
                one = listed_path(one, root, allowed, place)
                if one not in numbers:
                    numbers[one] = len(paths)
                    paths.append(one)
                    first_lines.append(number)
                pairs.append(numbers[one])
        except (ValueError, DataError) as problem:
            if number == 1 and _COLUMN_NAMES.fullmatch(line):
                continue
            raise DataError(f"{shown(place)}:{number}: {problem}") from None
        flags.append(flag == b"1")
    if not flags or (lfw is not None and lfw.pairs != len(flags)):
        wanted = _EXPECTED if lfw is None else f"its first line announces {lfw.pairs:,}"
        raise DataError(f"{shown(place)} has {len(flags):,} pairs; {wanted}")
    base = root if is_url(root) else Path(root)
    images = ListedImages(base, paths, np.array(first_lines), title, is_named_by_list)
    images.check()
    return PairList(images, np.array(pairs).reshape(-1, 2), np.array(flags, dtype=bool))


def lines_of(place: str) -> Iterator[tuple[int, bytes]]:
    """Yield number and text of each line that is not blank."""
    with streamed(place) as file:
        for number, _, line in text_lines(file, shown(place), _MAX_LINE_BYTES):
            if line := line.strip(b" \r\n"):
                yield number, line


def _parse(line: bytes) -> list[bytes]:
    """Return both paths and the flag; ValueError describes a bad line."""
    fields = [one.strip() for one in line.split(b"\t")] if b"\t" in line else line.split()
    by_comma = [one.strip(b'" ') for one in re.split(b"[,;]", line)]
    if len(by_comma) == 3 and by_comma[2].lower() in _FLAGS:  # else a path may contain a comma
        fields = by_comma
    if len(fields) != 3 or not all(fields) or fields[2].lower() not in _FLAGS:
        raise ValueError(f"{_EXPECTED}, got '{shown(printable(line))[:200]}'")
    return [*fields[:2], _FLAGS[fields[2].lower()]]


def _is_lfw_header(line: bytes) -> bool:
    fields = line.split()
    return len(fields) in (1, 2) and all(one.isdigit() and len(one) <= 6 for one in fields)


class _Lfw:
    """Lines in the layout of LFW; the suffix is that of the first image found. pairs: number announced."""

    def __init__(self, header: bytes, root: str) -> None:
        folds, count = (1, *map(int, header.split()))[-2:]
        self.pairs = 2 * folds * count  # as many same pairs as different ones
        self._root = root
        self._suffix = b""

    def parse(self, line: bytes) -> list[bytes]:
        """Return both paths and the flag; ValueError describes a bad line."""
        fields = [one.strip() for one in (line.split(b"\t") if b"\t" in line else line.split())]
        is_same = len(fields) == 3
        if is_same:
            fields.insert(2, fields[0])
        if len(fields) != 4 or not all(one.isdigit() and len(one) <= 6 for one in fields[1::2]):
            raise ValueError(f"{_EXPECTED_LFW}, got '{shown(printable(line))[:200]}'")
        return [self._path(*fields[:2]), self._path(*fields[2:]), b"1" if is_same else b"0"]

    def _path(self, name: bytes, number: bytes) -> bytes:
        stem = listed_path(b"%s/%s_%04d" % (name, name, int(number)), self._root)
        if not self._suffix:
            suffixes = (*IMAGE_SUFFIXES, *map(str.upper, IMAGE_SUFFIXES))
            places = {suffix: join(self._root, f"{os.fsdecode(stem)}{suffix}") for suffix in suffixes}
            found = next((suffix for suffix, place in places.items() if exists(place)), ".jpg")
            self._suffix = found.encode()
        return stem + self._suffix


@dataclass(frozen=True)
class PairRates(Result):
    """What the results of pairs have in common; rates are fractions, 0..1."""

    tar_at_far: dict[float, float]
    tar_intervals: dict[float, tuple[float, float]]  # 95% confidence interval of the TAR, by FAR
    unresolved_fars: tuple[float, ...]  # FARs below 1 / negatives: their TAR is that of zero false accepts
    auc: float
    pairs: int
    positives: int
    negatives: int

    def resolved_fars(self) -> list[float]:
        """Return the FARs for which there are enough different pairs."""
        return [far for far in self.tar_at_far if far not in self.unresolved_fars]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; FARs are strings such as ``"0.001"``."""
        return {**super().as_dict(), "unresolved_fars": [f"{far:g}" for far in self.unresolved_fars]}

    def warning(self) -> str | None:
        """Return a warning if there are too few different pairs for some FARs."""
        if not self.unresolved_fars:
            return None
        fars = ", ".join(f"{far:g}" for far in self.unresolved_fars)
        return (
            f"{self.negatives:,} different pairs are too few for FAR {fars}: the TAR there is that of no "
            f"false accept; use at least {1 / min(self.unresolved_fars):,.0f}"
        )

    def rates(self, title: str = "", thresholds: Mapping[float, float | None] | None = None) -> Table:
        """Return a row per FAR; thresholds: lowest accepted cosine by FAR, None if no pair is accepted."""
        rows = []
        for far, tar in self.tar_at_far.items():
            rows.append([f"{far:g}", f"{tar:.4f}", "{:.4f} to {:.4f}".format(*self.tar_intervals[far])])
            if thresholds:
                limit = thresholds[far]
                rows[-1].append("none" if limit is None else f"{limit:.4f}")
            rows[-1].append("too few different pairs" if far in self.unresolved_fars else "")
        columns = ["threshold (cosine)"] if thresholds else []
        return Table(["FAR", "TAR", "95% interval", *columns, "warning"], rows, title)


@dataclass(frozen=True)
class VerificationResult(PairRates):
    """The result of `verify`; rates and accuracies are fractions, 0..1."""

    METRICS: ClassVar = ("accuracy",)  # that a checkpoint stores, and that callbacks can monitor

    accuracy: float  # mean over the folds
    accuracy_std: float  # population standard deviation over the folds
    threshold: float  # mean over the folds: pairs with a smaller squared L2 distance count as same
    threshold_cosine: float  # the same threshold as a cosine: 1 - threshold / 2
    threshold_at_far: dict[float, float | None]  # lowest accepted cosine; None: no pair is accepted
    eer: float
    mean_norm: float  # mean L2 norm of the embeddings before normalisation
    cosines: np.ndarray = field(repr=False, compare=False)  # of each pair, float64 [P]
    is_same: np.ndarray = field(repr=False, compare=False)  # of each pair, bool [P]

    def summary(self) -> str:
        """Return the accuracy for the log."""
        return f"accuracy {self.accuracy:.4f} +- {self.accuracy_std:.4f}"

    def _choices(self) -> list[str]:
        return [
            "Scores are cosines, rounded to multiples of 2^-20; a score at the threshold is accepted.",
            "Accuracy: mean and standard deviation over ten contiguous folds, each at the best threshold "
            "(squared L2 distances 0, 0.01, ..., 3.99) of the other nine.",
            "TAR at FAR: of all thresholds with at most this FAR; with 95% Wilson score intervals.",
            "EER: where FAR equals 1 - TAR, interpolated on the ROC curve.",
        ]

    def _tables(self) -> list[Table]:
        header = ("pairs", "same", "different", "accuracy", "threshold (cosine)", "AUC", "EER")
        row = [
            f"{self.pairs:,}", f"{self.positives:,}", f"{self.negatives:,}",
            f"{self.accuracy:.4f} ± {self.accuracy_std:.4f}", f"{self.threshold_cosine:.4f}",
            f"{self.auc:.5f}", f"{self.eer:.4f}",
        ]  # fmt: skip
        return [Table(header, [row]), self.rates(thresholds=self.threshold_at_far)]

    def _pictures(self, name: str, stem: str) -> dict[str, Callable[[Path], None]]:
        from plsc.evaluate.plots import plot_roc  # matplotlib is slow to import

        return {f"{stem}_roc.png": lambda path: plot_roc({name: (self.cosines, self.is_same)}, path)}


def verify(
    embeddings: np.ndarray, is_same: np.ndarray, folds: int = 10, pairs: np.ndarray | None = None
) -> VerificationResult:
    """Compute the verification metrics of pairs of embeddings.

    Args:
        embeddings: [N, D], not necessarily normalised.
        is_same: bool [P].
        folds: number of folds of the cross-validation, at least 2.
        pairs: rows of the embeddings of each pair, integers [P, 2]; by default 2p and 2p + 1.

    Raises:
        DataError: an embedding is not finite, there are fewer pairs than folds, or the pairs are all same or
            all different.
    """
    is_same = np.asarray(is_same, dtype=bool)
    cosines, mean_norm = _compare(embeddings, pairs)
    check_pairs(cosines, is_same)
    if len(is_same) < folds:
        raise DataError(f"there are {len(is_same)} pairs for {folds} folds; use more pairs or fewer folds")
    accuracies, thresholds = _cross_validate(2 - 2 * cosines, is_same, folds)
    threshold = float(thresholds.mean())
    far, tar, accepted = curve_and_thresholds(cosines, is_same)
    at = {rate: int(np.searchsorted(far, rate, side="right")) - 1 for rate in FARS}
    return VerificationResult(
        accuracy=float(accuracies.mean()),
        accuracy_std=float(accuracies.std()),
        threshold=threshold,
        threshold_cosine=1 - threshold / 2,
        threshold_at_far={rate: float(accepted[index]) if index else None for rate, index in at.items()},
        eer=equal_error_rate(far, tar),
        mean_norm=mean_norm,
        cosines=cosines,
        is_same=is_same,
        **rates_of_curve(far, tar, is_same),
    )


def rates_of_curve(far: np.ndarray, tar: np.ndarray, is_same: np.ndarray) -> dict[str, Any]:
    """Return the fields of `PairRates` for a curve of `roc_curve`."""
    positives = int(is_same.sum())
    negatives = len(is_same) - positives
    at = {rate: tar_at_far(far, tar, rate) for rate in FARS}
    return {
        "tar_at_far": at,
        "tar_intervals": {
            rate: wilson_interval(round(share * positives), positives) for rate, share in at.items()
        },
        "unresolved_fars": tuple(rate for rate in FARS if 1 / negatives > rate),
        "auc": area_under(far, tar),
        "pairs": len(is_same),
        "positives": positives,
        "negatives": negatives,
    }


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Return the 95% Wilson score interval of a rate (Wilson, 1927)."""
    rate, square = successes / trials, _Z95**2 / trials
    centre = rate + square / 2
    half = (square * rate * (1 - rate) + square**2 / 4) ** 0.5
    low, high = (centre - half) / (1 + square), (centre + half) / (1 + square)
    return (low if successes else 0.0), (high if successes < trials else 1.0)


def scores(embeddings: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair, float64 [P], rounded to a multiple of 2^-20.

    Pair p is rows 2p and 2p + 1 of [2P, D]. A zero embedding has cosine 0 with every other.

    Raises:
        DataError: an embedding is not finite.
    """
    return _compare(embeddings)[0]


def _compare(embeddings: np.ndarray, pairs: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """Return the cosines on the grid, float64 [P], and the mean norm of the embeddings."""
    embeddings = np.asarray(embeddings)
    rows = np.arange(len(embeddings)).reshape(-1, 2) if pairs is None else pairs
    cosines = np.empty(len(rows))
    total = 0.0
    for start in range(0, len(rows), _CHUNK):
        part = slice(start, start + _CHUNK)
        chunk = embeddings[rows[part]].astype(np.float64)  # [pairs, 2, D]
        check_finite(chunk, "pair ", range(start, len(rows)))
        norms = np.linalg.norm(chunk, axis=2)
        total += float(norms.sum())
        chunk /= np.where(norms == 0, 1, norms)[:, :, None]
        cosines[part] = np.rint((chunk[:, 0] * chunk[:, 1]).sum(axis=1) * GRID) / GRID
    return cosines, total / max(1, 2 * len(rows))


def _cross_validate(distances: np.ndarray, is_same: np.ndarray, folds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the accuracy of each fold, and the threshold chosen on the other folds."""
    sizes = np.full(folds, len(is_same) // folds)
    sizes[: len(is_same) % folds] += 1  # the first folds take the remainder
    fold = np.repeat(np.arange(folds), sizes)
    # A pair is accepted if distance < threshold, so from this index of THRESHOLDS on.
    first_accept = np.searchsorted(THRESHOLDS, distances, side="right")
    bins = len(THRESHOLDS) + 1

    def accepted(chosen: np.ndarray) -> np.ndarray:  # [folds, thresholds]
        counts = np.bincount(fold[chosen] * bins + first_accept[chosen], minlength=folds * bins)
        return counts.reshape(folds, bins).cumsum(axis=1)[:, :-1]

    true_accepts, false_accepts = accepted(is_same), accepted(~is_same)
    negatives = np.bincount(fold[~is_same], minlength=folds)
    correct = true_accepts + negatives[:, None] - false_accepts
    best = (correct.sum(axis=0) - correct).argmax(axis=1)  # argmax returns the first maximum
    return correct[np.arange(folds), best] / sizes, THRESHOLDS[best]
