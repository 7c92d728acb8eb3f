"""Compute the rows of a class tensor in its new numbering, piece by piece: kept, merged and new rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint.classes.plan import Plan
from plsc.checkpoint.load import StoredTensor
from plsc.checkpoint.shard_file import Chunks, bytes_of
from plsc.errors import CheckpointError, DataError
from plsc.heads.geometry import normalised
from plsc.heads.weights import SCALE_BYTES, decode_rows, encode_rows, initial_rows

_BLOCK = 4096  # rows that `initial_rows` draws at once

Change = Callable[[int, np.ndarray], None]
"""Change a piece in place. Arguments: index of its first new class, and its bytes, uint8 [n, row_bytes]."""


class Directions(Protocol):
    """Vectors [n, D] that can be sliced, such as an array or a memory map."""

    shape: tuple[int, ...]

    def __getitem__(self, rows: slice) -> np.ndarray: ...


def rows_of(
    tensor: StoredTensor, plan: Plan, start: int, stop: int, changes: tuple[Change, ...] = ()
) -> Chunks:
    """Return the chunks of new classes start..stop - 1: old rows, zeros for new classes, then `changes`."""

    def pieces() -> Iterator[memoryview]:
        for first in range(start, stop, tensor.rows_per_piece):
            rows = tensor.take(plan.sources(first, min(stop, first + tensor.rows_per_piece)))
            for change in changes:
                change(first, rows)
            yield rows.data

    return pieces


def initialise_new(weight: StoredTensor, plan: Plan, seed: int) -> Change:
    """Return a change that initialises new rows as a new head would, for (seed, class)."""
    kept = plan.after - plan.added
    centers = weight.shape[1] if len(weight.shape) == 3 else 1

    @functools.lru_cache(maxsize=1)  # consecutive pieces share a block
    def block(number: int) -> Tensor:
        return initial_rows(seed, number * _BLOCK, (number + 1) * _BLOCK, dimension_of(weight), weight.dtype)

    def draw(first: int, rows: np.ndarray) -> None:
        low, high = max(first, kept) * centers, (first + len(rows)) * centers
        out = rows.reshape(len(rows) * centers, -1)
        for number in range(low // _BLOCK, -(-high // _BLOCK) if low < high else 0):
            begin, end = max(low, number * _BLOCK), min(high, (number + 1) * _BLOCK)
            drawn = block(number)[begin - number * _BLOCK : end - number * _BLOCK]
            out[begin - first * centers : end - first * centers] = _rows_as_bytes(drawn)

    return draw


def set_directions(weight: StoredTensor, plan: Plan, directions: Directions) -> Change:
    """Return a change that sets the first row of each new class to its direction times the mean old norm.

    The change raises DataError for a direction that is zero or not finite.
    """
    kept = plan.after - plan.added
    length = _mean_length(weight)

    def point(first: int, rows: np.ndarray) -> None:
        low = max(first, kept)
        if low >= first + len(rows):
            return
        given = np.array(directions[low - kept : first + len(rows) - kept])  # no view of a file
        wanted = torch.from_numpy(given).double()
        norm = wanted.norm(dim=1, keepdim=True)
        wrong = (~(norm.isfinite() & (norm > 0)))[:, 0].nonzero()
        if len(wrong):
            raise DataError(
                f"the direction of new class {low + int(wrong[0])} has the norm "
                f"{float(norm[wrong[0, 0]])}; expected a finite vector that is not zero"
            )
        values = _rows_as_bytes(_stored(weight, wanted / norm * length))
        rows[low - first :, : values.shape[1]] = values  # sets the first sub-centre

    return point


def average_merged(tensor: StoredTensor, plan: Plan) -> Change:
    """Return a change that sets the row, or bias, of each merged class to the mean over its members.

    The direction of a row is the mean of the normalised rows, its norm the mean of the norms. Sub-centres
    are paired by similarity first. If the directions cancel, the class keeps its own row. The change raises
    CheckpointError for values that are not finite.
    """
    is_bias = len(tensor.shape) == 1

    def summand(values: Tensor) -> Tensor:
        if is_bias:
            return values.clone()
        return torch.cat([_unit(values), values.norm(dim=-1, keepdim=True)], dim=-1)

    def average(first: int, rows: np.ndarray) -> None:
        joined, members = plan.joined_by(first, first + len(rows))
        if not len(joined):
            return
        targets, index, counts = np.unique(joined, return_inverse=True, return_counts=True)
        raw = torch.from_numpy(rows[targets - first].reshape(-1)).view(tensor.dtype)
        old = raw.view(len(targets), *tensor.shape[1:])
        own = _finite(tensor, (decode_rows(old) if tensor.is_coded else old).double())
        total = summand(own)
        for low in range(0, len(members), tensor.rows_per_piece):
            some = slice(low, low + tensor.rows_per_piece)
            into = torch.from_numpy(index[some])
            values = _finite(tensor, tensor.values(members[some]))
            if own.ndim == 3:
                values = _paired(values, own[into])
            total.index_add_(0, into, summand(values))
        mean = total / torch.from_numpy(counts + 1.0).view(-1, *[1] * (own.ndim - 1))
        if not is_bias:
            direction, length = mean[..., :-1], mean[..., -1:]
            is_clear = direction.norm(dim=-1, keepdim=True) > 1e-6
            mean = torch.where(is_clear, _unit(direction) * length, own)
        rows[targets - first] = _rows_as_bytes(_stored(tensor, mean))

    return average


def _paired(others: Tensor, own: Tensor) -> Tensor:
    """Return the sub-centres [n, K, D], ordered to pair with `own`; the most similar pairs first."""
    n, centers, _ = own.shape
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
    total = 0.0
    for first in range(0, weight.shape[0], weight.rows_per_piece):
        rows = weight.values(np.arange(first, min(weight.shape[0], first + weight.rows_per_piece)))
        total += float(_finite(weight, rows).norm(dim=-1).sum())
    mean = total / (weight.shape[0] * (weight.shape[1] if len(weight.shape) == 3 else 1))
    return mean or 1.0


def _finite(tensor: StoredTensor, values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise CheckpointError(f"{tensor.key} contains rows that are not finite; choose another checkpoint")
    return values


def _unit(vectors: Tensor) -> Tensor:
    return normalised(vectors)[0]


def dimension_of(weight: StoredTensor) -> int:
    """Return the embedding size of class weights."""
    return weight.shape[-1] - (SCALE_BYTES if weight.is_coded else 0)


def _stored(tensor: StoredTensor, values: Tensor) -> Tensor:
    """Return values as the tensor stores them."""
    return encode_rows(values.float()) if tensor.is_coded else values.to(tensor.dtype)


def _rows_as_bytes(values: Tensor) -> np.ndarray:
    """Return the bytes of values [n, ...], uint8 [n, bytes]."""
    return bytes_of(values).numpy().reshape(len(values), -1)
