"""Permutations that a seed means for ever."""

from __future__ import annotations

import numpy as np


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of 0..count - 1, int64, uniform, and a function of the arguments alone.

    Raw Philox output never changes between numpy versions; Generator.permutation may, and then a resumed
    run would see other batches.
    """
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    draws = np.random.Philox(key=key).random_raw(count)
    # Each draw carries its index in its lowest bits: no ties, and a plain sort beats argsort.
    index_bits = np.uint64(2 ** (count - 1).bit_length() - 1)
    draws = (draws & ~index_bits) | np.arange(count, dtype=np.uint64)
    draws.sort()
    return (draws & index_bits).astype(np.int64)
