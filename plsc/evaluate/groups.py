"""Rates per group of images, such as ages or cameras, at the thresholds of all images.

A pair within a group has both images in it; pairs of two groups are a row of their own. A search, or a query,
belongs to the group of its image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.data.files import name_key
from plsc.data.sources.base import FileSource, printable
from plsc.errors import DataError
from plsc.evaluate.curves import curve_and_thresholds
from plsc.evaluate.embed import ImagesOf
from plsc.evaluate.identification import IdentificationResult
from plsc.evaluate.report import Result, Table
from plsc.evaluate.verification import FARS, lines_of, wilson_interval
from plsc.storage.urls import shown

ACROSS = "across groups"
_COUNTED = {
    "TAR": "same pairs", "FAR": "different pairs", "TPIR": "mated searches", "FPIR": "non-mated searches",
    "rank-1": "mated searches",
}  # fmt: skip
_EXPECTED = "'<name or path of an image><tab><group>'"


@dataclass(frozen=True)
class Groups:
    """The group of each image; of: numbers of `names`, int64 [N], -1 for none. notes: for the report."""

    names: tuple[str, ...]
    of: np.ndarray
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupRates(Result):
    """Rates per group; tables: by title, group and rate, such as ``FAR 0.001``, ``men`` and ``TAR``.

    A rate has a value and its 95% Wilson interval (None if there are no values), and a count.
    """

    tables: dict[str, dict[str, dict[str, dict[str, Any]]]]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"tables": self.tables, "notes": list(self.notes)}

    def summary(self) -> str:
        """Return a line per group for the log, of the last table, and the notes."""
        title, table = list(self.tables.items())[-1]
        lines = [
            f"{group}: " + ", ".join(f"{rate} {_shown(found)}" for rate, found in rates.items())
            for group, rates in table.items()
        ]
        return "\n  ".join([title, *lines, *self.notes])

    def _choices(self) -> list[str]:
        return [
            *self.notes,
            "Thresholds are those of all images, with and without a group.",
            f"Pairs are of two images of the group, or {ACROSS}. Searches and queries are of images of the "
            "group, among the images of all groups.",
            "In brackets: 95% Wilson score intervals for independent values; conservative for means.",
        ]

    def _tables(self) -> list[Table]:
        tables = []
        for title, table in self.tables.items():
            first, *_ = table.values()
            header = ["group", *(f"{rate} of {_COUNTED.get(rate, 'queries')}" for rate in first)]
            rows = [[group, *map(_shown, rates.values())] for group, rates in table.items()]
            tables.append(Table(header, rows, title))
        return tables


def _shown(rate: Mapping[str, Any]) -> str:
    if not rate["count"]:
        return "none of 0"
    low, high = rate["interval"]
    return f"{rate['value']:.6f} ({low:.6f} to {high:.6f}) of {rate['count']:,}"


def _rate(total: float, count: int) -> dict[str, Any]:
    """Return a rate from the sum of values of 0..1, and their number."""
    interval = list(wilson_interval(total, count)) if count else None
    value = total / count if count else None
    return {"value": value, "interval": interval, "count": count}


def read_groups(path: str, images: Sequence[Any]) -> Groups:
    """Read the groups of images from a file, at a path or URL: ``<image><tab><group>`` per line.

    An image is named as in its list or ``label.txt``, or by its path; without a file, as in messages, such as
    ``train.csv:12``; in memory (.bin files), by its number from 0.

    Raises:
        DataError: the file cannot be read, a line is invalid or contradicts another, or none names an image.
    """
    table: dict[str, str] = {}
    for number, line in lines_of(path):
        fields = [name_key(printable(field.strip())) for field in line.split(b"\t")]
        is_pair = len(fields) == 2 and all(fields) and fields[1] != ACROSS
        if not is_pair or table.setdefault(*fields) != fields[1]:
            expected = f"'{fields[0]}' in the group '{table[fields[0]]}', as before" if is_pair else _EXPECTED
            raise DataError(
                f"{shown(path)}:{number}: expected {expected}, got '{shown(printable(line))[:200]}'"
            )
    numbers = {group: number for number, group in enumerate(sorted(set(table.values())))}
    found = [next((name for name in names if name in table), "") for names in _names_of(images)]
    unknown = sorted(table.keys() - set(found))
    if len(unknown) == len(table):
        first = next(_names_of(images))[0]
        raise DataError(f"{shown(path)} names none of the images, such as '{first}'; expected {_EXPECTED}")
    notes = [f"Groups: {shown(path)}. Images without a group, left out below: {found.count(''):,}."]
    if unknown:
        notes.append(f"{len(unknown):,} of {len(table):,} names are of no image, such as '{unknown[0]}'.")
    of = np.array([numbers[table[name]] if name else -1 for name in found])
    return Groups(tuple(numbers), of, tuple(notes))


def _names_of(images: Sequence[Any]) -> Iterator[list[str]]:
    """Yield the names that each image may have in the file."""
    source = images.source if isinstance(images, ImagesOf) else None
    for index in map(int, images.which) if isinstance(images, ImagesOf) else range(len(images)):
        if isinstance(source, FileSource):
            yield [name_key(FileSource.name(source, index)), name_key(source.path(index))]
        else:
            yield [str(index) if source is None else name_key(source.name(index))]


def count(
    scores: Any, one: Any, other: Any, is_same: Any, thresholds: Sequence[float], groups: int
) -> Tensor:
    """Count the pairs per group, `is_same` and number of thresholds reached, int64 [groups + 1, 2, T + 1].

    Arrays or tensors that broadcast: scores; one, other: the groups of both images, -1 for none; is_same. Two
    groups are the last row. thresholds: [T], ascending.
    """
    scores, one, other, is_same = map(torch.as_tensor, (scores, one, other, is_same))
    limits = torch.tensor(thresholds, dtype=scores.dtype, device=scores.device)
    levels = torch.bucketize(scores, limits, right=True, out_int32=True)
    size = len(thresholds) + 1
    rows = torch.where(one == other, one, groups).masked_fill_((one < 0) | (other < 0), -1)
    places = ((rows + 1) * 2 + is_same) * size + levels
    counts = torch.bincount(places.view(-1), minlength=(groups + 2) * 2 * size)
    return counts.view(groups + 2, 2, size)[1:]


def rates_at(
    groups: Groups, counts: Tensor, fars: Sequence[float], true: str = "TAR", false: str = "FAR"
) -> GroupRates:
    """Return the rates from the result of `count`; fars: of all images, at the thresholds."""
    names = (*groups.names, ACROSS) if false == "FAR" else groups.names
    reached = torch.as_tensor(counts).flip(-1).cumsum(-1).flip(-1).tolist()
    tables = {
        f"{false} {far:g}": {
            name: {
                true: _rate(same[place], same[0]),
                false: _rate(different[place], different[0]),
            }
            for name, (different, same) in zip(names, reached, strict=False)
        }
        for place, far in enumerate(fars, 1)
    }
    return GroupRates(tables, groups.notes)


def pair_rates(groups: Groups, pairs: np.ndarray, scores: np.ndarray, is_same: np.ndarray) -> GroupRates:
    """Return TAR and FAR per group, at the thresholds of the FARs that the pairs resolve.

    pairs: images of each pair, integers [P, 2]. scores: float64 [P]. is_same: bool [P].
    """
    fars = [far for far in FARS if (~is_same).sum() >= round(1 / far)] or [max(FARS)]
    reached, _, limits = curve_and_thresholds(scores, is_same)
    thresholds = limits[np.searchsorted(reached, fars, side="right") - 1].tolist()
    one, other = groups.of[pairs].T
    return rates_at(groups, count(scores, one, other, is_same, thresholds, len(groups.names)), fars)


def search_rates(groups: Groups, is_mated: np.ndarray, result: IdentificationResult) -> GroupRates:
    """Return rank-1, and TPIR and FPIR at the thresholds of the result, per group of the probes.

    groups: of the probes. is_mated: bool [P], whether the identity of the probe is in the gallery.
    """
    scores, thresholds = np.empty(len(is_mated)), result.threshold_at_fpir
    scores[is_mated] = np.where(result.ranks <= result.candidates, result.mate_scores, -np.inf)
    scores[~is_mated] = result.top_scores
    of, limits = groups.of, list(thresholds.values())
    counts = count(scores, of, of, is_mated, limits, len(groups.names))
    found = rates_at(groups, counts, list(thresholds), "TPIR", "FPIR")
    closed = mean_rates(replace(groups, of=of[is_mated]), {"rank-1": result.ranks == 1}, "closed set")
    return replace(found, tables={**closed.tables, **found.tables})


def mean_rates(groups: Groups, values: Mapping[str, np.ndarray], title: str) -> GroupRates:
    """Return the means of values of 0..1, by name, [N] each, per group."""
    table = {}
    for number, name in enumerate(groups.names):
        own = groups.of == number
        table[name] = {rate: _rate(float(x[own].sum()), int(own.sum())) for rate, x in values.items()}
    return GroupRates({title: table}, groups.notes)
