"""The softmax over the class weights on CUDA devices: products by cuBLAS, everything between them in Triton.

The forward pass has four launches per tile of rows (unit rows, their products with the batch, exponentials
and their sums, products with the rows), the update five; no [B, tile] matrix is read or written more often
than that. The kernels are in `triton_kernels`.
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

_COLUMNS = 1024  # of a [B, tile] matrix in a program
_COLUMN_PROGRAM = {"size": _COLUMNS, "num_warps": 4, "enable_fp_fusion": False}
_LARGEST = 4096  # D: one program holds a row, its gradient and its states in registers
_LEAST_CAPABILITY = (8, 0)  # has bfloat16
_ALIGNED = 16  # numbers: cuBLAS and loads are slower with rows that start elsewhere
_STORED = (torch.float32, torch.bfloat16)


@functools.cache
def unavailable(device: torch.device) -> str | None:
    """Return None where the kernels can be used on a device, else the reason in words."""
    if device.type != "cuda":
        return f"rows are on {device.type}, not on a CUDA device"
    try:
        _kernels()
    except ImportError as error:
        return f"triton cannot be imported ({error}); it comes with torch's CUDA builds for Linux"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return "this GPU is of compute capability {}.{}; 8.0 is needed".format(*capability)
    try:  # Triton wants a C compiler and Python's headers, which many images of GPU machines lack
        with _on(device):
            TritonBackend()._directions(Rows(torch.zeros(1, 1, device=device)), slice(0, 1))
    except Exception as error:
        return f"triton cannot run a kernel here: {kind_and_line(error)}"
    return None


@dataclass(frozen=True)
class TritonBackend(TorchBackend):
    """The softmax with fused kernels, for float32 and bfloat16 rows on a CUDA device.

    tile: rows in a tile; larger ones cost 4 to 6 bytes x B per row and save launches. Sub-centres, the
    running maximum, and rows of more than 4096 numbers are left to `TorchBackend`. The same call gives the
    same bits.
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
                w = self._directions(rows, tile)
                c = self._product(factors, w.T)
                p = None
                if kept is not None and self.products is torch.bfloat16:
                    p = kept[:, tile]  # what is kept is what is multiplied
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
            dw, bias = self._sums_of_rows(context, tile, factors)
            if rows.cosine:
                self._launch_update(rows, tile, dw, Rule("none", lr=0.0), [], None)
        return dw, bias

    def update(self, context: ForwardContext, rule: Rule, states: States) -> Tensor | None:
        """See `TorchBackend.update`: with a fused kernel, where there is one for rows, rule and states."""
        rows, queries = context.rows, context.queries
        used = kernel_states(rule, states, rows.weight)
        if used is None or not _fits(rows, queries):
            return super().update(context, rule, states)
        biases = []
        with _on(queries.unit.device):
            factors = queries.unit.to(self.products)
            for tile in rows.tiles(self.tile):
                dw, bias = self._sums_of_rows(context, tile, factors)
                self._launch_update(rows, tile, dw, rule, used, states.get("steps"))
                if bias is not None:
                    biases.append(bias)
        torch.autograd.graph.increment_version(rows.weight)
        return torch.cat(biases) if biases else None

    def _directions(self, rows: Rows, tile: slice) -> Tensor:
        """Return the rows of a tile [t, D] in the type of the products, of length 1 if they are to be."""
        dimension = rows.weight.shape[1]
        out = rows.weight.new_empty(tile.stop - tile.start, dimension, dtype=self.products)
        _kernels().directions[(len(out),)](
            rows.weight,
            _positions(rows),
            tile.start,
            out,
            dimension=dimension,
            is_cosine=rows.cosine,
            **_row_program(dimension),
        )
        return out

    def _sums_of_rows(
        self, context: ForwardContext, tile: slice, factors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return sum_i weight_i G_ij e_i [t, D], the gradient of the unit rows, and that of the biases."""
        rows, unit, count = context.rows, context.queries.unit, tile.stop - tile.start
        c, kept = None, context.kept
        if kept is None:
            c = self._product(factors, self._directions(rows, tile).T)
        else:
            kept = kept[:, tile]
        # Biases take the sums of these numbers as they are, before they become factors.
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
        self,
        rows: Rows,
        tile: slice,
        dw: Tensor,
        rule: Rule,
        states: list[Tensor],
        steps: Tensor | None,
    ) -> None:
        dimension = rows.weight.shape[1]
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
    """Return whether the kernels can work on these rows."""
    weight, bias = rows.weight, rows.bias
    return (
        rows.centers == 1
        and weight.dtype in _STORED
        and weight.shape[1] <= _LARGEST
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
        and queries.unit.dtype is torch.float32
        and weight.device == queries.unit.device
    )


def _logit_arguments(c: Tensor | None, rows: Rows, queries: Queries, tile: slice) -> tuple[object, ...]:
    """Return what both kernels that compute logits begin with."""
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
    """Return where the rows in play lie in `weight`; None: in sequence."""
    return None if rows.is_compact else rows.selected


def _matrix(like: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised matrix whose rows begin where cuBLAS likes it."""
    stride = -(-width // _ALIGNED) * _ALIGNED
    return like.new_empty(height, stride, dtype=dtype)[:, :width]


def _row_program(dimension: int) -> dict[str, int]:
    """Return how to compile a program that holds a row: columns, a power of two, and warps.

    Products and sums are rounded one by one, as in PyTorch.
    """
    size = 1 << (dimension - 1).bit_length()
    warps = min(16, max(1, size // 256))
    return {"size": size, "num_warps": warps, "enable_fp_fusion": False}


def _signed(key: int) -> int:
    """Return the low 32 bits of a key as a signed number: always of the same type for Triton."""
    low = key & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch on the device of the tensors, not on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _kernels() -> ModuleType:
    """Return the module of the kernels, which needs triton; plsc does not."""
    from plsc.heads.kernels import triton_kernels

    return triton_kernels
