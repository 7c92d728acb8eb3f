"""The softmax over the class weights, tile by tile, without allocating the matrix [B, classes].

Notation of docs/life_of_a_step.md: unit embeddings e [B, D], unit class weights w [n, D], cosines c_ij,
logits z_ij. sharded.py computes the logits of the labels. A backend masks them: all sums here are over the
OTHER classes.

1. The forward pass creates a `ForwardContext` and passes it to `HeadLoss`.
2. backward() through that loss returns the gradient of the embeddings and saves the context
   (`SavedContexts.save`). Without a row optimizer, it computes the gradients of all class weights instead.
3. `RowOptimizer.step` (optimizers.py) consumes the saved contexts (`SavedContexts.consume`), one per
   micro-batch. It computes gradients and updates one tile of class weights at a time. A skipped step discards
   the contexts.

`TorchBackend` works on every device. The C and Triton backends (plsc/heads/kernels) derive from it, use it
where they have no kernel, and are tested against it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from plsc.errors import OptionError
from plsc.heads.margins import Margin
from plsc.heads.weights import Rows, Rule, States, apply_rule, copy_to_device, read_dtype
from plsc.parallel.world import ScatteredSum, to_device

BACKENDS = ("auto", "torch", "native", "triton")
# The C kernels by instruction set, fastest first: for tests and benchmarks. 'native' chooses.
ENGINES = ("native-amx", "native-avx512bf16", "native-avx512", "native-avx2", "native-neon")
_PRODUCTS = ("float32", "bfloat16")
_MANY_CONTEXTS = 256  # more than any reasonable number of micro-batches
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


class SavedContexts(list[ForwardContext]):
    """The forward contexts that backward() saved since the last step of the row optimizer.

    The protocol between a head and its row optimizer: the head calls `begin` in each training forward pass
    and `save` in each backward pass; the optimizer calls `consume` in step(), or `discard` in skip().

    Attributes:
        has_consumer: the head has a row optimizer, so backward() saves contexts.
        step: number of steps so far; seeds sampling and stochastic rounding.
    """

    def __init__(self, margin: Margin) -> None:
        super().__init__()
        self.has_consumer = False
        self.step = 0
        self._margin = margin
        self._statistics: dict[str, Tensor] | None = None  # the margin's buffers before this step

    def begin(self) -> None:
        """Save the margin's running statistics before the step, for `discard`."""
        if self._statistics is None:
            state = self._margin.state_dict()
            self._statistics = {name: value.clone() for name, value in state.items()}

    def save(self, context: ForwardContext) -> None:
        """Keep a context until the next step; warn if step() is apparently never called."""
        self.append(context)
        if len(self) == _MANY_CONTEXTS:
            warnings.warn(
                f"{len(self)} backward passes since the last step of the row optimizer: the class weights "
                "are not trained and memory grows; call step() or skip() of the row optimizer after each "
                "step of the backbone's optimizer",
                stacklevel=2,
            )

    def consume(self) -> list[ForwardContext]:
        """Return and remove all contexts, and start the next step."""
        contexts = list(self)
        self.clear()
        self._statistics = None
        # Skipped steps count as well (`discard`), so a repeated batch draws other classes and other noise.
        self.step += 1
        return contexts

    def discard(self) -> None:
        """Drop all contexts, restore the margin's running statistics, and start the next step."""
        if self._statistics is not None:
            self._margin.load_state_dict(self._statistics)
        self.consume()


def rows_of(contexts: list[ForwardContext]) -> tuple[Rows, Rows]:
    """Return the stored rows that any of the forward passes selected, and these rows on the device."""
    first, stored = contexts[0], contexts[0].stored
    if len(contexts) == 1:
        return stored, first.rows
    chosen = [context.stored.on_host for context in contexts if context.stored.on_host is not None]
    if chosen:
        stored = stored.of_rows(torch.unique(torch.cat(chosen)))
    is_copied = first.rows is not first.stored
    return stored, copy_to_device(stored, first.rows.weight.device) if is_copied else stored


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


@dataclass
class EmbeddingGradient:
    """The gradient of this rank's embeddings, while its reduce-scatter runs.

    unit [b, D], length [b]: of the local embeddings. radial [b]: dL / d|x|, or None.
    """

    scattered: ScatteredSum
    unit: Tensor
    length: Tensor | None
    radial: Tensor | None

    def wait(self) -> Tensor:
        """Wait for the reduce-scatter and return dL / dx [b, D]."""
        de = self.scattered.wait()
        if self.length is not None:
            de = normalisation_backward(de, self.unit, self.length)
        if self.radial is not None:
            de = de + self.radial[:, None] * self.unit
        return de


class HeadLoss(torch.autograd.Function):
    """Connects the loss of a forward pass to autograd; backward() works once per forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Any,
        loss: Tensor,
        context: ForwardContext,
        gradient: EmbeddingGradient | None,
    ) -> Tensor:
        """Return the loss."""
        ctx.parts = (head, context, gradient)
        ctx.like = embeddings.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, and save the context for the row optimizer if there is one."""
        if ctx.parts is None:
            raise RuntimeError(
                "backward() was called twice for the same forward pass of the head; call the head again "
                "before the second backward()"
            )
        head, context, gradient = ctx.parts
        ctx.parts = None
        loss_gradient = gradients[0].detach()
        context.weight = context.weight * loss_gradient.to(context.weight)
        to_embeddings = None
        if gradient is not None:
            to_embeddings = (gradient.wait() * loss_gradient).to(ctx.like)
        to_weight, to_bias = None, None
        if ctx.needs_input_grad[1]:
            if head.contexts.has_consumer:
                head.contexts.save(context)
            elif head.weight.dtype is torch.int8:
                raise OptionError(
                    "int8 class weights have no gradient, so torch's optimizers cannot update them; use a "
                    "row optimizer, such as plsc.heads.RowSGD"
                )
            else:
                to_weight, to_bias = _full_gradients(head, context)
                head.contexts.step += 1
        return to_embeddings, to_weight, to_bias, None, None, None, None


def _full_gradients(head: Any, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of all class weights and biases of this rank; zero for classes not sampled."""
    weight = torch.zeros_like(head.weight)
    bias = None if head.bias is None else torch.zeros_like(head.bias)
    flat = weight.view(-1, weight.shape[-1])
    for tile, dw, db in context.backend.summed_gradients([context], context.rows):
        index = context.stored.positions(tile)
        flat[index] = dw.to(flat)
        if bias is not None and db is not None:
            bias[index] = db.to(bias)
    return weight, bias


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
