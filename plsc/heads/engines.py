"""What computes the passes on this device, and how rows are updated from them."""

from __future__ import annotations

import functools
import warnings
from typing import Protocol

import torch
from torch import Tensor

from plsc.errors import OptionError
from plsc.heads.passes import Queries, RowGradient, Rows, Sums, TorchPasses
from plsc.heads.rules import Rule, States, apply_rule

KERNELS = ("auto", "torch", "native", "triton")
_TILE_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}  # of a [B, tile] matrix: 4 and 64 MiB in float32


class Passes(Protocol):
    """The passes of `TorchPasses`, whatever computes them."""

    @property
    def name(self) -> str:
        """Of the kernels: torch, native or triton."""
        ...

    @property
    def tile(self) -> int:
        """Rows in a tile."""
        ...

    def forward(
        self,
        rows: Rows,
        queries: Queries,
        *,
        fixed_shift: float | None,
        want_mixed: bool = True,
        keep: bool = False,
    ) -> Sums:
        """See `TorchPasses.forward`."""
        ...

    def gradients(
        self, rows: Rows, queries: Queries, gradient: RowGradient, tile: slice
    ) -> tuple[Tensor, Tensor | None]:
        """See `TorchPasses.gradients`."""
        ...

    def fused_update(
        self, rows: Rows, queries: Queries, gradient: RowGradient, rule: Rule, states: States
    ) -> Tensor | None:
        """Change rows and states in one go; return the gradients of the biases [n] if there are any.

        Raises NotImplementedError, before anything is changed, where it cannot.
        """
        ...


def choose_passes(
    kernels: str,
    device: torch.device,
    row_dtype: torch.dtype,
    products: torch.dtype,
    tile: int | None,
    batch: int,
) -> Passes:
    """Return the passes for a device; `kernels` is 'auto', or one that must be used.

    products: float32 or bfloat16. tile: rows in a tile, None for a choice by the batch size alone, so
    that it is the same in every run. Raises OptionError, with the reason, for kernels that cannot be used.
    """
    if kernels not in KERNELS:
        raise OptionError(f"kernels are {kernels!r}; expected one of {', '.join(KERNELS)}")
    elements = _TILE_ELEMENTS.get(device.type, _TILE_ELEMENTS["cuda"])
    rows = tile or max(256, min(elements // 64, elements // max(1, batch)))
    plain = TorchPasses(products, rows)
    if kernels == "torch" or row_dtype is torch.float64:
        return plain
    wanted = kernels
    if kernels == "auto":
        wanted = {"cpu": "native", "cuda": "triton"}.get(device.type, "torch")
    if wanted == "torch":
        return plain
    if wanted == "native":
        from plsc.heads.kernels import native

        reason = native.unavailable() if device.type == "cpu" else f"rows are on {device.type}"
        if reason is None and native.supports(products):
            return native.NativePasses(products, rows, torch.get_num_threads())
        reason = reason or f"this processor has no instructions for {products} products"
    else:
        from plsc.heads.kernels import triton_rows

        reason = triton_rows.unavailable(device)
        if reason is None:
            return triton_rows.TritonPasses(products, rows)
    if kernels != "auto":
        raise OptionError(f"the {kernels} kernels of the head cannot be used: {reason}")
    _announce(wanted, reason)
    return plain


@functools.cache
def _announce(kernels: str, reason: str) -> None:
    """Say once why the head runs slower than it could."""
    warnings.warn(
        f"the head runs in plain PyTorch, without its {kernels} kernels: {reason}", stacklevel=4
    )


def update_rows(
    passes: Passes,
    rows: Rows,
    queries: Queries,
    gradient: RowGradient,
    rule: Rule,
    states: States,
) -> Tensor | None:
    """Change the rows in play and their states; return the gradients of their biases, if there are any."""
    try:
        return passes.fused_update(rows, queries, gradient, rule, states)
    except NotImplementedError:
        pass
    biases = []
    for tile in rows.tiles(passes.tile):
        dw, db = passes.gradients(rows, queries, gradient, tile)
        apply_rule(rule, rows, tile, dw, states)
        if db is not None:
            biases.append(db)
    return torch.cat(biases) if biases else None
