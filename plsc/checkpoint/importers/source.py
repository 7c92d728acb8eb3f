"""What the reader of a layout finds: a network's tensors, class rows in parts, momentum."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from plsc.errors import CheckpointError
from plsc.heads.rules import MOMENTUM

WEIGHT, BIAS = "head.weight", "head.bias"
WEIGHT_MOMENTUM, BIAS_MOMENTUM = f"rows.weight.{MOMENTUM}", f"rows.bias.{MOMENTUM}"
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Network:
    """Which network the weights belong to; None: not known."""

    name: str | None = None
    emb_size: int | None = None
    image_shape: tuple[int, ...] | None = None

    def or_else(self, other: Network) -> Network:
        """Return this one, with what is not known here taken from another."""
        return Network(
            self.name or other.name,
            self.emb_size or other.emb_size,
            self.image_shape or other.image_shape,
        )


@dataclass(frozen=True)
class RowParts:
    """Rows one after another: those of the first part, then those of the second, and so on."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        if not self.parts[0].shape:
            return ()
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def read(self) -> Tensor:
        """Return the whole tensor, contiguous, on the CPU."""
        return torch.cat(self.parts) if len(self.parts) > 1 else self.parts[0].contiguous()

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows [start, stop) in order, some MiB at a time, each with its first row's number."""
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
    """Return the parts as one tensor; CheckpointError unless all rows are of the same size and kind."""
    first = parts[0]
    for part in parts:
        fits = len(part.shape) >= 1 and part.shape[1:] == first.shape[1:] and part.dtype.is_floating_point
        if not fits:
            raise CheckpointError(
                f"{what} is {part.dtype} of shape {str(list(part.shape))[:80]} in one file, {first.dtype} "
                f"{str(list(first.shape))[:80]} in the first; expected floating rows of one size"
            )
    return RowParts(tuple(parts))


@dataclass
class Source:
    """Weights to import.

    network: what they say of it. backbone: its tensors, by our names; is_whole: nothing of it may be
    missing. momentum: of its parameters, by the same names. rows: of the head, by checkpoint key. options:
    of the run, such as model.dropout. notes: what a user should know.
    """

    layout: str
    network: Network
    backbone: Mapping[str, Tensor]
    is_whole: bool
    rows: dict[str, RowParts] = field(default_factory=dict)
    momentum: Mapping[str, Tensor] = field(default_factory=dict)
    loss_type: str = "dist_arcface"
    options: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def files_by_rank(folder: Path, pattern: re.Pattern[str], what: str) -> dict[int, Path]:
    """Return the files of a folder whose whole name matches, by the rank that its first group gives.

    Raises:
        CheckpointError: a rank has two of them, or one between 0 and the highest has none.
    """
    found: dict[int, Path] = {}
    for name in names_in(folder):
        match = pattern.fullmatch(name)
        if match is None:
            continue
        rank = int(match[1])
        if rank in found:
            raise CheckpointError(
                f"{folder} has {what} of rank {rank} twice: {found[rank].name} and {name}; remove one"
            )
        found[rank] = folder / name
    missing = [rank for rank in range(len(found)) if rank not in found]
    if missing:
        raise CheckpointError(
            f"{folder} has {what} of {len(found)} ranks, but none of rank {missing[0]}; fetch the "
            "missing file"
        )
    return dict(sorted(found.items()))


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder; CheckpointError if it cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error


def square_side(cells: int, downsampling: int) -> int | None:
    """Return the side of a square image that ends in so many cells, or None if there is none."""
    side = round(cells**0.5)
    return side * downsampling if side * side == cells else None
