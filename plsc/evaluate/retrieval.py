"""Retrieval: search all other images for each image; MAP@R, R-precision and precision at 1.

R is the number of other images of the query's class. MAP@R of a query is 1/R times the sum over i = 1..R of
the precision of the first i results if result i is of the query's class, else 0 (Musgrave et al., 2020, "A
Metric Learning Reality Check"). R-precision is the share of right results among the first R. Of results with
equal scores, the wrong ones come first. Scores are exact, as in `plsc.evaluate.identification`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from plsc.errors import DataError
from plsc.evaluate.identification import Rows, chunks, share
from plsc.evaluate.report import Result, Table
from plsc.parallel.world import World

RATES = {"map_at_r": "MAP@R", "r_precision": "R-precision", "precision_at_1": "precision at 1"}
_COUNTS = ("images", "classes", "queries", "single_images")
_CELLS = 2**24  # highest scores of some queries, in memory at a time; more for a larger class


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
            "Each image searches all others by cosine. R: the other images of its class. MAP@R: 1/R x the "
            "sum, over the right ones of the first R results, of the precision up to there. R-precision: the "
            "share of right results among the first R. Of results with equal scores, wrong ones come first.",
            "Single images, the only ones of their class, are searched, but are no queries.",
        ]

    def _tables(self) -> list[Table]:
        row = [f"{one:.6f}" if isinstance(one, float) else f"{one:,}" for one in self.as_dict().values()]
        return [Table((*RATES.values(), *(one.replace("_", " ") for one in _COUNTS)), [row])]


def retrieval(
    embeddings: np.ndarray,
    labels: np.ndarray,
    world: World | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> RetrievalResult:
    """Search all other images for each image; a collective. Results do not depend on the number of ranks.

    Args:
        embeddings: [N, D], not necessarily normalised, the same on every rank; may be memory-mapped.
        labels: int64 [N], the classes.
        world, device, progress: as of `plsc.evaluate.identification.identify`.

    Raises:
        DataError: an embedding is not finite, the shapes do not match, or no class has two images.
    """
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if sizes.max(initial=0) < 2:
        raise DataError("no class has two images; retrieval needs other images of the class of a query")
    by_size = np.argsort(-sizes, kind="stable")
    rows = Rows(embeddings, np.argsort(by_size)[classes], device, "query")  # the largest class first
    search = partial(_search, sizes[by_size][rows.identity] - 1, rows)
    is_query = sizes[classes] > 1
    count = int(is_query.sum())
    values = share(search, 0, count, world=world, progress=progress, width=len(RATES))
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
