"""The class weights of a rank: values, selection used in a step, offload to CPU memory, update formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from plsc.errors import OptionError
from plsc.parallel.world import Arriving, span, to_device
from plsc.seeds import hash_key

States = dict[str, Tensor]
"""Optimizer states by name; the first dimension of each is that of the class weights."""

MOMENTUM = "momentum_buffer"

ROW_DTYPES = ("float32", "bfloat16", "int8", "float64")

SCALE_BYTES = 4
"""An int8 row has D codes and, in its last bytes, their float32 scale: the weights are codes * scale.

So a row is one piece of memory: copies, checkpoints and changes of classes move codes and scale together.
"""

PAGE = 32
"""Consecutive classes that are drawn, read and written together when class weights are in a file."""

_BLOCK = 4096
_TYPICAL_PEAK = 96.0  # largest code of a new scale; a third of headroom, because rows grow in training
_HIGHEST_CODE = 127.0
_CODES = 28.0  # standard deviation of the codes of initial rows, whose largest is then about 80
_LOWEST_PEAK = 63.0
_STANDARD_DEVIATION = 0.01  # as in other implementations of margin softmax


def read_dtype(name: str, value: str | torch.dtype, known: tuple[str, ...]) -> torch.dtype:
    """Return the torch.dtype for a name or dtype; OptionError unless it is one of `known`."""
    text = str(value).removeprefix("torch.")
    if text not in known:
        raise OptionError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    return getattr(torch, text)


def initial_rows(
    seed: int, start: int, stop: int, emb_size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return normally distributed class weights [stop - start, emb_size] on the CPU, drawn in float32.

    Each block of 4096 classes (of 32 for int8) has its own generator, so a class gets the same weights on any
    number of ranks. Threads draw the blocks in parallel: 6e7 x 512 values take five minutes on one core.
    int8: rows [stop - start, emb_size + 4] as in `encode_rows`, see `initial_pages`.
    """
    size = PAGE if dtype is torch.int8 else _BLOCK
    rows = torch.empty(stop - start, emb_size + scale_bytes(dtype), dtype=dtype)

    def fill(block: int) -> None:
        if dtype is torch.int8:
            drawn = initial_pages(seed, [block], emb_size)
        else:
            drawn = _draw_blocks(seed, [block], size, emb_size, _STANDARD_DEVIATION)
        base = block * size
        first, last = max(start, base), min(stop, base + size)
        rows[first - start : last - start] = drawn[first - base : last - base]

    with ThreadPoolExecutor() as threads:
        list(threads.map(fill, range(start // size, -(-stop // size))))
    return rows


def initial_pages(seed: int, pages: Sequence[int], emb_size: int) -> Tensor:
    """Return the initial int8 rows of these pages of `PAGE` classes, [pages * PAGE, emb_size + 4].

    All have the same scale: with one per row, a step that draws new pages would take longer.
    """
    codes = _draw_blocks(seed, pages, PAGE, emb_size, _CODES).round_().clamp_(-_HIGHEST_CODE, _HIGHEST_CODE)
    scale = torch.tensor([_STANDARD_DEVIATION / _CODES], dtype=torch.float32).view(torch.int8)
    return torch.cat([codes.to(torch.int8), scale.expand(len(codes), -1)], dim=1)


def _draw_blocks(seed: int, blocks: Sequence[int], size: int, emb_size: int, deviation: float) -> Tensor:
    """Return normally distributed float32 rows of blocks of `size` classes, each from its own generator."""
    drawn = torch.empty(len(blocks), size, emb_size, dtype=torch.float32)
    generator = torch.Generator()
    for rows, block in zip(drawn, blocks, strict=True):
        rows.normal_(0, deviation, generator=generator.manual_seed(hash_key(seed, block)))
    return drawn.flatten(0, 1)


def scale_bytes(dtype: torch.dtype | str) -> int:
    """Return the number of values at the end of a stored row that are no weights."""
    return SCALE_BYTES if dtype in (torch.int8, "int8") else 0


def decode_rows(stored: Tensor) -> Tensor:
    """Return the class weights [..., D] of stored rows [..., D + 4] of int8 as float32; others unchanged."""
    if stored.dtype is not torch.int8:
        return stored
    return stored[..., :-SCALE_BYTES].float() * _scales_of(stored)


def encode_rows(values: Tensor, stored: Tensor | None = None, noise: Tensor | float = 0.5) -> Tensor:
    """Return float32 class weights [..., D] as int8 rows [..., D + 4].

    stored: the rows that they replace, whose scale is kept while the largest code stays in 63..127: with a
    new scale every code would be rounded again. noise: numbers in [0, 1), [..., D], for stochastic rounding.
    Weights that are not finite make the row NaN.
    """
    peak = values.abs().amax(dim=-1, keepdim=True)
    scale = peak / _TYPICAL_PEAK
    if stored is not None:
        old = _scales_of(stored)
        scale = torch.where((peak <= old * _HIGHEST_CODE) & (peak >= old * _LOWEST_PEAK), old, scale)
    inverse = torch.where(scale > 0, 1 / scale, 0)
    codes = (values * inverse + noise).floor().clamp(-_HIGHEST_CODE, _HIGHEST_CODE)
    coded = scale.flatten().view(torch.int8).view(*values.shape[:-1], SCALE_BYTES)
    return torch.cat([codes.nan_to_num(0).to(torch.int8), coded], dim=-1)


def _scales_of(stored: Tensor) -> Tensor:
    """Return the scales [..., 1] of int8 rows, float32."""
    scales = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)  # aligned
    return scales.flatten().view(torch.float32).view(*stored.shape[:-1], 1)


class RowFile(Protocol):
    """Int8 class weights of this rank and their states in a file (`plsc.checkpoint.weights_file`)."""

    def add_states(self, states: States) -> None:
        """Add the states of the optimizer, of which only dtypes and shapes are used."""

    def hold(self, rows: Tensor, *, is_first: bool = True) -> None:
        """Keep the pages of these rows in memory, int64, sorted; if not `is_first`, in addition."""

    def expect(self, pages: Tensor) -> None:
        """Read these pages in the background, for the next step."""

    def read(self, rows: Tensor | slice, name: str = "weight") -> Tensor:
        """Return the weights or a state of some rows, on the CPU."""

    def write(self, rows: Tensor, values: States) -> None:
        """Replace weights and states of rows that the current step holds."""


@dataclass
class Rows:
    """The class weights of this rank, one row per class (or sub-centre), and which of them a step uses.

    Attributes:
        weight: [rows, D], float64, float32 or bfloat16; or int8 [rows, D + 4], see `encode_rows`.
        bias: [rows] or None.
        selected: indices of the n selected rows, int64 [n], sorted; None: all rows.
        centers: number of consecutive rows that form one class, K.
        cosine: whether class weights and embeddings are normalised.
        first_row: global index of ``weight[0]``.
        is_compact: `weight` and `bias` contain only the selected rows (copies on another device).
        file: where the class weights are; `weight` then has no memory (it is on the device ``meta``).
        on_host: `selected` on the CPU, so that its values can be read without waiting for the device.
    """

    weight: Tensor
    bias: Tensor | None = None
    selected: Tensor | None = None
    centers: int = 1
    cosine: bool = True
    first_row: int = 0
    is_compact: bool = False
    file: RowFile | None = None
    on_host: Tensor | None = None

    def __len__(self) -> int:
        return len(self.weight) if self.selected is None else len(self.selected)

    @property
    def dimension(self) -> int:
        """The embedding size D."""
        return self.weight.shape[1] - scale_bytes(self.weight.dtype)

    @property
    def device(self) -> torch.device:
        """The device of the class weights; the CPU if they are in a file."""
        return self.weight.device if self.file is None else torch.device("cpu")

    def values(self, positions: Tensor | slice) -> Tensor:
        """Return the class weights at these indices of `weight`, [n, D], floating point."""
        if self.file is not None:
            return decode_rows(self.file.read(positions))
        return decode_rows(self.weight[positions])

    def of_classes(self, classes: Tensor) -> Rows:
        """Return a copy that selects the rows of these classes, sorted int64, on the CPU; shares `weight`."""
        return self.of_rows((classes[:, None] * self.centers + torch.arange(self.centers)).flatten())

    def of_rows(self, selected: Tensor) -> Rows:
        """Return a copy that selects these rows, sorted int64, on the CPU; shares `weight`."""
        return dataclasses.replace(self, selected=to_device(selected, self.device), on_host=selected)

    def tiles(self, rows: int) -> Iterator[slice]:
        """Yield slices of about `rows` selected rows; a class is never split."""
        step = max(1, rows // self.centers) * self.centers
        for start in range(0, len(self), step):
            yield slice(start, min(start + step, len(self)))

    def positions(self, tile: slice) -> Tensor | slice:
        """Return the indices in `weight` of the rows of a tile."""
        if self.selected is None or self.is_compact:
            return tile
        return self.selected[tile]

    def global_indices(self, tile: slice) -> Tensor:
        """Return the global indices of the rows of a tile, int64."""
        if self.selected is not None:
            return self.selected[tile] + self.first_row
        start, stop = tile.start + self.first_row, tile.stop + self.first_row
        return torch.arange(start, stop, device=self.device)


# The selected class weights are copied from CPU memory (offload) or a file to the device, and back after the
# update.


@span("copy to device")
def copy_to_device(stored: Rows, device: torch.device) -> Rows:
    """Return a copy of the selected rows on the device; `selected` still indexes the stored weights."""
    chosen = stored.selected
    if stored.file is None:
        weight = _copy_of(stored.weight, chosen, device)
    else:
        weight = to_device(stored.file.read(_all_if_none(stored)), device)
    return dataclasses.replace(
        stored,
        weight=weight,
        bias=None if stored.bias is None else _copy_of(stored.bias, chosen, device),
        selected=None if chosen is None else to_device(chosen, device),
        is_compact=True,
        file=None,
    )


@span("copy to device")
def copy_states_to_device(states: States, stored: Rows, device: torch.device) -> States:
    """Return copies of the states of the selected rows on the device."""
    if stored.file is not None:
        read = stored.file.read
        return {name: to_device(read(_all_if_none(stored), name), device) for name in states}
    return {name: _copy_of(state, stored.selected, device) for name, state in states.items()}


@span("copy to device")
def write_back(rows: Rows, stored: Rows, copies: States, states: States) -> None:
    """Write the updated copies of class weights and states back to the stored ones."""
    coming = {name: Arriving(copy) for name, copy in {"weight": rows.weight, **copies}.items()}
    arrived = {name: values.read() for name, values in coming.items()}
    if stored.file is not None:
        stored.file.write(_all_if_none(stored), arrived)
        return
    for name, target in {"weight": stored.weight, **states}.items():
        if stored.selected is None:
            target.copy_(arrived[name])
        else:
            target.index_copy_(0, stored.selected, arrived[name])


def _all_if_none(stored: Rows) -> Tensor:
    return torch.arange(len(stored.weight)) if stored.selected is None else stored.selected


def _copy_of(tensor: Tensor, selected: Tensor | None, device: torch.device) -> Tensor:
    """Return a copy on the device, which the caller may change."""
    if selected is not None:
        return to_device(tensor.index_select(0, selected), device)
    return tensor.clone() if tensor.device == device else to_device(tensor, device)


# The update formulas of the optimizers, for one tile of class weights and its gradients. kernels/rules.h
# and kernels/triton_kernels.py have the same formulas in the same order, with the same names. All values
# are computed in float32 (float64 for float64 weights) and then stored in their own dtype. bfloat16 and
# int8 values are rounded stochastically, because small updates would be lost otherwise. The noise depends
# only on (key, row, column), not on ranks, tiles or resumes.

RowIndex = Tensor | slice

_LOW = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


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
