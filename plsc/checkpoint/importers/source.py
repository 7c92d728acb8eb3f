"""What every importer returns: a network's tensors, and class weights in parts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from plsc.errors import CheckpointError

WEIGHT, BIAS = "head.weight", "head.bias"
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Network:
    """The network that the weights belong to; None for unknown fields."""

    name: str | None = None
    emb_size: int | None = None
    image_shape: tuple[int, ...] | None = None

    def or_else(self, other: Network) -> Network:
        """Return this network; its unknown fields are taken from `other`."""
        return Network(
            self.name or other.name, self.emb_size or other.emb_size, self.image_shape or other.image_shape
        )


@dataclass(frozen=True)
class RowParts:
    """The rows of a tensor in consecutive parts."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        if not self.parts[0].shape:
            return ()
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def read(self) -> Tensor:
        """Return the whole tensor, contiguous, on the CPU."""
        return torch.cat(self.parts) if len(self.parts) > 1 else self.parts[0].contiguous()

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows [start, stop) in order, a few MiB at a time, each with its first row's index."""
        row_bytes = max(1, math.prod(self.shape[1:]) * self.parts[0].dtype.itemsize)
        step = max(1, _PIECE_BYTES // row_bytes)
        first = 0
        for part in self.parts:
            last = first + part.shape[0]
            for row in range(max(start, first), min(stop, last), step):
                end = min(row + step, stop, last)
                yield row, part[row - first : end - first].contiguous()
            first = last


def join_rows(parts: Sequence[Tensor], what: str) -> RowParts:
    """Return the parts as one tensor; CheckpointError unless all are floats with the same row shape."""
    first = parts[0]
    for part in parts:
        fits = len(part.shape) >= 1 and part.shape[1:] == first.shape[1:] and part.dtype.is_floating_point
        if not fits:
            raise CheckpointError(
                f"{what} is {part.dtype} of shape {str(list(part.shape))[:80]} in one file, but "
                f"{first.dtype} {str(list(first.shape))[:80]} in the first; expected floats of one row shape"
            )
    return RowParts(tuple(parts))


@dataclass
class Source:
    """Weights to import.

    Attributes:
        network: the fields that the files name.
        backbone: its tensors, by our names.
        is_whole: no backbone tensor may be missing.
        rows: class weights and biases, by checkpoint key.
        options: of the run, such as model.dropout.
        notes: for the user.
    """

    layout: str
    network: Network
    backbone: Mapping[str, Tensor]
    is_whole: bool
    rows: dict[str, RowParts] = field(default_factory=dict)
    loss_type: str = "dist_arcface"
    options: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def files_by_rank(folder: Path, pattern: re.Pattern[str], what: str) -> dict[int, Path]:
    """Return the files whose whole name matches, by rank (the pattern's first group).

    Raises CheckpointError if a rank has two files, or a rank below the highest has none.
    """
    matches = filter(None, map(pattern.fullmatch, names_in(folder)))
    files = sorted((int(match[1]), folder / match[0]) for match in matches)
    ranks = [rank for rank, _ in files]
    if ranks != [*range(len(ranks))]:
        raise CheckpointError(f"{folder} has {what} of the ranks {ranks}; expected each rank from 0 once")
    return dict(files)


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def square_side(cells: int, downsampling: int) -> int | None:
    """Return the side of a square image whose final feature map has this many cells, or None."""
    side = round(cells**0.5)
    return side * downsampling if side * side == cells else None
