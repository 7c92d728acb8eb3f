"""The two passes over the class rows, tile by tile, in plain PyTorch: the matrix [B, classes] never exists.

Notation of docs/head.md: unit embeddings e [B, D], unit class rows w [n, D], cosines c_ij, logits z_ij.
The class of a sample's label never goes through a tile: its logit is computed beforehand from B rows. A
pass masks it, so the sums here are those over the OTHER classes, and nothing has to be taken off again.

These functions are the reference of the faster kernels (plsc/heads/kernels) and the fallback on every
device that has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.heads.norms import normalised, through_normalisation


@dataclass
class Rows:
    """The rows of this rank that take part in a step.

    weight: [rows, D], float64, float32 or bfloat16. bias: [rows] or None. selected: int64 [n], ascending,
    the positions of the n rows that take part; None: all. centers: K rows in sequence make one class.
    cosine: whether rows and embeddings are normalised. first_row: the global number of ``weight[0]``.
    is_compact: `weight` and `bias` hold the selected rows only, in their order: copies on another device.
    """

    weight: Tensor
    bias: Tensor | None = None
    selected: Tensor | None = None
    centers: int = 1
    cosine: bool = True
    first_row: int = 0
    is_compact: bool = False

    def __len__(self) -> int:
        return len(self.weight) if self.selected is None else len(self.selected)

    def tiles(self, rows: int) -> Iterator[slice]:
        """Yield slices of about `rows` of the n rows; none cuts through a class."""
        step = max(1, rows // self.centers) * self.centers
        for start in range(0, len(self), step):
            yield slice(start, min(start + step, len(self)))

    def positions(self, tile: slice) -> Tensor | slice:
        """Return where the rows of a tile lie in `weight`."""
        if self.selected is None or self.is_compact:
            return tile
        return self.selected[tile]

    def numbers(self, tile: slice) -> Tensor:
        """Return the global numbers of the rows of a tile, int64."""
        if self.selected is not None:
            return self.selected[tile] + self.first_row
        start, stop = tile.start + self.first_row, tile.stop + self.first_row
        return torch.arange(start, stop, device=self.weight.device)


@dataclass
class Queries:
    """The global batch, as the passes see it.

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
    """What the first pass finds, over the classes other than the label's.

    shift [B]; total [B] = sum_j exp(z_ij - shift_i); mixed [B, D] = sum_j exp(z_ij - shift_i) slope_ij w_j,
    or None, slope = dz / dc / s; kept: the terms of `mixed` for the second pass, in the form of whoever
    made it.
    """

    shift: Tensor
    total: Tensor
    mixed: Tensor | None = None
    kept: Tensor | None = None


@dataclass
class RowGradient:
    """What makes row gradients out of the logits: sum_i weight_i G_ij e_i.

    log_total [B]: log of the sum of exp(z_ij) over all classes of all ranks. weight [B]: s / B times what
    backward() was given. target_row: int64 [B], the position among the n rows of the label's (winning)
    row, -1 if it is not here; target_coefficient [B]: G there. factor: multiplies every gradient.
    shift [B]: that of the kept terms; kept: from `Sums`, or None.
    """

    log_total: Tensor
    weight: Tensor
    target_row: Tensor
    target_coefficient: Tensor
    factor: float = 1.0
    shift: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True)
class TorchPasses:
    """The passes in plain PyTorch, on any device.

    products: the type in which the matrix products take their factors, float32 or bfloat16 (sums stay in
    float32); float64 rows compute in float64. tile: rows in a tile.
    """

    products: torch.dtype = torch.float32
    tile: int = 4096
    name: str = "torch"

    def forward(
        self,
        rows: Rows,
        queries: Queries,
        *,
        fixed_shift: float | None,
        want_mixed: bool = True,
        keep: bool = False,
    ) -> Sums:
        """Return the sums over all other classes.

        fixed_shift: where logits are bounded, a number that keeps exp(z - shift) in range; None: the
        running maximum of each sample. keep: hand the terms on to the second pass in 16 bits (64 for
        float64 rows), B x n numbers; only done with a fixed shift.
        """
        unit = queries.unit
        batch, dimension = unit.shape
        shift = unit.new_full((batch,), -torch.inf if fixed_shift is None else fixed_shift)
        total = unit.new_zeros(batch)
        mixed = unit.new_zeros(batch, dimension) if want_mixed else None
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
                if mixed is not None:
                    mixed *= correction[:, None]
                shift = raised
                p = (z - finite[:, None]).exp_()
            else:
                p = (z - shift[:, None]).exp_()
            total += p.sum(dim=1)
            if slope is not None:
                p *= slope
            if kept is not None:
                kept[:, tile] = p
            if mixed is not None:
                mixed += self._product(p, w)
        return Sums(shift, total, mixed, kept)

    def gradients(
        self, rows: Rows, queries: Queries, gradient: RowGradient, tile: slice
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the rows of a tile [t, D], and of their biases [t] if there are any."""
        w, length = directions(rows, tile, queries.unit)
        if gradient.kept is not None:
            assert gradient.shift is not None
            # A new tensor: what is kept serves a gradient norm and the update alike.
            correction = (gradient.shift - gradient.log_total).exp()
            g = gradient.kept[:, tile].to(w.dtype) * correction[:, None]
        else:
            z, slope = self._logits(rows, queries, w, tile)
            g = (z - gradient.log_total[:, None]).exp_()
            if slope is not None:
                g *= slope
        target = gradient.target_row
        here = ((target >= tile.start) & (target < tile.stop)).nonzero()[:, 0]
        g[here, target[here] - tile.start] = gradient.target_coefficient[here]
        g *= (gradient.weight * gradient.factor)[:, None]
        dw = self._product(g.T, queries.unit)
        if length is not None:
            dw = through_normalisation(dw, w, length)
        return dw, None if rows.bias is None else g.sum(dim=0)

    def fused_update(self, *arguments: object) -> Tensor | None:
        """There is no fused update here: see `plsc.heads.engines.update_rows`."""
        raise NotImplementedError

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

    def _logits(
        self, rows: Rows, queries: Queries, w: Tensor, tile: slice
    ) -> tuple[Tensor, Tensor | None]:
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
