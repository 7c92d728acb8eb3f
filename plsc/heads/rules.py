"""How an optimizer changes class rows: one rule each, on a tile of rows and its gradients.

Everything is computed in float32 (float64 for float64 rows) and written back in the type of storage;
bfloat16 is rounded at random with keyed noise (`rounding.py`), or small steps would be lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.heads.passes import Rows
from plsc.heads.rounding import from_int8, to_bfloat16, to_int8

States = dict[str, Tensor]
"""State tensors of all rows by name, first dimension the rows."""

Places = Tensor | slice

MOMENTUM, MOMENTUM_SCALE = "momentum_buffer", "momentum_scale"


@dataclass(frozen=True)
class Rule:
    """One step of an optimizer.

    kind: 'sgd' (state momentum_buffer [rows, D], and momentum_scale [rows, blocks] where it is int8;
    none with momentum 0), 'adamw' (exp_avg, exp_avg_sq [rows, D], steps int32 [rows], since sampled rows
    are not changed in each step), 'adagrad' (sum_of_squares [rows]: one number a row). key: of the
    rounding noise of this step; the rows use it as it is, the states of the list above key + 1 and key + 2.
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
    {"sgd": _sgd, "adamw": _adamw, "adagrad": _adagrad}[rule.kind](
        rule, w, gradients, states, where, numbers
    )
    _write(rows.weight, where, w, numbers, rule.key)


def _sgd(rule: Rule, w: Tensor, g: Tensor, states: States, where: Places, numbers: Tensor) -> None:
    """g + wd w into the momentum; with nesterov one look ahead. As torch.optim.SGD."""
    g = g + rule.weight_decay * w
    if rule.momentum:
        m = _read_momentum(states, where, g) * rule.momentum + g
        _write_momentum(states, where, m, numbers, rule.key + 1)
        g = g + rule.momentum * m if rule.nesterov else m
    w -= rule.lr * g


def _adamw(
    rule: Rule, w: Tensor, g: Tensor, states: States, where: Places, numbers: Tensor
) -> None:
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


def _adagrad(
    rule: Rule, w: Tensor, g: Tensor, states: States, where: Places, numbers: Tensor
) -> None:
    """Adagrad (Duchi et al. 2011) with the mean square of a row's gradient: one number a row."""
    g = g + rule.weight_decay * w
    h = states["sum_of_squares"][where].to(g) + g.square().mean(dim=1)
    _write(states["sum_of_squares"], where, h, numbers, rule.key + 1)
    w -= rule.lr * g / (h.sqrt() + rule.eps)[:, None]


def _read_momentum(states: States, where: Places, like: Tensor) -> Tensor:
    levels = states[MOMENTUM][where]
    if levels.dtype is not torch.int8:
        return levels.to(like)
    return from_int8(levels, states[MOMENTUM_SCALE][where]).to(like)


def _write_momentum(
    states: States, where: Places, values: Tensor, numbers: Tensor, key: int
) -> None:
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
