"""The interface of all heads, the classes with the highest logits, and the replicated (dense) head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from plsc.errors import DataError, OptionError
from plsc.heads.kernels import choose_backend
from plsc.heads.margins import Margin
from plsc.heads.softmax import Execution, Normalise, Queries, TorchBackend, normalised, norms
from plsc.heads.weights import ROW_DTYPES, RowFile, Rows, initial_rows, read_dtype, scale_bytes
from plsc.parallel.world import (
    class_range,
    gather_rows,
    gather_sizes,
    send_rows,
    sum_over_ranks,
    to_device,
)


@dataclass
class HeadOutput:
    """The result of a head's forward pass.

    Attributes:
        loss: scalar to call backward() on. It gives this rank's embeddings the gradient of the mean loss of
            the global batch, so SUM (do not average) the gradients of a replicated backbone over the ranks.
        mean_loss: mean loss of the global batch, a detached scalar, identical on all ranks.
        batch: number of samples in the global batch.
        accuracy: fraction of the global batch whose label has the highest logit without margin; None if
            not requested.
        accuracy_top5: fraction whose label has one of the five highest logits without margin, or None.
        finite: bool scalar, whether all embeddings of the global batch are finite.
    """

    loss: Tensor
    mean_loss: Tensor
    batch: int
    accuracy: Tensor | None
    finite: Tensor
    accuracy_top5: Tensor | None = None


class Head(nn.Module):
    """Base class of the heads: parameters `weight` [C_local, D] and, without normalisation, `bias` [C_local].

    Args:
        class_num: total number of classes C.
        emb_size: embedding size D.
        margin: how the logit of the label is computed (plsc.heads.margins).
        centers: sub-centres per class, K. With K > 1 `weight` is [C_local, K, D].
        row_dtype: dtype of `weight`.
        file: where the class weights are; `weight` then has no memory. None: in memory.
        seed: of the initial weights, which do not depend on the number of ranks.
        group: the ranks that share the global batch; None: one process.

    Attributes:
        class_range: ``(start, stop)``, the classes whose weights this rank holds.
        execution: how the head computes.
    """

    is_sharded: bool
    execution = Execution()
    # (batch, embeddings, labels, with_accuracy); batch: of all ranks, the tensors: of this one.
    _loss_of: Callable[[GlobalBatch, Tensor, Tensor, bool], HeadOutput]

    def __init__(
        self,
        class_num: int,
        emb_size: int,
        margin: Margin,
        *,
        centers: int = 1,
        row_dtype: str | torch.dtype = torch.float32,
        file: RowFile | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        row_dtype = read_dtype("row_dtype", row_dtype, ROW_DTYPES)
        if centers > 1 and not margin.is_cosine:
            raise OptionError(f"{margin.name} does not support sub-centres (centers is {centers})")
        self.class_num = class_num
        self.emb_size = emb_size
        self.class_range = (0, class_num)
        if self.is_sharded and group is not None:
            self.class_range = class_range(class_num, group.rank(), group.size())
        margin.set_class_num(class_num)
        margin.keep_classes(class_num, *self.class_range, torch.promote_types(row_dtype, torch.float32))
        self.margin = margin.double() if row_dtype is torch.float64 else margin
        self.seed = seed
        self.group = group
        self.centers = centers
        start, stop = self.class_range
        width = emb_size + scale_bytes(row_dtype)
        shape = (stop - start, width) if centers == 1 else (stop - start, centers, width)
        self.file = file
        if file is not None and start < stop:
            rows = torch.empty(shape, dtype=row_dtype, device="meta")
        else:
            rows = initial_rows(seed, start * centers, stop * centers, emb_size, row_dtype)
        self.weight = nn.Parameter(rows.view(shape), requires_grad=row_dtype is not torch.int8)
        bias_dtype = torch.float64 if row_dtype is torch.float64 else torch.float32
        self.bias = None if margin.is_cosine else nn.Parameter(torch.zeros(stop - start, dtype=bias_dtype))

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        with_accuracy: bool = False,
        sizes: list[int] | None = None,
        all_labels: Tensor | None = None,
    ) -> HeadOutput:
        """Return the loss of the global batch; a collective, so every rank must call it.

        Args:
            embeddings: [b, D], floating point; b may differ between ranks.
            labels: int64 [b], in 0..C-1; also an array or a list.
            with_accuracy: compute `HeadOutput.accuracy` and `accuracy_top5`.
            sizes: b of every rank, if the caller knows it and has checked the labels; this avoids a
                synchronisation with the GPU.
            all_labels: with `sizes`, the labels of the global batch [B] on the CPU, if the caller knows them;
                class sampling then needs no synchronisation either.

        Raises:
            DataError: a label is out of range; raised on every rank.
        """
        labels = check_batch(embeddings, labels, self.emb_size)
        batch = gather_batch(embeddings.detach(), labels, self.class_num, self.group, sizes, all_labels)
        return self._loss_of(batch, embeddings, labels, with_accuracy)

    @torch.no_grad()
    def topk(self, embeddings: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k classes with the highest logits without margin, highest first; a collective.

        Args:
            embeddings: [b, D], floating point; b may differ between ranks.
            k: number of classes, at most C are returned.

        Returns:
            Logits [b, k]: the scale times the cosine (of the nearest sub-centre), or for plain softmax the
            product plus the bias. Classes, int64 [b, k]; of equal logits, the lowest class comes first.
        """
        k = min(k, self.class_num)
        with torch.autocast(embeddings.device.type, enabled=False):
            backend, queries, sizes, group = self._search(embeddings)
            return top_of_ranks(top_of_rows(backend, self.all_rows(), queries, k), sizes, group)

    @torch.no_grad()
    def classify(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class with the highest logit without margin and its softmax probability; a collective.

        Args:
            embeddings: [b, D], floating point; b may differ between ranks.

        Returns:
            Classes, int64 [b], and probabilities [b], by the softmax of these logits over all classes.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            backend, queries, sizes, group = self._search(embeddings)
            logits, classes = top_of_ranks(top_of_rows(backend, self.all_rows(), queries, 1), sizes, group)
            sums = backend.forward(self.all_rows(), queries, fixed_shift=None, want_weighted=False)
            log_sums = send_rows(sums.shift + sums.total.log(), sizes, group).logsumexp(dim=0)
            return classes[:, 0], (logits[:, 0] - log_sums).exp().clamp(max=1)  # above 1 only by rounding

    def _search(
        self, embeddings: Tensor
    ) -> tuple[TorchBackend, Queries, list[int], dist.ProcessGroup | None]:
        """Return the backend, the queries of all ranks, their batch sizes and the group; a collective."""
        check_embeddings(embeddings, self.emb_size)
        group, device = self.group if self.is_sharded else None, embeddings.device
        sizes = gather_sizes(len(embeddings), device, group)
        compute = torch.float64 if self.weight.dtype is torch.float64 else torch.float32
        x = gather_rows(embeddings.detach().to(compute), sizes, group)
        queries = Queries(
            normalised(x)[0] if self.margin.is_cosine else x,
            target=torch.full((len(x),), -1, device=device),
            scale=self.margin.scale,
        )
        # Weights in CPU memory or a file are copied tile by tile, which only PyTorch does.
        kernels = self.execution.kernels if self.weight.is_cuda else "torch"
        how = (device, self.weight.dtype, torch.float32, self.execution.tile)
        backend = choose_backend(kernels, *how, *x.shape)
        return backend, queries, sizes, group

    def all_rows(self) -> Rows:
        """Return all class weights of this rank as `Rows`, without a copy."""
        return Rows(
            weight=self.weight.detach().view(-1, self.weight.shape[-1]),
            bias=None if self.bias is None else self.bias.detach(),
            centers=self.centers,
            cosine=self.margin.is_cosine,
            first_row=self.class_range[0] * self.centers,
            file=self.file,
        )

    def statistics(self) -> dict[str, Tensor]:
        """Return the buffers that belong in a checkpoint, by name: running statistics of the margin."""
        saved = self.state_dict()
        return {name: buffer for name, buffer in self.margin.named_buffers("margin") if name in saved}

    def sync_gradients(self) -> None:
        """Complete the gradients of the parameters after backward(); a collective."""


def join_outputs(parts: list[HeadOutput]) -> HeadOutput:
    """Combine the outputs of the micro-batches of one step; the resulting loss is detached."""
    sizes = [part.batch for part in parts]
    mean_loss = weighted_mean([part.mean_loss for part in parts], sizes)
    return replace(
        parts[-1],
        loss=mean_loss,
        mean_loss=mean_loss,
        batch=sum(sizes),
        accuracy=mean_of_known([part.accuracy for part in parts], sizes),
        accuracy_top5=mean_of_known([part.accuracy_top5 for part in parts], sizes),
        finite=torch.stack([part.finite for part in parts]).all(),
    )


def weighted_mean(values: list[Tensor], weights: Sequence[int]) -> Tensor:
    """Return the weighted mean of scalars; 0 if all weights are 0."""
    total = max(1, sum(weights))
    return torch.stack([v * (w / total) for v, w in zip(values, weights, strict=True)]).sum()


def mean_of_known(values: list[Tensor | None], weights: Sequence[int]) -> Tensor | None:
    """Return `weighted_mean`, or None if a value is None."""
    known = [value for value in values if value is not None]
    return weighted_mean(known, weights) if len(known) == len(values) else None


@dataclass
class GlobalBatch:
    """The batches of all ranks in rank order: embeddings [B, D] and labels [B].

    sizes: batch size of each rank. mine: the samples of this rank.
    """

    embeddings: Tensor
    labels: Tensor
    sizes: list[int]
    mine: slice
    known_labels: Tensor | None = None

    @functools.cached_property
    def labels_on_host(self) -> Tensor:
        """The labels on the CPU; waits for the device unless the caller knew them."""
        return self.labels.cpu() if self.known_labels is None else self.known_labels


def check_batch(embeddings: Tensor, labels: Any, emb_size: int) -> Tensor:
    """Return labels, also of a list or an array, as int64 [b]. Raises DataError, also for embeddings."""
    check_embeddings(embeddings, emb_size)
    labels = torch.as_tensor(labels, device=None if isinstance(labels, Tensor) else embeddings.device)
    is_index = not (labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool)
    labels = labels.long() if is_index else labels
    if labels.dtype is not torch.int64 or labels.shape != embeddings.shape[:1]:
        raise DataError(
            f"the labels are {labels.dtype} {list(labels.shape)}; expected int64 [{len(embeddings)}], one "
            "class index per sample"
        )
    return labels


def check_embeddings(embeddings: Tensor, emb_size: int) -> None:
    """Raise DataError unless embeddings are floating point [b, D]."""
    if embeddings.ndim != 2 or embeddings.shape[1] != emb_size or not embeddings.is_floating_point():
        raise DataError(
            f"the embeddings are {embeddings.dtype} {list(embeddings.shape)}; expected floating point "
            f"[b, {emb_size}]"
        )


def gather_batch(
    embeddings: Tensor,
    labels: Tensor,
    class_num: int,
    group: dist.ProcessGroup | None,
    sizes: list[int] | None = None,
    all_labels: Tensor | None = None,
) -> GlobalBatch:
    """Gather the batches of all ranks and check the labels; every rank raises the same error.

    sizes: batch size of every rank, if known and the labels are already checked. all_labels: the labels of
    the global batch on the CPU, if they are known, too.
    """
    known = all_labels if sizes is not None else None
    is_checked = sizes is not None
    if sizes is None:
        sizes = gather_sizes(len(embeddings), embeddings.device, group)
    if sum(sizes) == 0:
        raise DataError(
            "the global batch is empty: no rank has a sample; see the warnings above if its images were bad"
        )
    all_labels = gather_rows(labels, sizes, group) if known is None else to_device(known, labels.device)
    if not is_checked and bool((outside := (all_labels < 0) | (all_labels >= class_num)).any()):
        position = int(outside.nonzero()[0])
        raise DataError(
            f"label {int(all_labels[position])} at position {position} of the global batch is outside "
            f"0..{class_num - 1}; fix the label or increase the number of classes (head.class_num)"
        )
    rank = 0 if group is None else group.rank()
    first = sum(sizes[:rank])
    mine = slice(first, first + sizes[rank])
    return GlobalBatch(gather_rows(embeddings, sizes, group), all_labels, sizes, mine, known)


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


class DenseHead(Head):
    """Replicated head: every rank holds the weights of all C classes; arguments as in `Head`.

    It computes the full logit matrix [b, C] with autograd, as plain PyTorch code does. Tests and benchmarks
    compare the sharded head with it.
    """

    is_sharded = False

    def _loss_of(
        self, batch: GlobalBatch, embeddings: Tensor, labels: Tensor, with_accuracy: bool
    ) -> HeadOutput:
        """Return the output; its `loss` is the sum of the local losses over the GLOBAL batch size."""
        total = len(batch.labels)
        norm = norms(embeddings)
        plain = self._plain_logits(embeddings).to(norm)  # of lower precision under autocast
        scale = self.margin.scale
        c = plain.gather(1, labels[:, None])[:, 0] / scale
        cosines = None
        if self.margin.needs_all_cosines:
            cosines = gather_rows(c.detach(), batch.sizes, self.group)
        lengths = norms(batch.embeddings)
        if self.margin.class_margins is not None:
            self.margin.margin = self.margin.class_margins[labels]
        if self.training:
            self.margin.observe(cosines, lengths)
            if self.margin.scale != scale:
                plain = plain * (self.margin.scale / scale)
        logits = plain
        if cosines is not None:
            hard = self.margin.hard(c.detach())
            if hard is not None:
                other = plain / self.margin.scale
                raised = plain * (hard[1] + other)
                logits = torch.where(other > hard[0][:, None], raised, plain)
        target = self.margin.shared_target(c, norm) * self.margin.scale
        logits = logits.scatter(1, labels[:, None], target[:, None])
        loss = F.cross_entropy(logits, labels, reduction="sum") / total
        addition = self.margin.regulariser(norm)
        if addition is not None:
            loss = loss + addition.sum() / total
        hits = loss.new_zeros(2)
        if with_accuracy:
            hits = count_hits(top_of_logits(plain.detach(), REPORTED)[1], labels).to(loss)
        measured = sum_over_ranks(torch.stack([loss.detach(), *hits]), self.group)
        return HeadOutput(
            loss=loss,
            mean_loss=measured[0],
            batch=total,
            accuracy=measured[1] / total if with_accuracy else None,
            finite=lengths.isfinite().all(),
            accuracy_top5=measured[2] / total if with_accuracy else None,
        )

    def sync_gradients(self) -> None:
        """Sum the gradients of the class weights over the ranks."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                sum_over_ranks(parameter.grad, self.group)

    def _plain_logits(self, embeddings: Tensor) -> Tensor:
        """Return the logits without margin [b, C], each of the nearest sub-centre."""
        if not self.margin.is_cosine:
            return F.linear(embeddings, self.weight, self.bias)
        rows = self.weight.flatten(0, -2)
        c = F.linear(Normalise.apply(embeddings), Normalise.apply(rows))
        return c.view(len(c), self.class_num, self.centers).amax(dim=2) * self.margin.scale
