"""The distributed head: every rank holds the weights of its own classes, and no others.

Embeddings and labels are gathered (B x D numbers); each rank computes the logits of its own classes for the
whole global batch, tile by tile (softmax.py); a few numbers per sample make the softmax of all shards
whole. Nothing that travels grows with the number of classes, and no matrix [B, classes] exists.

The gradient of the embeddings exists before any of the class weights. The weights are read a second time
when their optimizer steps, and changed tile by tile (optimizers.py): a gradient of all of them never exists.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plsc.errors import CheckpointError, DataError, OptionError
from plsc.heads.base import GlobalBatch, Head, HeadOutput
from plsc.heads.geometry import normalised, norms
from plsc.heads.margins import Margin
from plsc.heads.sampling import Sampling, draw_classes, nearest_classes
from plsc.heads.softmax import (
    Execution,
    ForwardContext,
    Queries,
    Sums,
    TorchBackend,
    choose_backend,
)
from plsc.heads.update import EmbeddingGradient, HeadLoss, SavedContexts
from plsc.heads.weights import Rows, fetch, hash_key
from plsc.parallel.collectives import (
    ScatteredSum,
    gather_rows,
    max_over_ranks,
    sum_over_ranks,
)
from plsc.spans import span

_HIGHEST_EXPONENT = 85.0  # e^85 is near the end of what float32 and bfloat16 hold


@dataclass
class _Target:
    """What this rank knows of the labels' logits; zero, or -1, for samples whose class is elsewhere.

    queries: with the places of the labels. samples: int64 [T], of `_look_up`; w: [T, D], the (winning) row of
    each, of length 1 if rows are normalised. For all B samples: row, its position among the rows in play;
    logit, with margin and scale; slope = dpsi / dc; radial = d logit / d|x| or None.
    """

    queries: Queries
    samples: Tensor
    w: Tensor
    row: Tensor
    logit: Tensor
    slope: Tensor
    radial: Tensor | None


def _look_up(is_here: Tensor) -> Tensor:
    """Return the samples whose class is here, int64 [T]; on a GPU all, as to choose would wait for it."""
    if is_here.is_cuda:
        return torch.arange(len(is_here), device=is_here.device)
    return is_here.nonzero()[:, 0]


class ShardedHead(Head):
    """Softmax over C classes whose rows are split over the ranks of `group` (None: one process).

    class_num: C; emb_size: D; margin: from plsc.heads.margins; centers: rows per class (sub-centres, Deng
    et al. 2020), the nearest counts. `weight` is [C_local, D], or [C_local, K, D] with sub-centres.
    row_dtype: float32, bfloat16 (updated with stochastic rounding) or float64. initial_norm: expected norm of
    a class's initial weights, None: 0.01 sqrt(D). offload: the rows stay in CPU memory and those of a
    step are copied to the device. on_nonfinite: "raise", or "pass" for a loop that looks at the loss.

    Margin warm-up: set `head.margin.share` before each step, from 0 (no margin) to 1 (the full margin).

    Without a row optimizer (plsc.heads.RowSGD and others) backward() leaves whole gradients in
    `weight.grad` for any torch optimizer; with one, it leaves none, and `optimizer.step()` updates the
    rows. Keep the head outside DDP, FSDP, torch.compile and activation checkpointing.
    """

    is_sharded = True

    def __init__(
        self,
        class_num: int,
        emb_size: int,
        margin: Margin,
        *,
        centers: int = 1,
        sampling: Sampling | None = None,
        execution: Execution | None = None,
        row_dtype: str | torch.dtype = torch.float32,
        initial_norm: float | None = None,
        offload: bool = False,
        on_nonfinite: str = "raise",
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if on_nonfinite not in ("raise", "pass"):
            raise OptionError(f"on_nonfinite is {on_nonfinite!r}; expected 'raise' or 'pass'")
        if group is None and dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(
                f"this head has no process group, so each of the {dist.get_world_size()} ranks trains all "
                "classes by itself, on its own batches; pass group=dist.new_group() to share them out",
                stacklevel=2,
            )
        super().__init__(
            class_num,
            emb_size,
            margin,
            centers=centers,
            row_dtype=row_dtype,
            initial_norm=initial_norm,
            seed=seed,
            group=group,
        )
        self.sampling = sampling or Sampling()
        self.execution = execution or Execution()
        self.offload = offload
        self.on_nonfinite = on_nonfinite
        self.contexts = SavedContexts(margin)
        self.computed_by: str | None = None  # kernels, products, tile: they decide the last bits
        self.resumed_from: str | None = None  # the same, of a checkpoint
        self._warned_of_positives = False

    @property
    def step(self) -> int:
        """The steps so far, which key sampling and rounding."""
        return self.contexts.step

    @step.setter
    def step(self, step: int) -> None:
        self.contexts.step = step

    def _loss_of(
        self, batch: GlobalBatch, embeddings: Tensor, labels: Tensor, with_accuracy: bool
    ) -> HeadOutput:
        """Return the mean loss of the global batch; the accuracy is over the classes that take part.

        Raises DataError, on every rank alike, for embeddings that are not finite, unless `on_nonfinite` is
        'pass'.
        """
        has_gradient = torch.is_grad_enabled()
        wants_gradient = has_gradient and embeddings.requires_grad
        products = self._products(embeddings.device.type)
        with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
            mean_loss, finite, context, gradient = self._forward(batch, products, wants_gradient)
            accuracy = self._accuracy(context, batch, products) if with_accuracy else None
        loss = mean_loss
        if has_gradient:
            # The parameters are inputs so that backward() reaches them too, when they want gradients.
            loss = HeadLoss.apply(embeddings, self.weight, self.bias, self, mean_loss, context, gradient)
        return HeadOutput(loss, mean_loss, len(batch.labels), accuracy, None, finite)

    def extra_repr(self) -> str:
        """Say which classes are here."""
        start, stop = self.class_range
        return f"classes {start}..{stop} of {self.class_num}, {self.weight.dtype}, {self.sampling}"

    def get_extra_state(self) -> Tensor:
        """Return the count of steps, which keys sampling and rounding, and which classes these are."""
        return torch.tensor([self.step, self.class_num, *self.class_range])

    def set_extra_state(self, state: Tensor) -> None:
        """Take the count of steps of a saved head. Raises CheckpointError if it had other classes."""
        theirs, mine = state.tolist()[1:], [self.class_num, *self.class_range]
        if theirs != mine:
            raise CheckpointError(
                f"the state is of classes {theirs[1]}..{theirs[2]} of {theirs[0]}, this head has "
                f"{mine[1]}..{mine[2]} of {mine[0]}; each rank loads the file that it saved"
            )
        self.step = int(state[0])

    def all_rows(self) -> Rows:
        """Return all rows of this rank, as a backend sees them."""
        return Rows(
            weight=self.weight.detach().view(-1, self.weight.shape[-1]),
            bias=None if self.bias is None else self.bias.detach(),
            centers=self.centers,
            cosine=self.margin.is_cosine,
            first_row=self.class_range[0] * self.centers,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Move to a device or type, but for rows that are to stay in CPU memory."""
        if not self.offload:
            return super()._apply(fn, recurse)
        self.margin._apply(fn, recurse)
        return self

    def _products(self, device: str) -> torch.dtype:
        if torch.is_autocast_enabled(device):
            return torch.bfloat16  # also for float16: shifted exponentials need its range
        assert isinstance(self.execution.products, torch.dtype)  # see its __post_init__
        return self.execution.products

    def _forward(
        self, batch: GlobalBatch, products: torch.dtype, wants_gradient: bool
    ) -> tuple[Tensor, Tensor, ForwardContext, EmbeddingGradient | None]:
        """Return the mean loss, whether all embeddings are finite, and what backward() needs."""
        compute = torch.float64 if self.weight.dtype is torch.float64 else torch.float32
        x = batch.embeddings.to(compute).contiguous()
        unit, length = normalised(x) if self.margin.is_cosine else (x, norms(x))
        self._check_finite(length, batch)
        backend = self._backend(x, products)
        every = self.all_rows()
        classes = self._classes_in_play(every, unit, batch.labels, backend.tile)
        if self.training:
            self.contexts.begin()
        target = self._find_target(unit, length, batch.labels, every, classes)
        home = every if classes is None else every.of_classes(classes)
        rows = fetch(home, x.device) if self.offload else home
        with span("logits"):
            sums = backend.forward(
                rows,
                target.queries,
                fixed_shift=self._fixed_shift(),
                want_weighted=wants_gradient,
                keep=wants_gradient and len(rows) * len(x) * 2 <= self.execution.keep_bytes,
            )
        # [B] each: log of the sum over the other classes of all ranks; the label's logit; its slope in |x|.
        log_others, logit, radial = self._reduce(sums, target)
        log_total = torch.logaddexp(log_others, logit)
        others = (log_others - log_total).exp()  # 1 - P of the label, without cancelling
        losses, radial = self._losses(log_others - logit, others, radial, length)
        context = ForwardContext(
            backend=backend,
            rows=rows,
            home=home,
            queries=target.queries,
            log_total=log_total,
            target_row=target.row,
            target_coefficient=-others * target.slope,
            weight=torch.full_like(log_total, self.margin.scale / len(x)),
            shift=sums.shift,
            kept=sums.kept,
        )
        gradient = None
        if wants_gradient:
            gradient = self._send_gradient(batch, context, sums, target, length, radial)
        return losses.mean(), length.isfinite().all(), context, gradient

    def _find_target(
        self, unit: Tensor, length: Tensor, labels: Tensor, every: Rows, classes: Tensor | None
    ) -> _Target:
        """Return the logits of the labels, from their rows alone; a collective for `needs_all_cosines`.

        unit [B, D], length [B]: of the embeddings; labels [B]; every: all rows of this rank; classes:
        ascending, those in play (None: all). In training the margin observes the batch.
        """
        start, stop = self.class_range
        k, margin, weight = every.centers, self.margin, every.weight
        is_here = (labels >= start) & (labels < stop)
        samples = _look_up(is_here) if start < stop else labels.new_empty(0)
        is_mine = is_here[samples]
        local = (labels[samples] - start).where(is_mine, 0).to(weight.device)
        place = local if classes is None else torch.searchsorted(classes, local)
        w = weight.view(-1, k, weight.shape[1])[local].to(unit)
        if every.cosine:
            w, _ = normalised(w)
        c, winner = (w * unit[samples, None, :]).sum(dim=2).max(dim=1)
        w = w[torch.arange(len(w), device=w.device), winner]
        if every.bias is not None:
            c = c + every.bias[local].to(c)
        place = place.to(labels.device)

        def spread(values: Tensor, elsewhere: int = 0) -> Tensor:
            values = values.where(is_mine, elsewhere)
            if len(samples) == len(labels):
                return values
            return values.new_full(labels.shape, elsewhere).index_copy(0, samples, values)

        cosines = sum_over_ranks(spread(c), self.group) if margin.needs_all_cosines else None
        if self.training:
            margin.observe(cosines, length)
        hard = None if cosines is None else margin.hard(cosines)
        with torch.enable_grad():
            inputs = [c.requires_grad_(), length[samples].requires_grad_()]
            psi = margin.shared_target(*inputs)
            slopes = torch.autograd.grad(psi.sum(), inputs[: 1 + margin.uses_norm])
        return _Target(
            Queries(unit, spread(place, -1), margin.scale, *(hard or (None, None))),
            samples=samples,
            w=w,
            row=spread(place * k + winner, -1),
            logit=spread(psi.detach() * margin.scale),
            slope=spread(slopes[0]),
            radial=spread(slopes[1] * margin.scale) if margin.uses_norm else None,
        )

    def _losses(
        self, excess: Tensor, others: Tensor, radial: Tensor | None, length: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each sample and its slope in |x|, both [B], the margin's addition included.

        excess: log of the sum over the other classes, less the label's logit; others: 1 - P of the label;
        radial: the slope of the label's logit in |x|, or None.
        """
        losses = nn.functional.softplus(excess)
        slope = None if radial is None else -others * radial
        with torch.enable_grad():
            leaf = length.clone().requires_grad_()
            addition = self.margin.regulariser(leaf)
            if addition is not None:
                (more,) = torch.autograd.grad(addition.sum(), leaf)
                losses = losses + addition.detach()
                slope = more if slope is None else slope + more
        return losses, slope

    def _send_gradient(
        self,
        batch: GlobalBatch,
        context: ForwardContext,
        sums: Sums,
        target: _Target,
        length: Tensor,
        radial: Tensor | None,
    ) -> EmbeddingGradient:
        """Send this rank's part of dL / de [B, D] to the ranks that own the embeddings."""
        assert sums.weighted is not None
        partial = sums.weighted * (sums.shift - context.log_total).exp()[:, None]
        coefficients = context.target_coefficient[target.samples, None]
        partial.index_add_(0, target.samples, coefficients * target.w)
        partial *= self.margin.scale / len(length)
        mine = batch.mine
        return EmbeddingGradient(
            ScatteredSum(partial, batch.sizes, self.group),
            context.queries.unit[mine],
            length[mine] if self.margin.is_cosine else None,
            None if radial is None else radial[mine] / len(length),
        )

    def _backend(self, x: Tensor, products: torch.dtype) -> TorchBackend:
        """Return what computes on this device; warn if a checkpoint was computed by something else."""
        how = self.execution
        backend = choose_backend(how.kernels, x.device, self.weight.dtype, products, how.tile, len(x))
        before, self.computed_by = self.computed_by, str(backend)
        if before not in (None, self.computed_by) and before == self.resumed_from:
            warnings.warn(
                f"the checkpoint was computed by {before}, this run by {self.computed_by}: its results will "
                "differ in the last bits from an uninterrupted run's",
                stacklevel=7,  # who called the head
            )
        return backend

    def _classes_in_play(self, every: Rows, unit: Tensor, labels: Tensor, tile: int) -> Tensor | None:
        """Return the local classes that take part, ascending; None: all."""
        start, stop = self.class_range
        if self.sampling.ratio == 1 or not self.training or start == stop:
            return None
        device = every.weight.device
        positives = (labels[(labels >= start) & (labels < stop)] - start).to(device)
        count = math.ceil((stop - start) * self.sampling.ratio)
        rank = 0 if self.group is None else self.group.rank()
        key = hash_key(self.seed, self.step, len(self.contexts), rank)
        near = None
        if self.sampling.hard:
            wanted = min(int(count * self.sampling.hard), max(0, count - len(positives.unique())))
            near = nearest_classes(every, Queries(unit.to(device), positives), wanted, tile, key)
        classes = draw_classes(positives, stop - start, count, key, near)
        if len(classes) > count and not self._warned_of_positives:
            self._warned_of_positives = True
            warnings.warn(
                f"the batch has {len(classes)} classes of this rank, more than the {count} that the "
                f"sample ratio {self.sampling.ratio:g} asks for; all of them take part",
                stacklevel=7,  # who called the head
            )
        return classes

    def _reduce(self, sums: Sums, target: _Target) -> tuple[Tensor, Tensor, Tensor | None]:
        """Make the sums of all ranks whole: one collective of two or three numbers per sample."""
        parts = [target.logit] + ([] if target.radial is None else [target.radial])
        shift = self._fixed_shift()
        if shift is not None:
            whole = sum_over_ranks(torch.stack([sums.total, *parts]), self.group)
            log_others, parts = shift + whole[0].log(), list(whole[1:])
        else:
            mine = torch.stack([sums.shift + sums.total.log(), *parts])
            ranks = 1 if self.group is None else self.group.size()
            every = gather_rows(mine[None], [1] * ranks, self.group)
            log_others, parts = every[:, 0].logsumexp(dim=0), list(every[:, 1:].sum(dim=0))
        return log_others, parts[0], None if target.radial is None else parts[1]

    def _fixed_shift(self) -> float | None:
        """Return K = z_max + ln C - 85 if exp(z - K) then neither over- nor underflows in float32.

        That holds as long as z_max - z_min + ln C <= 170. None: there is no bound, or it is too far.
        """
        highest, lowest = self.margin.highest(), self.margin.lowest_other()
        classes = math.log(self.class_num)
        if highest is None or lowest is None or self.class_num < 2:
            return None
        if highest - lowest + classes > 2 * _HIGHEST_EXPONENT:
            return None
        return highest + classes - _HIGHEST_EXPONENT

    def _check_finite(self, length: Tensor, batch: GlobalBatch) -> None:
        if self.on_nonfinite == "pass":
            return
        wrong = ~length.isfinite()
        if bool(wrong.any()):
            position = int(wrong.nonzero()[0])
            raise DataError(
                f"{int(wrong.sum())} embeddings of the global batch of {len(length)} are not finite, the "
                f"first at position {position} (label {int(batch.labels[position])}); lower the learning "
                "rate, or look at that image"
            )

    def _accuracy(self, context: ForwardContext, batch: GlobalBatch, products: torch.dtype) -> Tensor:
        """Return the share of samples whose best class over all shards is the label's."""
        value, place = TorchBackend(products, context.backend.tile).best(context.rows, context.queries)
        index = torch.full_like(batch.labels, self.class_num)
        if len(context.rows):
            selected = context.rows.selected
            local = place if selected is None else selected[place * self.centers] // self.centers
            index = local + self.class_range[0]
        best = max_over_ranks(value.clone(), self.group)
        # Of classes that tie, the lowest wins: a collapsed network must not count as right everywhere.
        candidate = torch.where(value == best, index, self.class_num)
        winner = -max_over_ranks(-candidate, self.group)
        return (winner == batch.labels).float().mean()
