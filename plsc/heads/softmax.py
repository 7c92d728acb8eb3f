"""The softmax over the class weights, tile by tile, without allocating the matrix [B, classes].

Notation of docs/life_of_a_step.md: unit embeddings e [B, D], unit class weights w [n, D], cosines c_ij,
logits z_ij. sharded.py computes the logits of the labels. A backend masks them: all sums here are over the
OTHER classes.

`TorchBackend` works on every device. The C and Triton backends (plsc/heads/kernels) derive from it, use it
where they have no kernel, and are tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plsc.errors import OptionError
from plsc.heads.weights import Rows, Rule, States, apply_rule, read_dtype
from plsc.parallel.collectives import send_rows, to_device

BACKENDS = ("auto", "torch", "native", "triton")
# The C kernels by instruction set, fastest first: for tests and benchmarks. 'native' chooses.
ENGINES = ("native-amx", "native-avx512bf16", "native-avx512", "native-avx2", "native-neon")
_PRODUCTS = ("float32", "bfloat16")
_TILE_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}  # of a [B, tile] matrix: 4 and 64 MiB in float32


@dataclass(frozen=True)
class Execution:
    """How the head computes. These settings change the results only by rounding.

    Args:
        products: dtype of the inputs of matrix products, float32 or bfloat16, as a string or torch.dtype;
            sums are float32. Always bfloat16 under autocast.
        keep_bytes: memory for exponentials that the forward pass may keep for the update, in bfloat16. If
            they do not fit, the update computes them again.
        tile: class weights per tile; None: chosen by the batch size.
        kernels: 'auto', 'torch', 'native' (C, CPU) or 'triton' (CUDA).
    """

    products: str | torch.dtype = "float32"
    keep_bytes: int = 0
    tile: int | None = None
    kernels: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "products", read_dtype("products", self.products, _PRODUCTS))
        if self.kernels not in (*BACKENDS, *ENGINES):
            raise OptionError(f"kernels is {self.kernels!r}; expected one of {', '.join(BACKENDS)}")


@dataclass
class Queries:
    """The global batch, as input of a backend.

    Attributes:
        unit: [B, D], normalised embeddings (unnormalised for plain softmax).
        target: int64 [B], index of the label's class among the n / K selected classes, -1 if not local.
        scale: s.
        threshold: [B]; a class whose cosine exceeds it is hard (CurricularFace). None: no hard classes.
        hard_factor: scalar tensor t; the logit of a hard class is s c (t + c).
    """

    unit: Tensor
    target: Tensor
    scale: float = 1.0
    threshold: Tensor | None = None
    hard_factor: Tensor | None = None


@dataclass
class Sums:
    """The sums of a forward pass over the classes j other than the label.

    Attributes:
        shift: [B].
        total: [B], sum_j exp(z_ij - shift_i).
        weighted: [B, D], the weighted sum of class weights sum_j exp(z_ij - shift_i) slope_ij w_j with
            slope = dz / dc / s, or None.
        kept: the factors of w_j in `weighted`, for the update; the layout depends on the backend.
    """

    shift: Tensor
    total: Tensor
    weighted: Tensor | None = None
    kept: Tensor | None = None


@dataclass
class ForwardContext:
    """What a forward pass saves for the update: the gradient of w_j is factor * sum_i weight_i G_ij e_i.

    Attributes:
        rows: the selected class weights.
        stored: `rows`; with offload, the class weights in CPU memory from which `rows` was copied.
        log_total: [B], log of the sum of exp(z_ij) over all classes of all ranks.
        target_row: int64 [B], index among the n rows of the label's (nearest sub-centre's) weights, -1 if not
            local.
        target_coefficient: [B], G_ij for that row.
        weight: [B], s / B; backward() multiplies it by the gradient of the loss.
        shift, kept: from `Sums`.
    """

    backend: TorchBackend
    rows: Rows
    stored: Rows
    queries: Queries
    log_total: Tensor
    target_row: Tensor
    target_coefficient: Tensor
    weight: Tensor
    shift: Tensor
    kept: Tensor | None = None
    factor: float = 1.0

    def part_of(self, rows: Rows, tile: slice) -> tuple[slice, Tensor | slice]:
        """Return which of its rows are in a tile of `rows`, and their indices in the tile."""
        mine = self.stored.on_host
        if rows.on_host is None or mine is None:
            return tile, slice(None)
        wanted = rows.on_host[tile]
        low = torch.searchsorted(mine, wanted[0])
        high = torch.searchsorted(mine, wanted[-1], right=True)
        part = slice(int(low), int(high))
        return part, to_device(torch.searchsorted(wanted, mine[part]), self.rows.weight.device)


@dataclass(frozen=True)
class TorchBackend:
    """The softmax in plain PyTorch, on any device.

    products: dtype of the inputs of matrix products, float32 or bfloat16; sums are float32. float64 class
    weights are computed in float64. tile: class weights per tile.
    """

    name = "torch"
    products: torch.dtype = torch.float32
    tile: int = 4096

    def __str__(self) -> str:
        """Return the settings that determine the last bits, in the format of checkpoints."""
        settings = "".join(f"{f.name}={getattr(self, f.name)}, " for f in fields(self))
        return f"{self.name.capitalize()}Passes({settings}name={self.name!r})"

    def describe(self) -> str:
        """Return the name of the kernels, for log lines."""
        return self.name

    def forward(
        self,
        rows: Rows,
        queries: Queries,
        *,
        fixed_shift: float | None,
        want_weighted: bool = True,
        keep: bool = False,
    ) -> Sums:
        """Return the sums over all classes other than the label.

        fixed_shift: for bounded logits, a shift that keeps exp(z - shift) in range; None: use each sample's
        running maximum. want_weighted: compute `Sums.weighted`. keep: with a fixed shift, keep B x n
        exponentials in bfloat16 (float64 for float64 class weights) for the update.
        """
        unit = queries.unit
        batch, dimension = unit.shape
        shift = unit.new_full((batch,), -torch.inf if fixed_shift is None else fixed_shift)
        total = unit.new_zeros(batch)
        weighted = unit.new_zeros(batch, dimension) if want_weighted else None
        kept = None
        if keep and fixed_shift is not None:
            kept_type = torch.float64 if unit.dtype is torch.float64 else torch.bfloat16
            kept = unit.new_empty(batch, len(rows), dtype=kept_type)
        for tile in rows.tiles(self.tile):
            w, _ = self._weights(rows, tile, unit)
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
        """Return the gradients of the class weights of a tile [t, D], and of their biases [t] or None."""
        rows, queries = context.rows, context.queries
        w, length = self._weights(rows, tile, queries.unit)
        if context.kept is not None:
            # Not in place: both the gradient norm and the update use the kept values.
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
            dw = normalisation_backward(dw, w, length)
        return dw, None if rows.bias is None else g.sum(dim=0)

    def summed_gradients(
        self, contexts: list[ForwardContext], rows: Rows
    ) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yield (tile, gradient [t, D], gradient of the biases [t] or None), summed over the contexts.

        rows: all rows that the contexts selected; of a single context, its own rows.
        """
        for tile in rows.tiles(self.tile):
            if len(contexts) == 1:
                yield tile, *self.gradients(contexts[0], tile)
                continue
            count, unit = tile.stop - tile.start, contexts[0].queries.unit
            dw = unit.new_zeros(count, unit.shape[1])
            db = None if rows.bias is None else unit.new_zeros(count)
            for context in contexts:
                part, index = context.part_of(rows, tile)
                more, more_biases = context.backend.gradients(context, part)
                dw[index] += more
                if db is not None and more_biases is not None:
                    db[index] += more_biases
            yield tile, dw, db

    def update(self, contexts: list[ForwardContext], rows: Rows, rule: Rule, states: States) -> Tensor | None:
        """Update class weights and their states; return the biases' gradients [n] or None.

        contexts, rows: see `summed_gradients`. states: of `rows`.
        """
        biases = []
        for tile, dw, db in self.summed_gradients(contexts, rows):
            apply_rule(rule, rows, tile, dw, states)
            if db is not None:
                biases.append(db)
        return torch.cat(biases) if biases else None

    def class_logits(self, rows: Rows, queries: Queries, tile: slice) -> Tensor:
        """Return the logits without margin of the classes of a tile, [B, t / K]."""
        w, _ = self._weights(rows, tile, queries.unit)
        z = self._products_and_bias(rows, queries, w, tile) * queries.scale
        return z.view(len(z), z.shape[1] // rows.centers, rows.centers).amax(dim=2)

    def scores(self, rows: Rows, queries: Queries, kept: Tensor | None, tile: slice) -> Tensor:
        """Return numbers [B, t / K] in the order of each sample's logits: the kept terms, or else logits."""
        if kept is None:
            return self.class_logits(rows, queries, tile)
        terms = self._kept_terms(kept, len(queries.unit), tile)
        return terms if rows.centers == 1 else terms.view(len(terms), -1, rows.centers).amax(dim=2)

    def _kept_terms(self, kept: Tensor, batch: int, tile: slice) -> Tensor:
        """Return `Sums.kept` of the rows of a tile, [B, t]."""
        return kept[:, tile].contiguous()

    def _weights(self, rows: Rows, tile: slice, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the class weights [t, D], normalised if `rows.cosine`, and their norms [t] or None.

        dtype and device are those of `like`. Zero weights stay zero.
        """
        w = rows.values(rows.positions(tile)).to(like.device, like.dtype)
        return normalised(w) if rows.cosine else (w, None)

    def _products_and_bias(self, rows: Rows, queries: Queries, w: Tensor, tile: slice) -> Tensor:
        c = self._product(queries.unit, w.T)[:, : tile.stop - tile.start]
        if rows.bias is not None:
            c += rows.bias[rows.positions(tile)].to(c)
        return c

    def _logits(self, rows: Rows, queries: Queries, w: Tensor, tile: slice) -> tuple[Tensor, Tensor | None]:
        """Return z [B, t], -inf for labels and losing sub-centres, and dz / dc / s (None: all 1)."""
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
        # A bfloat16 product returns bfloat16; logits need the precision of float32 sums.
        return a.to(self.products).float() @ b.to(self.products).float()


def tile_size(device: torch.device, batch: int, dimension: int = 0) -> int:
    """Return the number of class weights per tile for a global batch size and, on GPUs, embedding size.

    On GPUs it is a multiple of 128: otherwise rows of [B, tile] matrices are read one element at a time.
    """
    elements = _TILE_ELEMENTS.get(device.type, _TILE_ELEMENTS["cuda"])
    tile = max(256, min(elements // 64, elements // max(1, batch)))
    if device.type == "cpu":
        return tile
    # Each tile reads and writes the weighted sum [B, D]: with 2 D class weights a quarter of the bytes moved.
    return max(tile // 128, -(-2 * dimension // 128)) * 128


# Norms and unit vectors, with exact and finite gradients for extreme input. Norms from 2^-120 to 2^126 are
# exact to rounding in float32 and bfloat16. A shorter vector is treated as zero: its unit vector and its
# gradient are zero. The same holds for a finite vector whose norm overflows float32. The kernels follow the
# same rules.

SHORTEST = 2.0**-120  # shorter vectors count as zero, so gradients (at most s / |W|) stay finite in float32
_UNDERFLOW_NORM = 2.0**-40  # below this norm, squares that underflowed may matter
_RESCALE = 2.0**100  # moves every norm outside the safe range into it


def norms(x: Tensor) -> Tensor:
    """Return |x| over the last dimension, in float32 or float64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    length = x.norm(dim=-1)
    factor = torch.where(length < _UNDERFLOW_NORM, _RESCALE, torch.where(length.isinf(), 1 / _RESCALE, 1.0))
    if x.is_cuda or bool((factor != 1).any()):  # on a GPU without the test, which would synchronise
        factor = factor.to(x.dtype)
        length = (x * factor[..., None]).norm(dim=-1) / factor
    return length


def normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / |x| over the last dimension, and |x|; not differentiable. Zero vectors stay zero."""
    length = norms(x)
    return x * _reciprocal(length)[..., None], length


def normalisation_backward(gradient: Tensor, unit: Tensor, length: Tensor) -> Tensor:
    """Return the gradient of x from the gradient g of its unit vector u: (g - (g . u) u) / |x|."""
    along = (gradient * unit).sum(dim=-1, keepdim=True)
    return (gradient - along * unit) * _reciprocal(length)[..., None]


class Normalise(torch.autograd.Function):
    """`normalised`, differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the unit vectors."""
        unit, length = normalised(x)
        ctx.save_for_backward(unit, length)
        ctx.like = x.dtype
        return unit

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient of the vectors."""
        return normalisation_backward(gradients[0], *ctx.saved_tensors).to(ctx.like)


def _reciprocal(length: Tensor) -> Tensor:
    """Return 1 / length, and 0 for lengths that count as zero."""
    return torch.where(length >= SHORTEST, 1 / length, 0)


# The classes with the highest logits, among the class weights of a rank and then of all ranks, without the
# matrix [B, classes]. Of equal logits, the lowest class comes first; nan counts as -inf.

Top = tuple[Tensor, Tensor]
"""Logits without margin [B, k], highest first, and their classes, int64 [B, k]."""

REPORTED = 5
"""k of the top-k accuracy during training."""

_NO_CLASS = torch.iinfo(torch.int64).max


def top_of_rows(backend: TorchBackend, rows: Rows, queries: Queries, k: int) -> Top:
    """Return the k best of the selected classes of this rank, for the global batch.

    With fewer than k classes, the other logits are -inf and their classes do not exist.
    """
    scores = queries.unit.new_full((len(queries.unit), k), -torch.inf)
    classes = torch.full_like(scores, _NO_CLASS, dtype=torch.int64)
    for tile in rows.tiles(backend.tile):
        z = backend.class_logits(rows, queries, tile).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        numbers = rows.global_indices(tile)[:: rows.centers].to(z.device) // rows.centers
        highest, columns = _highest(z, k)
        scores, classes = _best(torch.cat([scores, highest], 1), torch.cat([classes, numbers[columns]], 1), k)
    return scores, classes


def top_of_ranks(top: Top, sizes: list[int], group: dist.ProcessGroup | None) -> Top:
    """Return the best classes of all ranks for the samples of this rank; a collective.

    top: of the classes of this rank, for the global batch. sizes: batch size of each rank.
    """
    ours = [send_rows(one, sizes, group).transpose(0, 1).flatten(1) for one in top]
    return _best(ours[0], ours[1], top[0].shape[1])


def top_of_logits(logits: Tensor, k: int) -> Top:
    """Return the k best of all classes, at most C, from logits [B, C]."""
    return _best(*_highest(logits.nan_to_num(-torch.inf, torch.inf, -torch.inf), k), k)


def count_hits(classes: Tensor, labels: Tensor) -> Tensor:
    """Return how many labels [b] equal the first and how many any of the classes [b, k]; int64 [2]."""
    hits = classes == labels[:, None]
    return torch.stack([hits[:, 0].sum(), hits.sum()])


def _highest(z: Tensor, k: int) -> Top:
    """Return the k highest values of each row, or all, and their columns, in the order of the columns.

    torch.topk alone may return any of several equal values.
    """
    k = min(k, z.shape[1])
    least = z.topk(k, dim=1).values[:, -1:]
    above, equal = z > least, z == least
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room))
    columns = chosen.nonzero()[:, 1].view(len(z), k)
    return z.gather(1, columns), columns


def _best(scores: Tensor, classes: Tensor, k: int) -> Top:
    """Return the k highest scores of each row, highest first, with their classes."""
    order = classes.argsort(dim=1)
    scores, classes = scores.gather(1, order), classes.gather(1, order)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, order), classes.gather(1, order)
