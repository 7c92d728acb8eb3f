"""The sharded head: each rank holds the weights of its own classes only; and the choice of a head.

1. The ranks gather embeddings and labels (B x D values).
2. Each rank computes the logits of its own classes for the global batch, tile by tile (softmax.py).
3. The ranks reduce two or three values per sample to get the softmax over all classes.

Communication does not grow with the number of classes, and no matrix [B, classes] is allocated.

The forward pass already computes the gradient of the embeddings. The optimizer's step (optimizers.py) reads
the class weights a second time and updates them tile by tile: it never allocates the gradient of all of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plsc.errors import CheckpointError, DataError, OptionError, suggest
from plsc.heads.base import (
    REPORTED,
    DenseHead,
    GlobalBatch,
    Head,
    HeadOutput,
    count_hits,
    top_of_ranks,
    top_of_rows,
)
from plsc.heads.kernels import choose_backend
from plsc.heads.margins import MARGINS, Margin, build_margin
from plsc.heads.sampling import (
    KEPT_BYTES,
    Neighbours,
    classes_of,
    draw_classes,
    draw_pages,
    merge,
    nearest,
)
from plsc.heads.softmax import (
    EmbeddingGradient,
    Execution,
    ForwardContext,
    HeadLoss,
    Queries,
    SavedContexts,
    Sums,
    TorchBackend,
    normalised,
    norms,
)
from plsc.heads.weights import ROW_DTYPES, RowFile, Rows, copy_to_device, read_dtype
from plsc.parallel.world import ScatteredSum, gather_together, span, sum_over_ranks, to_device
from plsc.seeds import hash_key

LOSS_TYPES = tuple(f"dist_{name}" for name in MARGINS) + tuple(MARGINS)

_HIGHEST_EXPONENT = 85.0  # e^85 is near the largest float32 and bfloat16


def build_head(
    loss_type: str, class_num: int, emb_size: int, *, margin: Margin | None = None, **settings: Any
) -> Head:
    """Return the head for a loss type: ``dist_<margin>`` (sharded) or ``<margin>`` (replicated).

    Args:
        loss_type: one of LOSS_TYPES.
        class_num: total number of classes C.
        emb_size: embedding size D.
        margin: used instead of that of the loss type; None: that one, with its default settings.
        settings: the other arguments of `ShardedHead`. A replicated head supports only centers, row_dtype
            (float32 or float64), seed and group.

    Raises:
        OptionError: unknown loss type, or an option that this head does not support.
    """
    if loss_type not in LOSS_TYPES:
        raise OptionError(f"unknown loss type {loss_type!r}; {suggest(loss_type, LOSS_TYPES)}")
    margin = build_margin(loss_type.removeprefix("dist_")) if margin is None else margin
    if loss_type.startswith("dist_"):
        return ShardedHead(class_num, emb_size, margin, **settings)
    sampling, offload = settings.pop("sampling", None), settings.pop("offload", False)
    row_dtype = read_dtype("row_dtype", settings.pop("row_dtype", torch.float32), ROW_DTYPES)
    if (sampling is not None and sampling.is_partial) or offload or row_dtype in (torch.bfloat16, torch.int8):
        raise OptionError(
            f"{loss_type} is a replicated head, which does not support sampling, offload, bfloat16 or int8 "
            f"class weights; use dist_{loss_type}"
        )
    for unused in ("execution", "on_nonfinite", "file"):  # how a sharded head computes
        settings.pop(unused, None)
    return DenseHead(class_num, emb_size, margin, row_dtype=row_dtype, **settings)


@dataclass(frozen=True)
class Sampling:
    """Settings of class sampling (sampling.py).

    ratio: fraction of the classes used in each step, in (0, 1]; or fractions by the step from which each is
    used, such as {0: 1.0, 2000: 0.1}. hard: largest fraction of the sampled classes that are hard negatives,
    in [0, 1); the others are drawn uniformly. in_pages: draw whole pages of 32 consecutive classes, as class
    weights in a file need; the classes of the batch are used in addition.
    """

    ratio: float | Mapping[int, float] = 1.0
    hard: float = 0.0
    in_pages: bool = False

    def __post_init__(self) -> None:
        if min(self._ratios) != 0 or not all(0 < ratio <= 1 for ratio in self._ratios.values()):
            raise OptionError(
                f"the sample ratio is {self.ratio}; expected a fraction in (0, 1], or several by their first "
                "step, which starts at 0"
            )
        if not 0 <= self.hard < 1 or (self.hard and (self.in_pages or not self.is_partial)):
            raise OptionError(
                f"the hard fraction of the sample is {self.hard}; expected a number in [0, 1), and 0 if all "
                "classes are used or classes are drawn in pages"
            )

    @property
    def _ratios(self) -> Mapping[int, float]:
        return self.ratio if isinstance(self.ratio, Mapping) else {0: self.ratio}

    @property
    def is_partial(self) -> bool:
        """Whether there is a step that uses only a part of the classes."""
        return min(self._ratios.values()) < 1

    def ratio_at(self, step: int) -> float:
        """Return the fraction of the classes that a step uses; steps count from 0."""
        return self._ratios[max(first for first in self._ratios if first <= step)]


@dataclass
class _Target:
    """This rank's part of the labels' logits.

    Attributes:
        queries: the global batch, with the positions of the labels.
        samples: int64 [T], from `_local_samples`.
        w: [T, D], class weights of each of these samples' label (of its nearest sub-centre), normalised if
            the margin is a cosine margin.
        row: int64 [B], index of these class weights among the selected rows, -1 if on another rank.
        logit: [B], with margin and scale. Like slope and radial, 0 if the class is on another rank.
        slope: [B], dpsi / dc.
        radial: [B], d logit / d|x|, or None.
    """

    queries: Queries
    samples: Tensor
    w: Tensor
    row: Tensor
    logit: Tensor
    slope: Tensor
    radial: Tensor | None


def _local_samples(is_local: Tensor) -> Tensor:
    """Return the samples whose class is on this rank, int64 [T]; on a GPU all samples, without a sync."""
    if is_local.is_cuda:
        return torch.arange(len(is_local), device=is_local.device)
    return is_local.nonzero()[:, 0]


class ShardedHead(Head):
    """Softmax over C classes whose weights are sharded over the ranks of `group` (None: one process).

    Args:
        class_num: total number of classes C.
        emb_size: embedding size D.
        margin: from plsc.heads.margins.
        centers: sub-centres per class, K (Deng et al. 2020); the nearest one counts. `weight` is
            [C_local, D], or [C_local, K, D] if K > 1.
        sampling: class sampling (PartialFC); None: all classes.
        execution: how to compute; None: `Execution()`.
        row_dtype: dtype of the class weights: float32, bfloat16, int8 with a scale per class (both with
            stochastic rounding) or float64. int8 needs a row optimizer.
        offload: keep the class weights in CPU memory and copy those of a step to the device.
        file: where int8 class weights and their optimizer states are, such as
            plsc.checkpoint.weights_file.WeightsFile; those of a step are copied to the device. Needs a
            sampling in pages and a row optimizer.
        on_nonfinite: "raise", or "pass" if the training loop checks the loss itself.
        seed: of initial weights, sampling and stochastic rounding.
        group: the ranks that share classes and global batch.

    Margin warm-up: set `head.margin.share` before each step, from 0 (no margin) to 1 (full margin).

    Without a row optimizer (such as plsc.heads.RowSGD) backward() stores the gradient of all class weights in
    `weight.grad`, for any torch optimizer. With one, `weight.grad` stays None and `optimizer.step()` updates
    the class weights. Do not wrap the head in DDP, FSDP, torch.compile or torch.utils.checkpoint.
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
        offload: bool = False,
        file: RowFile | None = None,
        on_nonfinite: str = "raise",
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if on_nonfinite not in ("raise", "pass"):
            raise OptionError(f"on_nonfinite is {on_nonfinite!r}; expected 'raise' or 'pass'")
        if group is None and dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(
                f"this head has no process group, so each of the {dist.get_world_size()} ranks trains all "
                "classes on its own batches; pass group=dist.new_group() to shard the classes",
                stacklevel=2,
            )
        super().__init__(
            class_num,
            emb_size,
            margin,
            centers=centers,
            row_dtype=row_dtype,
            file=file,
            seed=seed,
            group=group,
        )
        self.sampling = sampling or Sampling()
        is_coded = self.weight.dtype is torch.int8
        if file is not None and not (is_coded and self.sampling.in_pages and centers == 1):
            raise OptionError(
                f"class weights in a file are {self.weight.dtype} with {self.sampling} and {centers} "
                "sub-centres; expected int8, a sampling with in_pages=True, and no sub-centres"
            )
        self.neighbours = Neighbours(range(*self.class_range), group) if self.sampling.hard else None
        self.execution = execution or Execution()
        self.offload = offload
        self.on_nonfinite = on_nonfinite
        self.contexts = SavedContexts(margin)
        self.computed_by: str | None = None  # the backend with its settings, which determine the last bits
        self.resumed_from: str | None = None  # the same, from the checkpoint

    @property
    def step(self) -> int:
        """The number of steps so far; seeds sampling and stochastic rounding."""
        return self.contexts.step

    @step.setter
    def step(self, step: int) -> None:
        self.contexts.step = step

    def _loss_of(
        self, batch: GlobalBatch, embeddings: Tensor, labels: Tensor, with_accuracy: bool
    ) -> HeadOutput:
        """Return the output for the global batch; the accuracies are over the sampled classes.

        Raises DataError on every rank for non-finite embeddings, unless `on_nonfinite` is 'pass'.
        """
        has_gradient = torch.is_grad_enabled()
        wants_gradient = has_gradient and embeddings.requires_grad
        products = self._products(embeddings.device.type)
        accuracy = top5 = None
        with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
            mean_loss, finite, context, gradient = self._forward(batch, products, wants_gradient)
            if with_accuracy:
                accuracy, top5 = self._accuracies(context, batch)
        loss = mean_loss
        if has_gradient:
            # The parameters are inputs so that backward() can return their gradients.
            weight: Tensor = self.weight
            if weight.dtype is torch.int8:  # has no gradient, but backward() must be called
                weight = mean_loss.new_zeros((), requires_grad=True)
            loss = HeadLoss.apply(embeddings, weight, self.bias, self, mean_loss, context, gradient)
        return HeadOutput(loss, mean_loss, len(batch.labels), accuracy, finite, top5)

    def get_extra_state(self) -> Tensor:
        """Return the number of steps and the class range, for the state dict."""
        return torch.tensor([self.step, self.class_num, *self.class_range])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the number of steps. Raises CheckpointError if the saved head had other classes."""
        saved, expected = state.tolist()[1:], [self.class_num, *self.class_range]
        if saved != expected:
            raise CheckpointError(
                f"the state is of classes {saved[1]}..{saved[2]} of {saved[0]}; this head has classes "
                f"{expected[1]}..{expected[2]} of {expected[0]}: each rank must load the file that it saved"
            )
        self.step = int(state[0])

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Move to a device or dtype, except offloaded class weights and those in a file."""
        if not self.offload and self.file is None:
            return super()._apply(fn, recurse)
        self.margin._apply(fn, recurse)
        return self

    def _products(self, device: str) -> torch.dtype:
        if torch.is_autocast_enabled(device):
            return torch.bfloat16  # also under float16 autocast: the shifted exponentials need its range
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
        all_rows = self.all_rows()
        listed = None
        if self.neighbours is not None and self._is_sampled:
            listed = self.neighbours.of_labels(batch.labels_on_host, x.device)
        classes = None
        if self._is_sampled:
            classes = self._select_classes(all_rows, batch.labels_on_host, listed)
        stored = all_rows if classes is None else all_rows.of_classes(classes)
        is_elsewhere = self.offload or (self.file is not None and classes is not None)
        rows = copy_to_device(stored, x.device) if is_elsewhere else stored
        if self.training:
            # Before _find_target, where the margin updates the statistics that a skipped step restores.
            self.contexts.begin()
        chosen = None if classes is None else to_device(classes, rows.device)
        target = self._find_target(unit, length, batch.labels, rows, chosen)
        neighbours = self.neighbours if self.training else None
        keep_bytes = max(self.execution.keep_bytes, 0 if neighbours is None else KEPT_BYTES)
        with span("logits"):
            sums = backend.forward(
                rows,
                target.queries,
                fixed_shift=self._fixed_shift(),
                want_weighted=wants_gradient,
                keep=wants_gradient and len(rows) * len(x) * 2 <= keep_bytes,
            )
        near = None
        if neighbours is not None:
            near = nearest(
                rows,
                len(x),
                lambda tile: backend.scores(rows, target.queries, sums.kept, tile),
                backend.tile,
                x.device,
            )
        # [B] each: log of the sum over all other classes; the label's logit; its derivative w.r.t. |x|.
        log_others, logit, radial, near = self._reduce(sums, target, near)
        log_total = torch.logaddexp(log_others, logit)
        others = (log_others - log_total).exp()  # 1 - P(label), without cancellation
        losses, radial = self._losses(log_others - logit, others, radial, length)
        context = ForwardContext(
            backend=backend,
            rows=rows,
            stored=stored,
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
            gradient = self._scatter_gradient(batch, context, sums, target, length, radial)
        if neighbours is not None and near is not None:
            neighbours.update(batch.labels_on_host, merge(*near, batch.labels), self.step)
        return losses.mean(), length.isfinite().all(), context, gradient

    @property
    def reads_labels(self) -> bool:
        """Whether a step may read the labels of the global batch on the CPU."""
        return self.sampling.is_partial

    @property
    def _is_sampled(self) -> bool:
        """Whether this step uses a part of the classes."""
        return self.training and self.sampling.ratio_at(self.step) < 1

    def _find_target(
        self, unit: Tensor, length: Tensor, labels: Tensor, rows: Rows, classes: Tensor | None
    ) -> _Target:
        """Compute the logits of the labels from their class weights; a collective if `needs_all_cosines`.

        In training, the margin also updates its statistics.

        unit [B, D], length [B]: of the embeddings. labels: [B]. rows: the class weights. classes: the
        selected local classes, sorted; None: all.
        """
        start, stop = self.class_range
        k, margin, device = rows.centers, self.margin, rows.device
        is_local = (labels >= start) & (labels < stop)
        samples = _local_samples(is_local) if start < stop else labels.new_empty(0)
        is_mine = is_local[samples]
        local = (labels[samples] - start).where(is_mine, 0)
        margins = None if margin.class_margins is None else margin.class_margins[local]
        local = local.to(device)
        position = local if classes is None else torch.searchsorted(classes, local)
        place = position if rows.is_compact else local
        centers = (place[:, None] * k + torch.arange(k, device=device)).flatten()
        w = rows.values(centers).view(len(local), k, rows.dimension).to(unit)
        if rows.cosine:
            w, _ = normalised(w)
        c, winner = (w * unit[samples, None, :]).sum(dim=2).max(dim=1)
        w = w[torch.arange(len(w), device=w.device), winner]
        if rows.bias is not None:
            c = c + rows.bias[place].to(c)
        position = position.to(labels.device)

        def spread(values: Tensor, elsewhere: int = 0) -> Tensor:
            values = values.where(is_mine, elsewhere)
            if len(samples) == len(labels):
                return values
            return values.new_full(labels.shape, elsewhere).index_copy(0, samples, values)

        cosines = None
        if margin.needs_all_cosines:
            parts = [c] if margins is None else [c, margins]
            cosines, *others = sum_over_ranks(torch.stack([spread(part) for part in parts]), self.group)
            margin.margin = others[0] if others else margin.margin  # of the global batch, for `hard`
        if self.training:
            margin.observe(cosines, length)
        hard = None if cosines is None else margin.hard(cosines)
        if margins is not None:
            margin.margin = margins
        with torch.enable_grad():
            inputs = [c.requires_grad_(), length[samples].requires_grad_()]
            psi = margin.shared_target(*inputs)
            slopes = torch.autograd.grad(psi.sum(), inputs[: 1 + margin.uses_norm])
        return _Target(
            Queries(unit, spread(position, -1), margin.scale, *(hard or (None, None))),
            samples=samples,
            w=w,
            row=spread(position * k + winner, -1),
            logit=spread(psi.detach() * margin.scale),
            slope=spread(slopes[0]),
            radial=spread(slopes[1] * margin.scale) if margin.uses_norm else None,
        )

    def _losses(
        self, excess: Tensor, others: Tensor, radial: Tensor | None, length: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return each sample's loss and its derivative w.r.t. |x| (or None), both [B], with the regulariser.

        excess: log of the sum over the other classes, minus the label's logit. others: 1 - P(label).
        radial: derivative of the label's logit w.r.t. |x|, or None.
        """
        # -log P(label), without cancellation when P is near 1.
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

    def _scatter_gradient(
        self,
        batch: GlobalBatch,
        context: ForwardContext,
        sums: Sums,
        target: _Target,
        length: Tensor,
        radial: Tensor | None,
    ) -> EmbeddingGradient:
        """Start the reduce-scatter of this rank's part of dL / de [B, D] to the ranks of the embeddings."""
        assert sums.weighted is not None
        # The forward pass did not know the sum over all ranks yet.
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
        """Return the backend for this device; warn if the checkpoint was computed by another one."""
        how = self.execution
        # Only PyTorch can read class weights from a file while it computes.
        kernels = "torch" if self.file is not None and not self.training else how.kernels
        backend = choose_backend(kernels, x.device, self.weight.dtype, products, how.tile, *x.shape)
        before, self.computed_by = self.computed_by, str(backend)
        if before not in (None, self.computed_by) and before == self.resumed_from:
            warnings.warn(
                "the results will differ from those of an uninterrupted run in the last bits: the checkpoint "
                f"was computed by {before}, this run uses {self.computed_by}",
                stacklevel=7,  # the caller of the head
            )
        return backend

    def _select_classes(self, all_rows: Rows, labels: Tensor, listed: Tensor | None) -> Tensor | None:
        """Return the local classes of this step, sorted, on the CPU, where the labels are; None: all.

        listed: hard negatives of the labels.
        """
        start, stop = self.class_range
        if start == stop:
            return None
        positives = labels[(labels >= start) & (labels < stop)] - start
        count = math.ceil((stop - start) * self.sampling.ratio_at(self.step))
        rank = 0 if self.group is None else self.group.rank()
        # Each micro-batch and rank draws its own classes; nothing has to be saved to resume.
        key = hash_key(self.seed, self.step, len(self.contexts), rank)
        if self.sampling.in_pages:
            local = range(start, stop)
            classes = classes_of(draw_pages(local, count, key), local, positives)
            if self.file is not None:
                self.file.hold(classes, is_first=not self.contexts)
                if not self.contexts:
                    following = hash_key(self.seed, self.step + 1, 0, rank)
                    count = math.ceil((stop - start) * self.sampling.ratio_at(self.step + 1))
                    self.file.expect(draw_pages(local, count, following))
            return classes
        near = None
        if self.neighbours is not None and listed is not None:
            wanted = min(int(count * self.sampling.hard), max(0, count - len(positives.unique())))
            near = self.neighbours.near(listed.cpu(), labels, wanted)
        return draw_classes(positives, stop - start, count, key, near)  # more if the labels need more

    def _reduce(
        self, sums: Sums, target: _Target, near: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        """Reduce the sums over the ranks: one collective of two or three values per sample, and of `near`."""
        parts = [target.logit] + ([] if target.radial is None else [target.radial])
        shift = self._fixed_shift()
        # With one shift for all ranks, the exponentials can be added as they are.
        if shift is not None and near is None:
            reduced = sum_over_ranks(torch.stack([sums.total, *parts]), self.group)
            log_others, parts = shift + reduced[0].log(), list(reduced[1:])
        else:
            mine = torch.stack([sums.shift + sums.total.log(), *parts])
            gathered, *of_ranks = gather_together([mine, *(near or ())], self.group)
            log_others, parts = gathered[:, 0].logsumexp(dim=0), list(gathered[:, 1:].sum(dim=0))
            near = None if near is None else (of_ranks[0], of_ranks[1])
        return log_others, parts[0], None if target.radial is None else parts[1], near

    def _fixed_shift(self) -> float | None:
        """Return K = z_max + ln C - 85 if exp(z - K) neither overflows nor underflows in float32.

        That holds if z_max - z_min + ln C <= 170. None: the logits are unbounded, or the range is too large.
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
                "rate or check that image"
            )

    def _accuracies(self, context: ForwardContext, batch: GlobalBatch) -> tuple[Tensor, Tensor]:
        """Return the top-1 and top-5 accuracy of the global batch, over the sampled classes of all ranks."""
        top = top_of_rows(context.backend, context.rows, context.queries, REPORTED)
        _, classes = top_of_ranks(top, batch.sizes, self.group)
        hits = count_hits(classes, batch.labels[batch.mine]).float()
        first, any_of_five = sum_over_ranks(hits, self.group) / len(batch.labels)
        return first, any_of_five
