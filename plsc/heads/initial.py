"""The initial class rows: the same for a class whichever rank holds it."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from plsc.keys import hash_key
from plsc.parallel.machine import usable_cores

_BLOCK = 4096
_STANDARD_DEVIATION = 0.01  # of every element, as in the margin-softmax code bases


def initial_rows(
    seed: int,
    start: int,
    stop: int,
    emb_size: int,
    dtype: torch.dtype = torch.float32,
    norm: float | None = None,
) -> Tensor:
    """Return normal rows [stop - start, emb_size] on the CPU, drawn in float32.

    norm: that is expected of a row; None: each element has the standard deviation 0.01.

    Rows are drawn in blocks of 4096 classes, each from a generator of its own, so that a class gets
    the same row on any number of ranks, and a rank draws little more than its own rows. The cores draw a
    block each: 6e7 rows of 512 numbers are five minutes' work for one.
    """
    rows = torch.empty(stop - start, emb_size, dtype=dtype)
    deviation = _STANDARD_DEVIATION if norm is None else norm / math.sqrt(emb_size)

    def draw(block: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash_key(seed, block))
        drawn = torch.empty(_BLOCK, emb_size, dtype=torch.float32)
        return drawn.normal_(0, deviation, generator=generator)

    blocks, cores = range(start // _BLOCK, -(-stop // _BLOCK)), usable_cores()
    with ThreadPoolExecutor(cores) as threads:
        for low in range(0, len(blocks), cores):
            some = blocks[low : low + cores]
            for block, drawn in zip(some, threads.map(draw, some), strict=True):
                first = max(start, block * _BLOCK)
                mine = drawn[first - block * _BLOCK : stop - block * _BLOCK]
                rows[first - start : first - start + len(mine)] = mine
    return rows
