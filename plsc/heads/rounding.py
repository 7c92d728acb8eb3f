"""Numbers kept in few bits without a drift: rounding up or down at random, with keyed noise.

The noise is a function of (key, row, column) alone, so that ranks, tiles and resumes do not change it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
BLOCK = 256
"""Columns that share a scale in 8 bits."""


def noise(rows: Tensor, columns: int, key: int) -> Tensor:
    """Return 32 random bits for each (row, column), int64 [n, columns] in 0..2^32 - 1.

    rows: int64 [n], global numbers; key: its low 32 bits count. The kernels compute the same.
    """
    seed = torch.full_like(rows, key & _LOW)
    row_key = _mix((rows & _LOW) ^ _mix((rows >> 32) ^ seed))
    column = (torch.arange(columns, device=rows.device) * _GOLDEN) & _LOW
    return _mix(row_key[:, None] ^ column)


def to_bfloat16(values: Tensor, rows: Tensor, key: int) -> Tensor:
    """Return float32 values [n, D] rounded to bfloat16, up or down in proportion to the distance.

    What is not finite stays so. See `noise` for rows and key.
    """
    bits = values.float().contiguous().view(torch.int32)
    random = (noise(rows, values.shape[1], key) >> 16).to(torch.int32)
    rounded = (bits + random) & ~0xFFFF
    rounded = torch.where(values.isfinite(), rounded, bits)
    return rounded.view(torch.float32).bfloat16()  # exact: the low half is zero


def to_int8(values: Tensor, rows: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Return float32 values [n, D] as int8 [n, D] and the scales [n, ceil(D / 256)] of their blocks.

    A block's largest magnitude becomes 127; the rest is rounded up or down in proportion.
    """
    n, dimension = values.shape
    blocks = -(-dimension // BLOCK)
    padded = torch.nn.functional.pad(values, (0, blocks * BLOCK - dimension))
    scale = padded.view(n, blocks, BLOCK).abs().amax(dim=2) / 127
    step = scale.repeat_interleave(BLOCK, dim=1)[:, :dimension]
    fraction = (noise(rows, dimension, key) >> 8).to(values.dtype) / 2**24  # [0, 1)
    levels = torch.where(step > 0, values / step, 0) + fraction
    return levels.floor().clamp(-127, 127).to(torch.int8), scale


def from_int8(levels: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 values of what `to_int8` made."""
    step = scale.repeat_interleave(BLOCK, dim=1)[:, : levels.shape[1]]
    return levels.float() * step


def _mix(x: Tensor) -> Tensor:
    """Return a 32-bit hash of 32-bit numbers in int64; products wrap, and their low half is right."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)
