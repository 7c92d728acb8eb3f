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

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True)
class Rule:
    """The settings of one optimizer step.

    Attributes:
        kind: the optimizer, which determines the states.
            'sgd': momentum_buffer [rows, D]; none if momentum is 0. 'adamw': exp_avg and exp_avg_sq
            [rows, D], steps int32 [rows] (sampled classes skip some steps). 'adagrad': sum_of_squares [rows].
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
        m = states[MOMENTUM][where].to(g) * rule.momentum + g
        _write(states[MOMENTUM], where, m, indices, rule.key + 1)
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


def kernel_states(rule: Rule, states: States) -> list[Tensor]:
    """Return the states in the order of the arguments of a C or Triton kernel."""
    if rule.kind == "sgd":
        return [states[MOMENTUM]] if rule.momentum else []
    return [
        states[name]
        for name in {"adamw": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum_of_squares",)}[rule.kind]
    ]


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


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers stored as int64; products may overflow, but their low 32 bits are correct."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)
