"""The bytes of a class tensor in its new numbering, a piece at a time: kept, joined and new rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint.classes.plan import Plan
from plsc.checkpoint.classes.source import StoredTensor
from plsc.checkpoint.shard_file import Chunks, tensor_chunks
from plsc.errors import CheckpointError, DataError
from plsc.heads.geometry import normalised
from plsc.heads.weights import initial_rows

_BLOCK = 4096  # rows that `initial_rows` draws at once

Change = Callable[[int, np.ndarray], None]
"""Alters a piece in place: its first new class, and its bytes, uint8 [n, row_bytes]."""


class Directions(Protocol):
    """Vectors [n, D] that are sliced, such as an array, perhaps one that lies in a file."""

    shape: tuple[int, ...]

    def __getitem__(self, rows: slice) -> np.ndarray: ...


def rows_of(
    tensor: StoredTensor, plan: Plan, start: int, stop: int, changes: tuple[Change, ...] = ()
) -> Chunks:
    """Return the pieces of new classes start..stop - 1: the old rows, zeros for new classes, then changes."""

    def pieces() -> Iterator[memoryview]:
        for first in range(start, stop, tensor.rows_a_piece):
            rows = tensor.take(plan.sources(first, min(stop, first + tensor.rows_a_piece)))
            for change in changes:
                change(first, rows)
            yield rows.data

    return pieces


def draw_new(weight: StoredTensor, plan: Plan, seed: int, norm: float | None) -> Change:
    """Return what fills in new rows as the head's own initialiser draws them for (seed, class) and a norm."""
    kept = plan.after - plan.added
    centers = weight.shape[1] if len(weight.shape) == 3 else 1

    @functools.lru_cache(maxsize=1)  # neighbouring pieces share a block
    def block(number: int) -> Tensor:
        return initial_rows(
            seed, number * _BLOCK, (number + 1) * _BLOCK, weight.shape[-1], weight.dtype, norm
        )

    def draw(first: int, rows: np.ndarray) -> None:
        low, high = max(first, kept) * centers, (first + len(rows)) * centers
        out = rows.reshape(len(rows) * centers, -1)
        for number in range(low // _BLOCK, -(-high // _BLOCK) if low < high else 0):
            begin, end = max(low, number * _BLOCK), min(high, (number + 1) * _BLOCK)
            drawn = block(number)[begin - number * _BLOCK : end - number * _BLOCK]
            out[begin - first * centers : end - first * centers] = _bytes_of(drawn)

    return draw


def point_new(weight: StoredTensor, plan: Plan, directions: Directions) -> Change:
    """Return what lets the first row of each new class point along its direction, as long as old rows.

    Raises DataError, while it works, for a direction that is not finite or has no length.
    """
    kept = plan.after - plan.added
    length = _mean_length(weight)

    def point(first: int, rows: np.ndarray) -> None:
        low = max(first, kept)
        if low >= first + len(rows):
            return
        given = np.array(directions[low - kept : first + len(rows) - kept])  # not a view of a file
        wanted = torch.from_numpy(given).double()
        norm = wanted.norm(dim=1, keepdim=True)
        wrong = (~(norm.isfinite() & (norm > 0)))[:, 0].nonzero()
        if len(wrong):
            raise DataError(
                f"the direction of new class {low + int(wrong[0])} has the length "
                f"{float(norm[wrong[0, 0]])}; expected a finite vector that is not zero"
            )
        values = _bytes_of((wanted / norm * length).to(weight.dtype))
        rows[low - first :, : values.shape[1]] = values  # of sub-centres the first

    return point


def average_rows(weight: StoredTensor, plan: Plan) -> Change:
    """Return what gives classes that others joined the mean of their rows and their own.

    The direction is the mean of the unit rows, the length the mean of the lengths. Of sub-centres those
    nearest to each other are paired. Rows that cancel leave the class its own. Raises CheckpointError,
    while it works, for rows that are not finite.
    """

    def average(first: int, rows: np.ndarray) -> None:
        joined = _joined(weight, plan, first, rows)
        if joined is None:
            return
        dimension = weight.shape[-1]
        own = joined.own.view(len(joined.own), -1, dimension)  # [t, K, D]
        units, lengths = _unit(own), own.norm(dim=2)
        for index, members in joined.others():
            more = _paired(members.view(len(members), -1, dimension), own[index])
            units.index_add_(0, index, _unit(more))
            lengths.index_add_(0, index, more.norm(dim=2))
        norm = units.norm(dim=2, keepdim=True) / joined.count[:, None, None]  # of the mean
        mean = _unit(units) * (lengths / joined.count[:, None])[..., None]
        joined.put(torch.where(norm > 1e-6, mean, own))

    return average


def average_biases(bias: StoredTensor, plan: Plan) -> Change:
    """Return what gives classes that others joined the mean of their biases and their own."""

    def average(first: int, rows: np.ndarray) -> None:
        joined = _joined(bias, plan, first, rows)
        if joined is None:
            return
        total = joined.own.clone()
        for index, members in joined.others():
            total.index_add_(0, index, members)
        joined.put(total / joined.count)

    return average


@dataclass(frozen=True)
class _Joined:
    """The classes of a piece that others joined: t of them, with their values float64 [t, ...].

    places: in the piece, whose bytes are `rows`. index: int64 [m], which of the t each of `members` joins.
    count: float64 [t], of the classes that are one now.
    """

    tensor: StoredTensor
    rows: np.ndarray
    places: np.ndarray
    own: Tensor
    index: Tensor
    members: np.ndarray
    count: Tensor

    def others(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the values of the members, a piece at a time, with what they join."""
        for low in range(0, len(self.members), self.tensor.rows_a_piece):
            some = slice(low, low + self.tensor.rows_a_piece)
            values = self.tensor.values(self.members[some])
            _check_finite(self.tensor.key, values)
            yield self.index[some], values

    def put(self, values: Tensor) -> None:
        """Write the new values of the t classes into the piece."""
        self.rows[self.places] = _bytes_of(values.to(self.tensor.dtype).view(len(values), -1))


def _joined(tensor: StoredTensor, plan: Plan, first: int, rows: np.ndarray) -> _Joined | None:
    joined, members = plan.joined_by(first, first + len(rows))
    if not len(joined):
        return None
    targets, index, others = np.unique(joined, return_inverse=True, return_counts=True)
    raw = torch.from_numpy(rows[targets - first].reshape(-1)).view(tensor.dtype)
    own = raw.view(len(targets), *tensor.shape[1:]).double()
    _check_finite(tensor.key, own)
    count = torch.from_numpy(others + 1.0)
    return _Joined(tensor, rows, targets - first, own, torch.from_numpy(index), members, count)


def _paired(others: Tensor, own: Tensor) -> Tensor:
    """Return the sub-centres [n, K, D] in the order in which they pair with `own`, nearest pairs first."""
    n, centers, _ = own.shape
    if centers == 1:
        return others
    closeness = _unit(own) @ _unit(others).transpose(1, 2)
    order = torch.zeros(n, centers, dtype=torch.int64)
    every = torch.arange(n)
    for _ in range(centers):
        best = closeness.flatten(1).argmax(dim=1)
        mine, theirs = best // centers, best % centers
        order[every, mine] = theirs
        closeness[every, mine] = -torch.inf
        closeness[every, :, theirs] = -torch.inf
    return others[every[:, None], order]


def _mean_length(weight: StoredTensor) -> float:
    """Return the mean length of the rows there are."""
    total = 0.0
    for first in range(0, weight.shape[0], weight.rows_a_piece):
        rows = weight.values(np.arange(first, min(weight.shape[0], first + weight.rows_a_piece)))
        _check_finite(weight.key, rows)
        total += float(rows.norm(dim=-1).sum())
    mean = total / (weight.shape[0] * (weight.shape[1] if len(weight.shape) == 3 else 1))
    return mean or 1.0


def _check_finite(key: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise CheckpointError(f"{key} holds rows that are not finite; choose another checkpoint")


def _unit(vectors: Tensor) -> Tensor:
    return normalised(vectors)[0]


def _bytes_of(values: Tensor) -> np.ndarray:
    """Return the bytes of values [n, ...], uint8 [n, bytes]."""
    raw = np.concatenate([np.frombuffer(piece, np.uint8) for piece in tensor_chunks(values)()])
    return raw.reshape(len(values), -1)
