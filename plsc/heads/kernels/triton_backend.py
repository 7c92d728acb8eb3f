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
from plsc.heads.softmax import ForwardContext, Queries, Sums, TorchBackend
from plsc.heads.weights import Rows, Rule, States, kernel_states

_COLUMNS = 1024  # columns of a [B, tile] matrix per program
_COLUMN_PROGRAM = {"size": _COLUMNS, "num_warps": 4, "enable_fp_fusion": False}
# With a running maximum, a program reads its row of c twice: so few programs run at once that these rows fit
# in the L2 cache.
_SAMPLE_PROGRAM = {"size": 2 * _COLUMNS, "num_warps": 16, "enable_fp_fusion": False}
_LARGEST = 4096  # D: one program holds a class weight, its gradient and its states in registers
_LEAST_CAPABILITY = (8, 0)  # supports bfloat16
_ALIGNED = 16  # elements: cuBLAS and loads are slower for rows that are not aligned


@functools.cache
def unavailable(device: torch.device, dimension: int = 1) -> str | None:
    """Return why the kernels cannot be used on this device, for embeddings of this size; None if they can."""
    if device.type != "cuda":
        return f"the head computes on {device.type}, not on a CUDA device"
    if dimension > _LARGEST:
        return f"embeddings have {dimension} values; at most {_LARGEST} are supported"
    try:
        _kernels()
    except ImportError as error:
        return f"triton cannot be imported ({error}); it comes with torch's CUDA builds for Linux"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return "this GPU has compute capability {}.{}; 8.0 is required".format(*capability)
    try:  # Triton needs a C compiler and Python headers, which many GPU images lack
        with _on(device):
            rows = Rows(torch.zeros(1, 1, device=device))
            TritonBackend()._weights(rows, slice(0, 1), rows.weight)
    except Exception as error:
        return f"triton cannot run a kernel here: {kind_and_line(error)}"
    return None


@dataclass(frozen=True)
class TritonBackend(TorchBackend):
    """The softmax with fused kernels, for float32, bfloat16 or int8 class weights on a CUDA device.

    tile: class weights per tile; a larger tile needs 4 to 6 bytes x B more per class weight and saves
    launches. Results are deterministic.
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
        unit, is_fixed = queries.unit, fixed_shift is not None
        batch, dimension = unit.shape
        shift = unit.new_full((batch,), -torch.inf if fixed_shift is None else fixed_shift)
        weighted = torch.zeros_like(unit) if want_weighted else None
        kept = None
        if keep and is_fixed:  # with columns to align the last tile
            kept = unit.new_empty(batch, _aligned(len(rows) + _ALIGNED), dtype=torch.bfloat16)
        factors = unit.to(self.products)
        blocks = -(-min(max(self.tile, rows.centers), len(rows)) // _COLUMNS) if is_fixed else 1
        partial = unit.new_zeros(blocks, batch)
        with _on(unit.device):
            for tile in rows.tiles(self.tile):
                w, _ = self._weights(rows, tile, unit)
                c = self._product(factors, w.T)
                p, columns = None, slice(tile.start, tile.start + len(w))
                if kept is not None and self.products is torch.bfloat16:
                    p = kept[:, columns]  # the product uses the kept values
                elif kept is not None or weighted is not None:
                    p = torch.empty_like(c, dtype=self.products)
                _kernels().exponentials[(batch, -(-len(w) // _COLUMNS) if is_fixed else 1)](
                    *_logit_arguments(c, rows, queries, tile),
                    shift,
                    partial,
                    batch,
                    None if is_fixed else weighted,
                    p,
                    0 if p is None else p.stride(0),
                    dimension=dimension,
                    centers=rows.centers,
                    is_fixed=is_fixed,
                    **(_COLUMN_PROGRAM if is_fixed else _SAMPLE_PROGRAM),
                )
                if kept is not None and p is not None and self.products is not torch.bfloat16:
                    kept[:, columns] = p
                if weighted is not None and p is not None:
                    self._add_product(weighted, p, w)
        return Sums(shift, partial.sum(dim=0), weighted, None if kept is None else kept[:, : len(rows)])

    def gradients(self, context: ForwardContext, tile: slice) -> tuple[Tensor, Tensor | None]:
        """See `TorchBackend.gradients`."""
        dw, db = self._unit_gradients([(context, self._factors(context))], context.rows, tile)
        if context.rows.cosine:
            self._launch_update(context.rows, tile, dw, Rule("none", lr=0.0), [], None)
        return dw, db

    def update(self, contexts: list[ForwardContext], rows: Rows, rule: Rule, states: States) -> Tensor | None:
        """See `TorchBackend.update`."""
        used = kernel_states(rule, states)
        biases, parts = [], [(context, self._factors(context)) for context in contexts]
        for tile in rows.tiles(self.tile):
            dw, db = self._unit_gradients(parts, rows, tile)
            self._launch_update(rows, tile, dw, rule, used, states.get("steps"))
            if db is not None:
                biases.append(db)
        torch.autograd.graph.increment_version(rows.weight)
        return torch.cat(biases) if biases else None

    def _factors(self, context: ForwardContext) -> Tensor:
        return context.queries.unit.to(self.products)

    def _unit_gradients(
        self, parts: list[tuple[ForwardContext, Tensor]], rows: Rows, tile: slice
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the unit class weights, sum_i weight_i G_ij e_i [t, D], and of the biases.

        parts: contexts, over which the gradients are summed, with their `_factors`.
        """
        dw = db = None
        for context, factors in parts:
            part, index = context.part_of(rows, tile)
            g = self._coefficients(context, part, factors)
            biases = None if rows.bias is None else g.sum(dim=0, dtype=torch.float32)
            if dw is None and isinstance(index, slice):
                dw, db = self._product(g.T, factors), biases
                continue
            if dw is None:
                dw = factors.new_zeros(tile.stop - tile.start, rows.dimension, dtype=torch.float32)
                db = None if biases is None else torch.zeros_like(dw[:, 0])
            if isinstance(index, slice):
                self._add_product(dw, g.T, factors)
            else:
                dw[index] += self._product(g.T, factors)
            if db is not None and biases is not None:
                db[index] += biases
        assert dw is not None
        return dw, db

    def _weights(self, rows: Rows, tile: slice, like: Tensor) -> tuple[Tensor, None]:
        """Return the class weights of a tile in the products' dtype, with zeros to align their number."""
        count, dimension = tile.stop - tile.start, rows.dimension
        out = like.new_empty(_aligned(count), dimension, dtype=self.products)
        with _on(out.device):
            _kernels().tile_weights[(len(out),)](
                rows.weight,
                _positions(rows),
                tile.start,
                out,
                count,
                dimension=dimension,
                is_cosine=rows.cosine,
                **_row_program(dimension),
            )
        return out, None

    def _coefficients(self, context: ForwardContext, tile: slice, factors: Tensor) -> Tensor:
        """Return weight_i G_ij [B, t] in the products' dtype, with aligned rows."""
        rows, count = context.rows, tile.stop - tile.start
        c, kept = None, context.kept
        if kept is None:
            c = self._product(factors, self._weights(rows, tile, factors)[0].T)
        else:
            kept = kept[:, tile]
        g = factors.new_empty(len(factors), _aligned(count))
        with _on(g.device):
            _kernels().coefficients[(len(g), -(-g.shape[1] // _COLUMNS))](
                *_logit_arguments(c, rows, context.queries, tile),
                context.log_total.contiguous(),
                kept,
                0 if kept is None else kept.stride(0),
                context.shift.contiguous(),
                context.target_row.contiguous(),
                context.target_coefficient.contiguous(),
                context.weight * context.factor,
                g,
                centers=rows.centers,
                **_COLUMN_PROGRAM,
            )
        return g[:, :count]

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        if a.is_cuda and self.products is torch.bfloat16:  # not in Triton's interpreter, on a CPU
            return torch.mm(a.bfloat16(), b, out_dtype=torch.float32)
        return super()._product(a, b)

    def _add_product(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        """Add a product to float32 `out`."""
        if self.products is torch.float32:
            out.addmm_(a, b)
        elif out.is_cuda and torch.__version__ >= (2, 10):  # type: ignore[operator]
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:  # torch 2.9 adds to the factors' dtype only
            out += self._product(a, b)

    def _launch_update(
        self, rows: Rows, tile: slice, dw: Tensor, rule: Rule, states: list[Tensor], steps: Tensor | None
    ) -> None:
        dimension = rows.dimension
        state, second_state = [*states, None, None][:2]
        with _on(dw.device):
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


def _logit_arguments(c: Tensor | None, rows: Rows, queries: Queries, tile: slice) -> tuple[object, ...]:
    """Return the first arguments of both kernels that compute logits."""
    threshold = queries.threshold
    return (
        c,
        rows.bias,
        _positions(rows),
        tile.start,
        tile.stop - tile.start,
        _aligned(tile.stop - tile.start),
        queries.target,
        float(queries.scale),
        None if threshold is None else threshold.contiguous(),
        queries.hard_factor,
    )


def _positions(rows: Rows) -> Tensor | None:
    """Return the indices of the selected rows in `weight`; None: consecutive from 0."""
    return None if rows.is_compact else rows.selected


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


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
