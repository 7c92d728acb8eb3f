"""The softmax over the class weights on CUDA GPUs: matrix products by cuBLAS, everything else in Triton.

The forward pass launches four kernels per tile: normalise the class weights, multiply them with the batch,
compute the exponentials and their sums, multiply the exponentials with the class weights. The update launches
five. The Triton kernels are in `triton_kernels`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from plsc.errors import kind_and_line
from plsc.heads.rules import Rule, kernel_states
from plsc.heads.softmax import ForwardContext, Queries, Sums, TorchBackend
from plsc.heads.weights import Rows, States

_COLUMNS = 1024  # columns of a [B, tile] matrix per program
_COLUMN_PROGRAM = {"size": _COLUMNS, "num_warps": 4, "enable_fp_fusion": False}
_LARGEST = 4096  # D: one program holds a class weight, its gradient and its states in registers
_LEAST_CAPABILITY = (8, 0)  # supports bfloat16
_ALIGNED = 16  # elements: cuBLAS and loads are slower for rows that are not aligned
_STORED = (torch.float32, torch.bfloat16, torch.int8)


@functools.cache
def unavailable(device: torch.device) -> str | None:
    """Return why the kernels cannot be used on this device; None if they can."""
    if device.type != "cuda":
        return f"the head computes on {device.type}, not on a CUDA device"
    try:
        _kernels()
    except ImportError as error:
        return f"triton cannot be imported ({error}); it comes with torch's CUDA builds for Linux"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return "this GPU has compute capability {}.{}; 8.0 is required".format(*capability)
    try:  # Triton needs a C compiler and Python headers, which many GPU images lack
        with _on(device):
            TritonBackend()._tile_weights(Rows(torch.zeros(1, 1, device=device)), slice(0, 1))
    except Exception as error:
        return f"triton cannot run a kernel here: {kind_and_line(error)}"
    return None


@dataclass(frozen=True)
class TritonBackend(TorchBackend):
    """The softmax with fused kernels, for float32, bfloat16 or int8 class weights on a CUDA device.

    tile: class weights per tile; a larger tile needs 4 to 6 bytes x B more per class weight and saves
    launches. `TorchBackend` handles sub-centres, unbounded logits, and D above 4096. Results are
    deterministic.
    """

    name = "triton"

    def forward(
        self,
        rows: Rows,
        queries: Queries,
        *,
        fixed_shift: float | None,
        want_weighted: bool = True,
        keep: bool = False,
    ) -> Sums:
        """See `TorchBackend.forward`."""
        if fixed_shift is None or not _fits(rows, queries):
            return super().forward(
                rows, queries, fixed_shift=fixed_shift, want_weighted=want_weighted, keep=keep
            )
        unit = queries.unit
        batch = len(unit)
        shift = unit.new_full((batch,), fixed_shift)
        total = unit.new_zeros(batch)
        weighted = torch.zeros_like(unit) if want_weighted else None
        kept = _matrix(unit, batch, len(rows), torch.bfloat16) if keep else None
        factors = unit.to(self.products)
        with _on(unit.device):
            for tile in rows.tiles(self.tile):
                count = tile.stop - tile.start
                w = self._tile_weights(rows, tile)
                c = self._product(factors, w.T)
                p = None
                if kept is not None and self.products is torch.bfloat16:
                    p = kept[:, tile]  # the product uses the kept values
                elif kept is not None or weighted is not None:
                    p = _matrix(unit, batch, count, self.products)
                partial = unit.new_empty(-(-count // _COLUMNS), batch)
                _kernels().exponentials[(batch, len(partial))](
                    *_logit_arguments(c, rows, queries, tile),
                    shift,
                    partial,
                    batch,
                    p,
                    0 if p is None else p.stride(0),
                    **_COLUMN_PROGRAM,
                )
                total += partial.sum(dim=0)
                if kept is not None and p is not None and self.products is not torch.bfloat16:
                    kept[:, tile] = p
                if weighted is not None and p is not None:
                    weighted += self._product(p, w)
        return Sums(shift, total, weighted, kept)

    def gradients(self, context: ForwardContext, tile: slice) -> tuple[Tensor, Tensor | None]:
        """See `TorchBackend.gradients`."""
        rows, queries = context.rows, context.queries
        if not _fits(rows, queries):
            return super().gradients(context, tile)
        with _on(queries.unit.device):
            factors = queries.unit.to(self.products)
            dw, bias = self._weight_gradient(context, tile, factors)
            if rows.cosine:
                self._launch_update(rows, tile, dw, Rule("none", lr=0.0), [], None)
        return dw, bias

    def update(self, context: ForwardContext, rule: Rule, states: States) -> Tensor | None:
        """See `TorchBackend.update`; uses a fused kernel if there is one for rows, rule and states."""
        rows, queries = context.rows, context.queries
        used = kernel_states(rule, states, rows.weight)
        if used is None or not _fits(rows, queries):
            return super().update(context, rule, states)
        biases = []
        with _on(queries.unit.device):
            factors = queries.unit.to(self.products)
            for tile in rows.tiles(self.tile):
                dw, bias = self._weight_gradient(context, tile, factors)
                self._launch_update(rows, tile, dw, rule, used, states.get("steps"))
                if bias is not None:
                    biases.append(bias)
        torch.autograd.graph.increment_version(rows.weight)
        return torch.cat(biases) if biases else None

    def _tile_weights(self, rows: Rows, tile: slice) -> Tensor:
        """Return the class weights of a tile [t, D] in the products' dtype, normalised if `rows.cosine`."""
        dimension = rows.dimension
        out = rows.weight.new_empty(tile.stop - tile.start, dimension, dtype=self.products)
        _kernels().tile_weights[(len(out),)](
            rows.weight,
            _positions(rows),
            tile.start,
            out,
            dimension=dimension,
            is_cosine=rows.cosine,
            **_row_program(dimension),
        )
        return out

    def _weight_gradient(
        self, context: ForwardContext, tile: slice, factors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the unit class weights, sum_i weight_i G_ij e_i [t, D], and biases."""
        rows, unit, count = context.rows, context.queries.unit, tile.stop - tile.start
        c, kept = None, context.kept
        if kept is None:
            c = self._product(factors, self._tile_weights(rows, tile).T)
        else:
            kept = kept[:, tile]
        # The gradient of the biases is the sum of these values before they are rounded to bfloat16.
        dtype = self.products if rows.bias is None else torch.float32
        g = _matrix(unit, len(unit), count, dtype)
        _kernels().coefficients[(len(unit), -(-count // _COLUMNS))](
            *_logit_arguments(c, rows, context.queries, tile),
            context.log_total.contiguous(),
            kept,
            0 if kept is None else kept.stride(0),
            context.shift.contiguous(),
            context.target_row.contiguous(),
            context.target_coefficient.contiguous(),
            context.weight * context.factor,
            g,
            g.stride(0),
            **_COLUMN_PROGRAM,
        )
        bias = None if rows.bias is None else g.sum(dim=0)
        return self._product(g.T, factors), bias

    def _launch_update(
        self, rows: Rows, tile: slice, dw: Tensor, rule: Rule, states: list[Tensor], steps: Tensor | None
    ) -> None:
        dimension = rows.dimension
        state, second_state = [*states, None, None][:2]
        _kernels().update[(len(dw),)](
            dw,
            rows.weight,
            _positions(rows),
            rows.selected,
            tile.start,
            rows.first_row,
            state,
            second_state,
            steps,
            float(rule.lr),
            float(rule.momentum),
            float(rule.weight_decay),
            1.0 - rule.beta1,
            1.0 - rule.beta2,
            math.log(max(rule.beta1, 1e-30)),
            math.log(max(rule.beta2, 1e-30)),
            float(rule.eps),
            _signed(rule.key),
            dimension=dimension,
            is_cosine=rows.cosine,
            kind=rule.kind,
            nesterov=rule.nesterov,
            **_row_program(dimension),
        )


def _fits(rows: Rows, queries: Queries) -> bool:
    """Return whether the kernels support these class weights and queries."""
    weight, bias = rows.weight, rows.bias
    return (
        rows.centers == 1
        and weight.dtype in _STORED
        and rows.dimension <= _LARGEST
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
        and queries.unit.dtype is torch.float32
        and weight.device == queries.unit.device
    )


def _logit_arguments(c: Tensor | None, rows: Rows, queries: Queries, tile: slice) -> tuple[object, ...]:
    """Return the first arguments of both kernels that compute logits."""
    threshold = queries.threshold
    return (
        c,
        rows.bias,
        _positions(rows),
        tile.start,
        tile.stop - tile.start,
        queries.target,
        float(queries.scale),
        None if threshold is None else threshold.contiguous(),
        queries.hard_factor,
    )


def _positions(rows: Rows) -> Tensor | None:
    """Return the indices of the selected rows in `weight`; None: consecutive from 0."""
    return None if rows.is_compact else rows.selected


def _matrix(like: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised matrix with aligned rows."""
    stride = -(-width // _ALIGNED) * _ALIGNED
    return like.new_empty(height, stride, dtype=dtype)[:, :width]


def _row_program(dimension: int) -> dict[str, int]:
    """Return the compile options of a program that holds one class weight of `dimension` elements.

    FP fusion is off, so products and sums are rounded separately, as in PyTorch.
    """
    size = 1 << (dimension - 1).bit_length()
    warps = min(16, max(1, size // 256))
    return {"size": size, "num_warps": warps, "enable_fp_fusion": False}


def _signed(key: int) -> int:
    """Return the low 32 bits of a key as a signed integer, so that its Triton type is always the same."""
    low = key & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make the device of the tensors current for kernel launches."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _kernels() -> ModuleType:
    """Import the module of the kernels; it needs triton, which plsc does not depend on."""
    from plsc.heads.kernels import triton_kernels

    return triton_kernels
