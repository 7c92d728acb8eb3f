"""Searches among labelled embeddings: identification of probes in a gallery, and retrieval.

Identification: closed-set rank-k and CMC, open-set FNIR at FPIR with distractors. The definitions are those
of NIST FRVT 1:N (Grother et al., NISTIR 8271). A probe whose identity is in the gallery is a mated search,
any other probe a non-mated search. The score of an identity is the highest cosine of its gallery images. FPIR
is the fraction of non-mated searches with a score at or above the threshold. FNIR is the fraction of mated
searches whose mate is below the threshold or not in the candidate list. TinyFace (Cheng et al., 2018) is the
closed-set part, with distractors in the gallery.

Retrieval: each image searches all others. R is the number of other images of the query's class. MAP@R of a
query is 1/R times the sum over i = 1..R of the precision of the first i results if result i is of the query's
class, else 0 (Musgrave et al., 2020, "A Metric Learning Reality Check"). R-precision is the share of right
results among the first R. Of results with equal scores, the wrong ones come first.

Scores are exact. The coordinates of the normalised embeddings are rounded to multiples of 2^-26, so that a
float64 holds every product and every partial sum without rounding. So scores do not depend on the size of
chunks, the number of ranks or the device, and equal embeddings have equal scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from plsc.errors import DataError
from plsc.evaluate.report import Result, Table
from plsc.machine import Counter
from plsc.parallel.world import World, class_ranges, gather_rows

RANKS = (1, 5, 10)
FPIRS = (1e-1, 1e-2, 1e-3)  # reported if there are enough non-mated searches
CANDIDATES = 50  # length of the candidate list, as in NIST FRVT 1:N
_CHUNK = 4096  # probes, and gallery images, that are compared at a time
_GRID = 2.0**26
RATES = {"map_at_r": "MAP@R", "r_precision": "R-precision", "precision_at_1": "precision at 1"}
_COUNTS = ("images", "classes", "queries", "single_images")
_CELLS = 2**24  # highest scores of some queries, in memory at a time; more for a larger class


@dataclass(frozen=True)
class IdentificationResult(Result):
    """The result of `identify`; rates are fractions, 0..1."""

    METRICS: ClassVar = ("rank1",)

    rank1: float  # the mate has the highest score of all identities
    rank5: float  # the mate is among the first five
    rank10: float
    fnir_at_fpir: dict[float, float]  # of the FPIRs that the number of non-mated searches resolves
    threshold_at_fpir: dict[float, float]  # cosine; a score at the threshold is accepted
    mated: int  # searches whose identity is in the gallery
    non_mated: int
    identities: int  # enrolled, without distractors
    distractors: int  # gallery images without identity
    gallery_images: int
    candidates: int  # length of the candidate list that FNIR is counted on
    ranks: np.ndarray = field(repr=False, compare=False)  # of the mates, int64 [mated], from 1
    mate_scores: np.ndarray = field(repr=False, compare=False)  # float64 [mated]
    top_scores: np.ndarray = field(repr=False, compare=False)  # highest of each non-mated search, float64

    def cmc(self) -> np.ndarray:
        """Return the cumulative match characteristic, float64 [N]: rate of mates at rank 1..k, k = 1..N."""
        counts = np.bincount(self.ranks, minlength=self.identities + self.distractors + 1)
        return np.cumsum(counts[1:]) / self.mated

    def fnir_curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(fpir, fnir)``, float64: the lowest FNIR at each possible FPIR, from 0 to 1."""
        return _open_set_curve(self.ranks, self.mate_scores, self.top_scores, self.candidates)[:2]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; with the CMC up to the length of the candidate list."""
        return {**super().as_dict(), "cmc": self.cmc()[: self.candidates].tolist()}

    def summary(self) -> str:
        """Return the rates for the log."""
        open_set = "".join(f" FNIR {fnir:.4f} at FPIR {fpir:g}" for fpir, fnir in self.fnir_at_fpir.items())
        return (
            f"rank-1 {self.rank1:.4f} rank-5 {self.rank5:.4f} rank-10 {self.rank10:.4f}{open_set} "
            f"({self.mated:,} mated and {self.non_mated:,} non-mated searches)"
        )

    def _tables(self) -> list[Table]:
        found = zip(RANKS, (self.rank1, self.rank5, self.rank10), strict=True)
        tables = [
            Table(["Rank", "Mates found"], [[str(k), f"{rate:.4f}"] for k, rate in found], "Closed set")
        ]
        if self.fnir_at_fpir:
            rows = [
                [f"{fpir:g}", f"{fnir:.4f}", f"{self.threshold_at_fpir[fpir]:.4f}"]
                for fpir, fnir in self.fnir_at_fpir.items()
            ]
            tables.append(Table(["FPIR", "FNIR", "Threshold (cosine)"], rows, "Open set"))
        counts = {
            "gallery images": self.gallery_images, "identities": self.identities,
            "distractors": self.distractors, "mated searches": self.mated,
            "non-mated searches": self.non_mated,
        }  # fmt: skip
        rows = [[name, f"{count:,}"] for name, count in counts.items()]
        return [*tables, Table(["Gallery and searches", "Count"], rows)]

    def _pictures(self, name: str, stem: str) -> dict[str, Callable[[Path], None]]:
        from plsc.evaluate.plots import plot_cmc, plot_rates  # imports matplotlib

        pictures: dict[str, Callable[[Path], None]] = {}
        pictures[f"{stem}_cmc.png"] = lambda path: plot_cmc({name: self.cmc()}, path)
        if self.non_mated:
            curve, limits = {name: self.fnir_curve()}, (min(0.1, 1 / self.non_mated), 1.0)
            pictures[f"{stem}_fnir.png"] = lambda path: plot_rates(curve, path, "FPIR", "FNIR", limits)
        return pictures

    def _choices(self) -> list[str]:
        missing = ", ".join(f"{fpir:g}" for fpir in FPIRS if fpir not in self.fnir_at_fpir)
        return [
            "The score of an identity is the highest cosine of its gallery images; each distractor is an "
            "identity.",
            "The rank of a mate is the number of identities with its score or a higher one.",
            "FPIR: the share of non-mated searches with a score at or above the threshold. FNIR: of mated "
            f"searches whose mate is below it, or not in the first {self.candidates} candidates.",
            *([f"FNIR at FPIR {missing} is absent: too few non-mated searches."] if missing else []),
        ]


def identify(
    gallery: np.ndarray,
    gallery_labels: np.ndarray,
    probes: np.ndarray,
    probe_labels: np.ndarray,
    world: World | None = None,
    *,
    candidates: int = CANDIDATES,
) -> IdentificationResult:
    """Search the gallery for every probe; a collective, with the same arguments on every rank.

    The scores need bounded memory, and the embeddings may be memory-mapped. Each rank searches for a part of
    the probes.

    Args:
        gallery: [G, D], not necessarily normalised.
        gallery_labels: int64 [G], identities; an identity may have several images. -1: a distractor.
        probes: [P, D].
        probe_labels: int64 [P]; those that are not in the gallery (-1 too) are the non-mated searches.
        world: the ranks that share the work, each on its device; None: this process alone, on the CPU.
        candidates: length of the candidate list of an open-set search.

    Raises:
        DataError: an embedding is not finite, the shapes do not fit, or there are no mated searches.
    """
    identity, searched = _number_identities(gallery_labels, probe_labels)
    world = world or World.single("cpu")
    gallery_rows = Rows(gallery, identity, world.device, "gallery")
    probe_rows = Rows(probes, searched, world.device, "probe")
    non_mated = int((searched < 0).sum())  # they come first in the order of probe_rows
    if non_mated == len(searched):
        raise DataError("no probe has its identity in the gallery; identification needs mated searches")
    rows = gallery_rows, probe_rows
    top = share(partial(_top_score, *rows), 0, non_mated, world, width=1)
    mates = share(partial(_rank_and_score, *rows), non_mated, len(searched), world, width=2)
    # Back to the order of the arguments.
    top = top[np.argsort(probe_rows.order[:non_mated])]
    mates = mates[np.argsort(probe_rows.order[non_mated:])]
    labels = np.asarray(gallery_labels)
    ranks, scores = mates[:, 0].astype(np.int64), mates[:, 1]
    curve = _open_set_curve(ranks, scores, top[:, 0], candidates) if non_mated else None
    fnirs, thresholds = _at_fpirs(curve, non_mated) if curve is not None else ({}, {})
    return IdentificationResult(
        **{f"rank{k}": float(np.mean(ranks <= k)) for k in RANKS},
        fnir_at_fpir=fnirs,
        threshold_at_fpir=thresholds,
        mated=len(ranks),
        non_mated=non_mated,
        identities=len(np.unique(labels[labels >= 0])),
        distractors=int((labels < 0).sum()),
        gallery_images=len(labels),
        candidates=candidates,
        ranks=ranks,
        mate_scores=scores,
        top_scores=top[:, 0],
    )


def split_gallery(labels: np.ndarray) -> np.ndarray:
    """Return which images of one labelled dataset are the gallery, bool [N]; the others are the probes.

    The gallery is the first image of the first, third, fifth, ... class, in the order of their numbers, so
    that the images of the other classes are non-mated searches.
    """
    labels = np.asarray(labels)
    _, first = np.unique(labels, return_index=True)
    is_gallery = np.zeros(len(labels), dtype=bool)
    is_gallery[first[::2]] = True
    return is_gallery


class Rows:
    """Embeddings in the order of their identities, normalised and rounded part by part.

    identity: int64 [N], in this order.
    """

    def __init__(
        self, embeddings: np.ndarray, identity: np.ndarray, device: torch.device | str, name: str
    ) -> None:
        self._embeddings, self._device = embeddings, device
        self._norms = norms_of(embeddings, name, identity)
        self.order = np.argsort(identity, kind="stable")
        self.identity = identity[self.order]

    def __len__(self) -> int:
        return len(self.order)

    def part(self, start: int, stop: int) -> Tensor:
        """Return these rows, float64 [stop - start, D]."""
        which = self.order[start:stop]
        return unit_rows(np.asarray(self._embeddings[which]), self._norms[which], self._device)


def chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield ``(first, last + 1)`` of each chunk."""
    for first in range(start, stop, _CHUNK):
        yield first, min(first + _CHUNK, stop)


def unit_rows(embeddings: np.ndarray, norms: np.ndarray, device: torch.device | str) -> Tensor:
    """Return the normalised embeddings, rounded to multiples of 2^-26, float64 [n, D]."""
    rows = torch.from_numpy(embeddings).to(device).double()
    divisors = torch.from_numpy(norms).to(device)
    return (rows / divisors[:, None]).mul_(_GRID).round_().div_(_GRID)


def check_finite(values: np.ndarray, name: str, names: Sequence[Any] | np.ndarray) -> None:
    """Raise DataError, with name and that of names [n], if one of values [n, ...] is not finite."""
    finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    if not finite.all():
        raise DataError(f"the embedding of {name}{names[int(np.argmin(finite))]} is not finite")


def norms_of(embeddings: np.ndarray, name: str, labels: np.ndarray | None = None) -> np.ndarray:
    """Return the L2 norms, float64 [N], 1 for zero embeddings.

    Raises DataError if an embedding is not finite, or there is not one per label. name: of such an embedding.
    """
    if np.ndim(embeddings) != 2 or (labels is not None and len(labels) != len(embeddings)):
        count = "" if labels is None else f" for {len(labels)} labels"
        raise DataError(
            f"the {name} embeddings have shape {list(np.shape(embeddings))}{count}; expected [N, D]"
        )
    norms = np.empty(len(embeddings))
    for start in range(0, len(norms), _CHUNK):
        chunk = embeddings[start : start + _CHUNK].astype(np.float64)
        norms[start : start + _CHUNK] = np.linalg.norm(chunk, axis=1)
    check_finite(norms, f"{name} ", range(len(norms)))
    return np.where(norms == 0, 1, norms)


def _number_identities(gallery_labels: np.ndarray, probe_labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the identities from 0, each distractor as one more; probes of no identity get -1."""
    gallery_labels, probe_labels = np.asarray(gallery_labels), np.asarray(probe_labels)
    known = np.unique(gallery_labels[gallery_labels >= 0])
    identity = np.searchsorted(known, gallery_labels)
    distractor = gallery_labels < 0
    identity[distractor] = len(known) + np.arange(distractor.sum())
    return identity, np.where(np.isin(probe_labels, known), np.searchsorted(known, probe_labels), -1)


def share(
    search: Callable[[int, int], Tensor], start: int, stop: int, world: World, width: int
) -> np.ndarray:
    """Return the values of start to stop - 1, float64 [n, width]; each rank searches for a part of them.

    search: returns those of its arguments' range, [n, width].
    """
    if start == stop:
        return np.empty((0, width))
    ranks = class_ranges(stop - start, world.size)
    first, last = (start + bound for bound in ranks[world.rank])
    found = [torch.empty((0, width), dtype=torch.float64)]
    progress = Counter("searched for about", stop - start, "embeddings")
    for chunk in chunks(first, last):
        found.append(search(*chunk).cpu())
        if world.is_main:  # it stands for all ranks
            progress.add((chunk[1] - chunk[0]) * world.size)
    sizes = [last - first for first, last in ranks]
    return gather_rows(torch.cat(found).to(world.device), sizes, world.head_group).cpu().numpy()


def _top_score(gallery: Rows, probes: Rows, start: int, stop: int) -> Tensor:
    """Return the highest score of each probe, [n, 1]."""
    x = probes.part(start, stop).T
    top = x.new_full((stop - start,), -torch.inf)
    for chunk in chunks(0, len(gallery)):
        top = torch.maximum(top, (gallery.part(*chunk) @ x).amax(0))
    return top[:, None]


def _rank_and_score(gallery: Rows, probes: Rows, start: int, stop: int) -> Tensor:
    """Return the rank and the score of the mate of each probe, [n, 2]."""
    x = probes.part(start, stop).T
    mate = _mate_score(gallery, probes.identity[start:stop], x)
    rank = torch.zeros_like(mate, dtype=torch.int64)
    # Best score so far of an identity with images in two chunks.
    unfinished = torch.full_like(mate, -torch.inf)
    for first, last in chunks(0, len(gallery)):
        scores = gallery.part(first, last) @ x
        identity = gallery.identity[first:last]
        _, images = np.unique(identity, return_counts=True)
        if len(images) < len(identity):
            scores = torch.segment_reduce(scores, "max", lengths=torch.from_numpy(images).to(scores.device))
        torch.maximum(scores[0], unfinished, out=scores[0])
        unfinished.fill_(-torch.inf)
        if last < len(gallery) and gallery.identity[last] == identity[-1]:
            unfinished, scores = scores[-1].clone(), scores[:-1]
        rank += (scores >= mate).sum(0, dtype=torch.int32)
    return torch.stack([rank.double(), mate], 1)


def _mate_score(gallery: Rows, identity: np.ndarray, x: Tensor) -> Tensor:
    """Return the highest score of the gallery images of each probe's identity; x: [D, n], identity: [n].

    The identities are in order, so that only a part of the gallery has them.
    """
    mate = x.new_full((len(identity),), -torch.inf)
    wanted = torch.from_numpy(identity).to(x.device)
    first, last = np.searchsorted(gallery.identity, [identity[0], identity[-1] + 1])
    for chunk in chunks(int(first), int(last)):
        scores = gallery.part(*chunk) @ x
        enrolled = torch.from_numpy(gallery.identity[slice(*chunk)]).to(x.device)
        scores.masked_fill_(enrolled[:, None] != wanted, -torch.inf)
        mate = torch.maximum(mate, scores.amax(0))
    return mate


_Curve = tuple[np.ndarray, np.ndarray, np.ndarray]


def _open_set_curve(ranks: np.ndarray, scores: np.ndarray, top: np.ndarray, candidates: int) -> _Curve:
    """Return FPIR, FNIR and the score that an accepted one exceeds, of each possible FPIR from 0 to 1."""
    limits, counts = np.unique(-top, return_counts=True)  # highest score first
    limits = np.append(-limits, -np.inf)
    fpir = np.append(0, np.cumsum(counts)) / len(top)
    listed = np.sort(scores[ranks <= candidates])
    accepted = len(listed) - np.searchsorted(listed, limits, side="right")
    return fpir, (len(ranks) - accepted) / len(ranks), limits


def _at_fpirs(curve: _Curve, searches: int) -> tuple[dict[float, float], dict[float, float]]:
    """Return FNIR and threshold at each of `FPIRS` at which a non-mated search may be accepted."""
    fpir, fnir, limits = curve
    resolved = [value for value in FPIRS if 1 / searches <= value]
    chosen = {value: int(np.searchsorted(fpir, value, side="right")) - 1 for value in resolved}
    return (
        {value: float(fnir[i]) for value, i in chosen.items()},
        {value: float(np.nextafter(limits[i], np.inf)) for value, i in chosen.items()},
    )


@dataclass(frozen=True)
class RetrievalResult(Result):
    """The result of `retrieval`; rates are fractions, 0..1, means over the queries."""

    METRICS: ClassVar = tuple(RATES)

    map_at_r: float
    r_precision: float
    precision_at_1: float
    images: int
    classes: int
    queries: int  # images of a class with at least two
    single_images: int  # classes with one image, which is searched, but is no query
    is_query: np.ndarray = field(repr=False, compare=False)  # bool [images]
    values: np.ndarray = field(repr=False, compare=False)  # `RATES` of each query, float64 [queries, 3]

    def summary(self) -> str:
        """Return the rates for the log."""
        rates = " ".join(f"{title} {getattr(self, name):.4f}" for name, title in RATES.items())
        return f"{rates} ({self.queries:,} queries in {self.images:,} images)"

    def _choices(self) -> list[str]:
        return [
            "Each image searches all others by cosine; of equal scores, wrong results come first. R: the "
            "other images of its class. R-precision: the share of right results among the first R. MAP@R: "
            "1/R x the sum, over the right ones of them, of the precision up to there.",
            "Single images, the only ones of their class, are searched, but are no queries.",
        ]

    def _tables(self) -> list[Table]:
        row = [f"{one:.6f}" if isinstance(one, float) else f"{one:,}" for one in self.as_dict().values()]
        return [Table((*RATES.values(), *(one.replace("_", " ") for one in _COUNTS)), [row])]


def retrieval(
    embeddings: np.ndarray,
    labels: np.ndarray,
    world: World | None = None,
) -> RetrievalResult:
    """Search all other images for each image; a collective. Results do not depend on the number of ranks.

    Args:
        embeddings: [N, D], not necessarily normalised, the same on every rank; may be memory-mapped.
        labels: int64 [N], the classes.
        world: as of `identify`.

    Raises:
        DataError: an embedding is not finite, the shapes do not match, or no class has two images.
    """
    world = world or World.single("cpu")
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if sizes.max(initial=0) < 2:
        raise DataError("no class has two images; retrieval needs other images of the class of a query")
    by_size = np.argsort(-sizes, kind="stable")
    rows = Rows(embeddings, np.argsort(by_size)[classes], world.device, "query")  # the largest class first
    search = partial(_search, sizes[by_size][rows.identity] - 1, rows)
    is_query = sizes[classes] > 1
    count = int(is_query.sum())
    values = share(search, 0, count, world, width=len(RATES))
    values = values[np.argsort(rows.order[:count])]  # in the order of the arguments
    means = dict(zip(RATES, values.mean(axis=0).tolist(), strict=True))
    counts = dict(zip(_COUNTS, (len(rows), len(sizes), count, len(rows) - count), strict=True))
    return RetrievalResult(**means, **counts, is_query=is_query, values=values)


def _search(others: np.ndarray, images: Rows, start: int, stop: int) -> Tensor:
    """Return `RATES` of these queries, float64 [stop - start, 3]; others: R of each image, descending."""
    most, middle = int(others[start]), (start + stop) // 2
    if start < middle and (stop - start) * most > _CELLS:
        parts = (start, middle), (middle, stop)
        return torch.cat([_search(others, images, *part) for part in parts])
    x = images.part(start, stop)
    classes = torch.from_numpy(images.identity).to(x.device)
    # The highest scores of right and of wrong results, descending, [stop - start, most]
    right = wrong = x.new_full((stop - start, most), -torch.inf)
    for first, last in chunks(0, len(images)):
        scores = x @ images.part(first, last).T
        same = classes[start:stop, None] == classes[first:last]
        wrong = torch.cat([wrong, scores.masked_fill(same, -torch.inf)], 1).topk(most).values
        if same.any():
            itself = np.arange(max(start, first), min(stop, last))  # may be empty
            same[itself - start, itself - first] = False
            right = torch.cat([right, scores.masked_fill_(~same, -torch.inf)], 1).topk(most).values
    place, size = np.arange(1, most + 1), others[start:stop, None]
    rank = place + torch.searchsorted(-wrong, -right, right=True).cpu().numpy()  # of the right results
    found = (place <= size) & (rank <= size)
    precision = np.cumsum(found * place / rank, axis=1)[:, -1:]  # in order: `most` does not change the sum
    rates = [precision / size, found.sum(axis=1, keepdims=True) / size, rank[:, :1] == 1]
    return torch.from_numpy(np.concatenate(rates, axis=1))
