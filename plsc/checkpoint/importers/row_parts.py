"""A tensor whose rows are spread over files, read piece by piece."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.errors import CheckpointError

_PIECE_BYTES = 8 << 20


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

    @property
    def dtype(self) -> torch.dtype:
        """The type of all parts."""
        return self.parts[0].dtype

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
        fits = (
            len(part.shape) >= 1
            and part.shape[1:] == first.shape[1:]
            and part.dtype.is_floating_point
        )
        if not fits:
            raise CheckpointError(
                f"{what} is {part.dtype} of shape {str(list(part.shape))[:80]} in one file, {first.dtype} "
                f"{str(list(first.shape))[:80]} in the first; expected floating rows of one size"
            )
    return RowParts(tuple(parts))
