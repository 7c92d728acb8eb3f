"""The initial class rows: the same for a class whichever rank holds it."""

from __future__ import annotations

import torch
from torch import Tensor

from plsc.keys import hash_key

_BLOCK = 4096
_STANDARD_DEVIATION = 0.01  # of every element, as in the margin-softmax code bases


def initial_rows(
    seed: int, start: int, stop: int, emb_size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return normal rows [stop - start, emb_size] on the CPU, drawn in float32.

    Rows are drawn in blocks of 4096 classes, each from a generator of its own, so that a class gets
    the same row on any number of ranks, and a rank draws little more than its own rows.
    """
    rows = torch.empty(stop - start, emb_size, dtype=dtype)
    generator = torch.Generator()
    for block in range(start // _BLOCK, -(-stop // _BLOCK)):
        generator.manual_seed(hash_key(seed, block))
        drawn = torch.randn(_BLOCK, emb_size, generator=generator)
        first = block * _BLOCK
        low, high = max(start, first), min(stop, first + _BLOCK)
        if low < high:
            scaled = drawn[low - first : high - first] * _STANDARD_DEVIATION
            rows[low - start : high - start] = scaled
    return rows
