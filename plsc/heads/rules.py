"""The update formulas of the optimizers of class weights, for one tile of class weights and its gradients.

kernels/rules.h and kernels/triton_kernels.py have the same formulas in the same order, with the same names.
All values are computed in float32 (float64 for float64 weights) and then stored in their own dtype. bfloat16
and int8 values are rounded stochastically, because small updates would be lost otherwise. The noise depends
only on (key, row, column), not on ranks, tiles or resumes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.heads.weights import Rows, States, encode_rows

RowIndex = Tensor | slice

_LOW = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9

MOMENTUM, MOMENTUM_SCALE = "momentum_buffer", "momentum_scale"
BLOCK = 256
"""Columns that share a scale in int8 states."""


@dataclass(frozen=True)
class Rule:
    """The settings of one optimizer step.

    Attributes:
        kind: the optimizer, which determines the states.
            'sgd': momentum_buffer [rows, D], with momentum_scale [rows, blocks] if int8; none if momentum
            is 0. 'adamw': exp_avg and exp_avg_sq [rows, D], steps int32 [rows] (sampled classes skip some
            steps). 'adagrad': sum_of_squares [rows].
        key: of the rounding noise of this step. Class weights use key, the states key + 1 and key + 2.
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
    """Update the class weights of a tile and their states from the gradients [t, D], in place."""
    where, indices = rows.positions(tile), rows.global_indices(tile).to(gradients.device)
    w = rows.values(where).to(gradients.device, gradients.dtype)
    {"sgd": _sgd, "adamw": _adamw, "adagrad": _adagrad}[rule.kind](rule, w, gradients, states, where, indices)
    _write(rows.weight, where, w, indices, rule.key)


def _sgd(rule: Rule, w: Tensor, g: Tensor, states: States, where: RowIndex, indices: Tensor) -> None:
    """Apply SGD as torch.optim.SGD."""
    g = g + rule.weight_decay * w
    if rule.momentum:
        m = _read_momentum(states, where, g) * rule.momentum + g
        _write_momentum(states, where, m, indices, rule.key + 1)
        g = g + rule.momentum * m if rule.nesterov else m
    w -= rule.lr * g


def _adamw(rule: Rule, w: Tensor, g: Tensor, states: States, where: RowIndex, indices: Tensor) -> None:
    """Loshchilov and Hutter 2019, algorithm 2; the bias correction counts the updates per row."""
    states["steps"][where] += 1
    t = states["steps"][where].to(g.device, g.dtype)[:, None]
    m = states["exp_avg"][where].to(g).lerp(g, 1 - rule.beta1)
    v = rule.beta2 * states["exp_avg_sq"][where].to(g) + (1 - rule.beta2) * g * g
    _write(states["exp_avg"], where, m, indices, rule.key + 1)
    _write(states["exp_avg_sq"], where, v, indices, rule.key + 2)
    w *= 1 - rule.lr * rule.weight_decay
    denominator = (v / (1 - rule.beta2**t)).sqrt() + rule.eps
    w -= rule.lr * m / (1 - rule.beta1**t) / denominator


def _adagrad(rule: Rule, w: Tensor, g: Tensor, states: States, where: RowIndex, indices: Tensor) -> None:
    """Adagrad (Duchi et al. 2011) on the mean squared gradient of each row."""
    g = g + rule.weight_decay * w
    h = states["sum_of_squares"][where].to(g) + g.square().mean(dim=1)
    _write(states["sum_of_squares"], where, h, indices, rule.key + 1)
    w -= rule.lr * g / (h.sqrt() + rule.eps)[:, None]


def kernel_states(rule: Rule, states: States, weight: Tensor, has_int8: bool = False) -> list[Tensor] | None:
    """Return the states for a C or Triton kernel; None if the kernels do not support this rule or state.

    has_int8: the kernels support int8 states.
    """
    names = {
        "sgd": [MOMENTUM, MOMENTUM_SCALE],
        "adamw": ["exp_avg", "exp_avg_sq"],
        "adagrad": ["sum_of_squares"],
    }
    if rule.kind not in names:
        return None
    if rule.kind == "sgd" and not rule.momentum:
        return []
    found = [states[name] for name in names[rule.kind] if name in states]
    for state in found:
        is_known = state.dtype in (torch.float32, torch.bfloat16) or (has_int8 and state.dtype is torch.int8)
        if not (is_known and state.device == weight.device and state.is_contiguous()):
            return None
    return found


def _read_momentum(states: States, where: RowIndex, like: Tensor) -> Tensor:
    levels = states[MOMENTUM][where]
    if levels.dtype is not torch.int8:
        return levels.to(like)
    return from_int8(levels, states[MOMENTUM_SCALE][where]).to(like)


def _write_momentum(states: States, where: RowIndex, values: Tensor, indices: Tensor, key: int) -> None:
    if states[MOMENTUM].dtype is not torch.int8:
        _write(states[MOMENTUM], where, values, indices, key)
        return
    levels, scale = to_int8(values, indices, key)
    states[MOMENTUM][where] = levels.to(states[MOMENTUM].device)
    states[MOMENTUM_SCALE][where] = scale.to(states[MOMENTUM_SCALE].device)


def _write(stored: Tensor, where: RowIndex, values: Tensor, indices: Tensor, key: int) -> None:
    if stored.dtype is torch.int8:
        fractions = (noise(indices, values.shape[1], key) >> 8).to(values.dtype) / 2**24  # [0, 1)
        values = encode_rows(values, stored[where].to(values.device), fractions)
    if stored.dtype is torch.bfloat16:
        flat = values.reshape(len(values), -1)
        values = to_bfloat16(flat, indices, key).view_as(values)
    stored[where] = values.to(stored.device, stored.dtype)


def noise(rows: Tensor, columns: int, key: int) -> Tensor:
    """Return 32 random bits per (row, column), int64 [n, columns] in 0..2^32 - 1.

    rows: global row indices, int64 [n]. key: only its low 32 bits are used. The kernels compute the same.
    """
    seed = torch.full_like(rows, key & _LOW)
    row_key = _mix((rows & _LOW) ^ _mix((rows >> 32) ^ seed))
    column = (torch.arange(columns, device=rows.device) * _GOLDEN) & _LOW
    return _mix(row_key[:, None] ^ column)


def to_bfloat16(values: Tensor, rows: Tensor, key: int) -> Tensor:
    """Round float32 values [n, D] to bfloat16 stochastically; infinities and NaN are unchanged.

    rows, key: see `noise`.
    """
    bits = values.float().contiguous().view(torch.int32)
    random = (noise(rows, values.shape[1], key) >> 16).to(torch.int32)
    rounded = (bits + random) & ~0xFFFF
    rounded = torch.where(values.isfinite(), rounded, bits)
    return rounded.view(torch.float32).bfloat16()  # exact: the low half is zero


def to_int8(values: Tensor, rows: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Quantise float32 values [n, D] to int8 [n, D] with stochastic rounding; also return the scales.

    The scales are [n, ceil(D / 256)], one per block: the largest magnitude of a block becomes 127.
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
    """Return the float32 values that `to_int8` quantised."""
    step = scale.repeat_interleave(BLOCK, dim=1)[:, : levels.shape[1]]
    return levels.float() * step


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers stored as int64; products may overflow, but their low 32 bits are correct."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)
