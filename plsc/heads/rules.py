"""How an optimizer changes class weights: one rule each, on a tile of rows and its gradients.

The same rules, in the same order and with the same names, are in rules.c and triton_kernels.py (kernels/).
Everything is computed in float32 (float64 for float64 rows) and written back in the type of storage.
bfloat16 and int8 are rounded up or down at random, or small steps would be lost. The noise is a function of
(key, row, column) alone, so that ranks, tiles and resumes do not change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.heads.weights import Rows, States

Places = Tensor | slice

_LOW = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9

MOMENTUM, MOMENTUM_SCALE = "momentum_buffer", "momentum_scale"
BLOCK = 256
"""Columns that share a scale in 8 bits."""


@dataclass(frozen=True)
class Rule:
    """One step of an optimizer.

    kind: 'sgd' (state momentum_buffer [rows, D], and momentum_scale [rows, blocks] where it is int8;
    none with momentum 0), 'adamw' (exp_avg, exp_avg_sq [rows, D], steps int32 [rows], since sampled rows
    are not changed in each step), 'adagrad' (sum_of_squares [rows]: one number per row). key: of the
    rounding noise of this step; the rows use it as it is, the states, in this order, key + 1 and key + 2.
    """

    kind: str
    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    key: int = 0


def apply_rule(rule: Rule, rows: Rows, tile: slice, gradients: Tensor, states: States) -> None:
    """Change the rows of a tile, and their states, by their gradients [t, D]; in place."""
    where, numbers = rows.positions(tile), rows.numbers(tile).to(gradients.device)
    stored = rows.weight[where]
    w = stored.to(gradients.device, gradients.dtype)
    {"sgd": _sgd, "adamw": _adamw, "adagrad": _adagrad}[rule.kind](rule, w, gradients, states, where, numbers)
    _write(rows.weight, where, w, numbers, rule.key)


def _sgd(rule: Rule, w: Tensor, g: Tensor, states: States, where: Places, numbers: Tensor) -> None:
    """g + wd w into the momentum; with nesterov one look ahead. As torch.optim.SGD."""
    g = g + rule.weight_decay * w
    if rule.momentum:
        m = _read_momentum(states, where, g) * rule.momentum + g
        _write_momentum(states, where, m, numbers, rule.key + 1)
        g = g + rule.momentum * m if rule.nesterov else m
    w -= rule.lr * g


def _adamw(rule: Rule, w: Tensor, g: Tensor, states: States, where: Places, numbers: Tensor) -> None:
    """Loshchilov and Hutter 2019, algorithm 2; the bias correction counts a row's own steps."""
    states["steps"][where] += 1
    t = states["steps"][where].to(g.device, g.dtype)[:, None]
    m = states["exp_avg"][where].to(g).lerp(g, 1 - rule.beta1)
    v = rule.beta2 * states["exp_avg_sq"][where].to(g) + (1 - rule.beta2) * g * g
    _write(states["exp_avg"], where, m, numbers, rule.key + 1)
    _write(states["exp_avg_sq"], where, v, numbers, rule.key + 2)
    w *= 1 - rule.lr * rule.weight_decay
    denominator = (v / (1 - rule.beta2**t)).sqrt() + rule.eps
    w -= rule.lr * m / (1 - rule.beta1**t) / denominator


def _adagrad(rule: Rule, w: Tensor, g: Tensor, states: States, where: Places, numbers: Tensor) -> None:
    """Adagrad (Duchi et al. 2011) with the mean square of a row's gradient: one number a row."""
    g = g + rule.weight_decay * w
    h = states["sum_of_squares"][where].to(g) + g.square().mean(dim=1)
    _write(states["sum_of_squares"], where, h, numbers, rule.key + 1)
    w -= rule.lr * g / (h.sqrt() + rule.eps)[:, None]


def kernel_states(rule: Rule, states: States, weight: Tensor) -> list[Tensor] | None:
    """Return the states for a kernel in C or Triton; None where it cannot apply the rule to them."""
    names = {"sgd": [MOMENTUM], "adamw": ["exp_avg", "exp_avg_sq"], "adagrad": ["sum_of_squares"]}
    if rule.kind not in names:
        return None
    if rule.kind == "sgd" and not rule.momentum:
        return []
    found = [states[name] for name in names[rule.kind]]
    for state in found:
        is_known = state.dtype in (torch.float32, torch.bfloat16)
        if not (is_known and state.device == weight.device and state.is_contiguous()):
            return None
    return found


def _read_momentum(states: States, where: Places, like: Tensor) -> Tensor:
    levels = states[MOMENTUM][where]
    if levels.dtype is not torch.int8:
        return levels.to(like)
    return from_int8(levels, states[MOMENTUM_SCALE][where]).to(like)


def _write_momentum(states: States, where: Places, values: Tensor, numbers: Tensor, key: int) -> None:
    if states[MOMENTUM].dtype is not torch.int8:
        _write(states[MOMENTUM], where, values, numbers, key)
        return
    levels, scale = to_int8(values, numbers, key)
    states[MOMENTUM][where] = levels.to(states[MOMENTUM].device)
    states[MOMENTUM_SCALE][where] = scale.to(states[MOMENTUM_SCALE].device)


def _write(stored: Tensor, where: Places, values: Tensor, numbers: Tensor, key: int) -> None:
    if stored.dtype is torch.bfloat16:
        flat = values.reshape(len(values), -1)
        values = to_bfloat16(flat, numbers, key).view_as(values)
    stored[where] = values.to(stored.device, stored.dtype)


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
