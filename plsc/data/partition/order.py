"""The position of each line: a pure function of the seed, the line's number and the number of lines.

Line i has the key ``plsc.seeds.hash_key(seed, i)``. For a fixed seed this is a bijection of 64-bit numbers,
so keys are unique. The shuffled order is the order of the keys. Rank r of R gets positions [rL, (r + 1)L),
L = ceil(N / R).

The R L - N positions left at the end are padded with the first lines of a second shuffle, with the keys
``hash_key(seed, PADDING, i)``. All lines are equally likely, and none is repeated unless there are more
positions than lines; then the second shuffle is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plsc.data.order import splitmix64_of
from plsc.seeds import hash_key

ALGORITHM = "splitmix64-order-1"
"""Must change whenever the output for the same seed and lines changes."""

PADDING = 0x70616464696E67  # "padding"

_CHUNK = 2**18
_MANY = 2**21
_BINS = 2**16
_BIN_SHIFT = np.uint64(48)


def line_keys(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return the keys of the lines with these numbers (from 0), uint64."""
    return splitmix64_of(numbers.astype(np.uint64) ^ np.uint64(hash_key(seed)))


def lines_per_rank(lines: int, nranks: int) -> int:
    """Return L, the number of lines per rank."""
    return -(-lines // nranks)


def rank_bounds(seed: int, lines: int, nranks: int) -> np.ndarray:
    """Return the lowest key of each rank but the first, uint64; ranks that only have padding get none.

    Computes the keys of all lines twice, in bounded memory: for a histogram, then for the bins in which ranks
    begin.
    """
    positions = np.arange(1, nranks) * lines_per_rank(lines, nranks)
    positions = positions[positions < lines]
    counts = np.zeros(_BINS, dtype=np.int64)
    for keys in _all_keys(seed, lines):
        counts += np.bincount((keys >> _BIN_SHIFT).astype(np.int64), minlength=_BINS)
    ends = np.cumsum(counts)
    bins = np.searchsorted(ends, positions, side="right")
    is_wanted = np.zeros(_BINS, dtype=bool)
    is_wanted[bins] = True
    found = [keys[is_wanted[keys >> _BIN_SHIFT]] for keys in _all_keys(seed, lines)]
    wanted = np.sort(np.concatenate(found))
    # Convert a position among all keys to one among the kept keys: subtract the bins left out before it.
    left_out = np.cumsum(np.where(is_wanted, 0, counts))
    return wanted[positions - left_out[bins]]


def _all_keys(seed: int, lines: int) -> Iterator[np.ndarray]:
    for begin in range(0, lines, _MANY):
        yield line_keys(seed, np.arange(begin, min(lines, begin + _MANY)))


def padding_lines(seed: int, lines: int, nranks: int) -> np.ndarray:
    """Return the numbers of the padding lines, in order, int64.

    The memory is proportional to nranks, independent of `lines`.
    """
    places = lines_per_rank(lines, nranks) * nranks - lines
    if places == 0:
        return np.empty(0, dtype=np.int64)
    base = np.uint64(hash_key(seed, PADDING))
    best_keys, best = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    for begin in range(0, lines, _CHUNK):
        numbers = np.arange(begin, min(lines, begin + _CHUNK))
        keys = np.concatenate([best_keys, splitmix64_of(numbers.astype(np.uint64) ^ base)])
        numbers = np.concatenate([best, numbers])
        if len(keys) > places:
            chosen = np.argpartition(keys, places - 1)[:places]
            keys, numbers = keys[chosen], numbers[chosen]
        best_keys, best = keys, numbers
    return np.resize(best[np.argsort(best_keys)], places)
