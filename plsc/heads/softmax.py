"""The softmax over the class weights, tile by tile: the matrix [B, classes] never exists.

Notation of docs/life_of_a_step.md: unit embeddings e [B, D], unit class weights w [n, D], cosines c_ij,
logits z_ij.
The class of a sample's label never goes through a tile: its logit is computed beforehand from B rows
(sharded.py). A backend masks it, so the sums here are those over the OTHER classes, and nothing has to be
taken off again.

`TorchBackend` works on every device. The backends with kernels in C and Triton (plsc/heads/kernels) derive
from it, leave to it what they have no kernel for, and are tested against it.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from plsc.errors import OptionError
from plsc.heads.geometry import normalised, through_normalisation
from plsc.heads.rules import Rule, apply_rule
from plsc.heads.weights import Rows, States, read_dtype

BACKENDS = ("auto", "torch", "native", "triton")
_PRODUCTS = ("float32", "bfloat16")
_TILE_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}  # of a [B, tile] matrix: 4 and 64 MiB in float32


@dataclass(frozen=True)
class Execution:
    """How the head computes; none of it changes what is computed, but for rounding.

    products: 'float32' or 'bfloat16', by name or as torch's, the type of the factors of matrix products
    (sums are float32); under autocast always bfloat16. keep_bytes: memory in which the forward pass may
    keep its terms for the update, in 16 bits; where they do not fit they are computed again. tile: rows at
    a time, None: by the batch size. kernels: 'auto', 'torch', 'native' (CPU) or 'triton' (CUDA).
    """

    products: str | torch.dtype = "float32"
    keep_bytes: int = 0
    tile: int | None = None
    kernels: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "products", read_dtype("products", self.products, _PRODUCTS))
        if self.keep_bytes < 0 or (self.tile is not None and self.tile < 1):
            raise OptionError(
                f"keep_bytes is {self.keep_bytes}, tile is {self.tile}; expected 0 or more bytes, and 1 or "
                "more rows or None"
            )
        if self.kernels not in BACKENDS:
            raise OptionError(f"kernels are {self.kernels!r}; expected one of {', '.join(BACKENDS)}")


@dataclass
class Queries:
    """The global batch, as a backend sees it.

    unit: [B, D], e (the embeddings as they are when the rows are not normalised). target: int64 [B], the
    position of the label's class among the n / K classes that take part, -1 if it is not here. scale: s.
    threshold [B], hard_factor 0-dim: above the threshold a class is hard, and its logit is s c (t + c)
    (CurricularFace); None: there are no hard ones.
    """

    unit: Tensor
    target: Tensor
    scale: float = 1.0
    threshold: Tensor | None = None
    hard_factor: Tensor | None = None


@dataclass
class Sums:
    """What the forward pass finds, over the classes other than the label's.

    shift [B]; total [B] = sum_j exp(z_ij - shift_i); weighted [B, D] = sum_j exp(z_ij - shift_i) slope_ij
    w_j, the weighted sum of class weights, or None, slope = dz / dc / s; kept: the terms of `weighted` for
    the update, in the form of the backend that made it.
    """

    shift: Tensor
    total: Tensor
    weighted: Tensor | None = None
    kept: Tensor | None = None


@dataclass
class ForwardContext:
    """What a forward pass saves for the update: the gradient of row j is factor sum_i weight_i G_ij e_i.

    rows: those in play; home: `rows`, or the offloaded rows that they are copies of. log_total [B]: log of
    the sum of exp(z_ij) over all classes of all ranks. target_row: int64 [B], the position among the n rows
    of the label's (winning) row, -1 if it is not here; target_coefficient [B]: G there. weight [B]: s / B,
    from backward() on times what it was given. shift [B], kept: from `Sums`.
    """

    backend: TorchBackend
    rows: Rows
    home: Rows
    queries: Queries
    log_total: Tensor
    target_row: Tensor
    target_coefficient: Tensor
    weight: Tensor
    shift: Tensor
    kept: Tensor | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class TorchBackend:
    """The softmax in plain PyTorch, on any device.

    products: the type in which the matrix products take their factors, float32 or bfloat16 (sums stay in
    float32); float64 rows compute in float64. tile: rows in a tile.
    """

    name = "torch"
    products: torch.dtype = torch.float32
    tile: int = 4096

    def __str__(self) -> str:
        """Return what decides the last bits, as checkpoints have it."""
        settings = "".join(f"{f.name}={getattr(self, f.name)}, " for f in fields(self))
        return f"{self.name.capitalize()}Passes({settings}name={self.name!r})"

    def forward(
        self,
        rows: Rows,
        queries: Queries,
        *,
        fixed_shift: float | None,
        want_weighted: bool = True,
        keep: bool = False,
    ) -> Sums:
        """Return the sums over all other classes.

        fixed_shift: where logits are bounded, a number that keeps exp(z - shift) in range; None: the
        running maximum of each sample. keep: keep the terms for the update in 16 bits (64 for float64
        rows), B x n numbers; only done with a fixed shift.
        """
        unit = queries.unit
        batch, dimension = unit.shape
        shift = unit.new_full((batch,), -torch.inf if fixed_shift is None else fixed_shift)
        total = unit.new_zeros(batch)
        weighted = unit.new_zeros(batch, dimension) if want_weighted else None
        kept = None
        if keep and fixed_shift is not None:
            kept = unit.new_empty(batch, len(rows), dtype=_kept_type(unit.dtype))
        for tile in rows.tiles(self.tile):
            w, _ = directions(rows, tile, unit)
            z, slope = self._logits(rows, queries, w, tile)
            if fixed_shift is None:
                raised = torch.maximum(shift, z.amax(dim=1))
                finite = torch.where(raised.isfinite(), raised, 0)
                correction = (shift - finite).exp()
                total *= correction
                if weighted is not None:
                    weighted *= correction[:, None]
                shift = raised
                p = (z - finite[:, None]).exp_()
            else:
                p = (z - shift[:, None]).exp_()
            total += p.sum(dim=1)
            if slope is not None:
                p *= slope
            if kept is not None:
                kept[:, tile] = p
            if weighted is not None:
                weighted += self._product(p, w)
        return Sums(shift, total, weighted, kept)

    def gradients(self, context: ForwardContext, tile: slice) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the rows of a tile [t, D], and of their biases [t] if there are any."""
        rows, queries = context.rows, context.queries
        w, length = directions(rows, tile, queries.unit)
        if context.kept is not None:
            # A new tensor: what is kept serves a gradient norm and the update alike.
            correction = (context.shift - context.log_total).exp()
            g = context.kept[:, tile].to(w.dtype) * correction[:, None]
        else:
            z, slope = self._logits(rows, queries, w, tile)
            g = (z - context.log_total[:, None]).exp_()
            if slope is not None:
                g *= slope
        target = context.target_row
        here = ((target >= tile.start) & (target < tile.stop)).nonzero()[:, 0]
        g[here, target[here] - tile.start] = context.target_coefficient[here]
        g *= (context.weight * context.factor)[:, None]
        dw = self._product(g.T, queries.unit)
        if length is not None:
            dw = through_normalisation(dw, w, length)
        return dw, None if rows.bias is None else g.sum(dim=0)

    def update(self, context: ForwardContext, rule: Rule, states: States) -> Tensor | None:
        """Change the rows in play and their states, and return the gradients of the biases [n] or None."""
        biases = []
        for tile in context.rows.tiles(self.tile):
            dw, db = self.gradients(context, tile)
            apply_rule(rule, context.rows, tile, dw, states)
            if db is not None:
                biases.append(db)
        return torch.cat(biases) if biases else None

    def best(self, rows: Rows, queries: Queries) -> tuple[Tensor, Tensor]:
        """Return the highest logit without margin [B] and its class's position, over the rows in play.

        Of equal ones the first counts. Without any row: -inf and 0.
        """
        value = queries.unit.new_full((len(queries.unit),), -torch.inf)
        position = torch.zeros_like(queries.target)
        for tile in rows.tiles(self.tile):
            w, _ = directions(rows, tile, queries.unit)
            z = self._products_and_bias(rows, queries, w, tile) * queries.scale
            highest, index = z.max(dim=1)
            better = highest > value
            value = torch.where(better, highest, value)
            position = torch.where(better, (index + tile.start) // rows.centers, position)
        return value, position

    def closeness(self, rows: Rows, queries: Queries) -> Tensor:
        """Return the highest product of each class with any sample of the batch, [n / K]."""
        scores = queries.unit.new_empty(len(rows) // rows.centers)
        for tile in rows.tiles(self.tile):
            w, _ = directions(rows, tile, queries.unit)
            c = self._products_and_bias(rows, queries, w, tile)
            by_class = c.amax(dim=0).view(-1, rows.centers).amax(dim=1)
            scores[tile.start // rows.centers : tile.stop // rows.centers] = by_class
        return scores

    def _products_and_bias(self, rows: Rows, queries: Queries, w: Tensor, tile: slice) -> Tensor:
        c = self._product(queries.unit, w.T)
        if rows.bias is not None:
            c += rows.bias[rows.positions(tile)].to(c)
        return c

    def _logits(self, rows: Rows, queries: Queries, w: Tensor, tile: slice) -> tuple[Tensor, Tensor | None]:
        """Return z [B, t], -inf where nothing counts, and dz / dc / s where it is not 1."""
        c = self._products_and_bias(rows, queries, w, tile)
        z = c * queries.scale
        slope = None
        if queries.threshold is not None:
            assert queries.hard_factor is not None
            hard = c > queries.threshold[:, None]
            slope = torch.where(hard, queries.hard_factor + 2 * c, 1)
            z = torch.where(hard, z * (queries.hard_factor + c), z)
        k = rows.centers
        by_class = z.view(len(z), z.shape[1] // k, k)
        if k > 1:
            winner = c.view_as(by_class).argmax(dim=2, keepdim=True)
            loses = torch.ones_like(by_class, dtype=torch.bool).scatter_(2, winner, False)
            by_class.masked_fill_(loses, -torch.inf)
        first, last = tile.start // k, tile.stop // k
        here = ((queries.target >= first) & (queries.target < last)).nonzero()[:, 0]
        by_class[here, queries.target[here] - first] = -torch.inf
        return z, slope

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        if self.products is torch.float32 or a.dtype is torch.float64:
            return a @ b
        a, b = a.to(self.products), b.to(self.products)
        if a.is_cuda:
            return torch.mm(a, b, out_dtype=torch.float32)
        # torch's CPU products return the type of their factors; logits need the digits of the sums.
        return a.float() @ b.float()


def directions(rows: Rows, tile: slice, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the rows of a tile [t, D]; if they are to be of length 1, also their lengths before [t].

    They come in the type and on the device of `like`. A row of zeros stays one.
    """
    w = rows.weight[rows.positions(tile)].to(like.device, like.dtype)
    return normalised(w) if rows.cosine else (w, None)


def _kept_type(compute: torch.dtype) -> torch.dtype:
    return torch.float64 if compute is torch.float64 else torch.bfloat16


def choose_backend(
    kernels: str,
    device: torch.device,
    row_dtype: torch.dtype,
    products: torch.dtype,
    tile: int | None,
    batch: int,
) -> TorchBackend:
    """Return the backend for a device; `kernels` is one of BACKENDS: 'auto', or one that must be used.

    products: float32 or bfloat16. tile: rows in a tile, None for a choice by the batch size alone, so
    that it is the same in every run. Raises OptionError, with the reason, for kernels that cannot be used.
    """
    elements = _TILE_ELEMENTS.get(device.type, _TILE_ELEMENTS["cuda"])
    rows = tile or max(256, min(elements // 64, elements // max(1, batch)))
    wanted = kernels
    if kernels == "auto":
        wanted = {"cpu": "native", "cuda": "triton"}.get(device.type, "torch")
    if wanted == "torch" or row_dtype is torch.float64:
        return TorchBackend(products, rows)
    if wanted == "native":
        from plsc.heads.kernels import native

        reason = native.unavailable(products) if device.type == "cpu" else f"rows are on {device.type}"
        if reason is None:
            return native.NativeBackend(products, rows, threads=torch.get_num_threads())
    else:
        from plsc.heads.kernels import triton_backend

        reason = triton_backend.unavailable(device)
        if reason is None:
            return triton_backend.TritonBackend(products, rows)
    if kernels != "auto":
        raise OptionError(f"the {kernels} kernels of the head cannot be used: {reason}")
    _announce(wanted, reason)
    return TorchBackend(products, rows)


@functools.cache
def _announce(kernels: str, reason: str) -> None:
    """Say once why the head runs slower than it could."""
    warnings.warn(f"the head runs in plain PyTorch, without its {kernels} kernels: {reason}", stacklevel=4)
