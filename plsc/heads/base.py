"""What every head gives to the training loop, and what all of them measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plsc.errors import DataError, OptionError
from plsc.heads.initial import initial_rows
from plsc.heads.margins import Margin
from plsc.heads.norms import normalised
from plsc.heads.types import ROW_DTYPES, read_dtype
from plsc.parallel.collectives import gather_rows, gather_sizes

_EQUAL = 1e-6  # variance of unit vectors below which they count as equal


@dataclass
class HeadOutput:
    """The result of a head's forward pass.

    Attributes:
        loss: scalar to call backward() on. Its gradient for this rank's embeddings is that of the mean
            loss of the global batch; gradients of a replicated backbone are therefore SUMMED over ranks.
        mean_loss: scalar, detached: the mean loss of the global batch, the same on all ranks.
        batch: number of samples in the global batch.
        accuracy: share of the global batch whose label has the highest logit without margin; None if it
            was not asked for.
        effective_rank: number of directions that the embeddings of the global batch spread over; near 1
            when the network collapses, 0 where all are equal, see `effective_rank`; None if it was not
            asked for.
        finite: bool scalar: whether all embeddings of the global batch are.
        parts: of several heads (plsc.heads.joint), what each says of its own samples, by name.
    """

    loss: Tensor
    mean_loss: Tensor
    batch: int
    accuracy: Tensor | None
    effective_rank: Tensor | None
    finite: Tensor
    parts: dict[str, HeadOutput] = field(default_factory=dict)


class Head(nn.Module):
    """Base of the classification heads: parameters `weight` [C_local, D] and maybe `bias` [C_local].

    class_num: number of all classes C; class_range: ``(start, stop)``, the classes of this rank's rows;
    margin: how logits are made (plsc.heads.margins); seed: of the initial rows, which do not depend
    on the number of ranks; group: the ranks that share the batch, None for one process; centers: rows a
    class, K: with more than one `weight` is [C_local, K, D]; row_dtype: of `weight`; initial_norm: expected
    norm of a class's initial weights, None: 0.01 sqrt(D).
    """

    is_sharded: bool

    def __init__(
        self,
        class_num: int,
        class_range: tuple[int, int],
        emb_size: int,
        margin: Margin,
        seed: int,
        group: dist.ProcessGroup | None,
        centers: int = 1,
        row_dtype: str | torch.dtype = torch.float32,
        initial_norm: float | None = None,
    ) -> None:
        super().__init__()
        for name, count in (("class_num", class_num), ("emb_size", emb_size), ("centers", centers)):
            if count < 1:
                raise OptionError(f"{name} is {count}; expected 1 or more")
        row_dtype = read_dtype("row_dtype", row_dtype, ROW_DTYPES)
        if centers > 1 and not margin.is_cosine:
            raise OptionError(
                f"{margin.name} has no sub-centres; use a margin of cosines, such as arcface, or centers=1"
            )
        self.class_num = class_num
        self.emb_size = emb_size
        self.class_range = class_range
        # Its running statistics are as exact as the rows.
        margin.set_class_num(class_num)
        self.margin = margin.double() if row_dtype is torch.float64 else margin
        self.seed = seed
        self.group = group
        self.centers = centers
        start, stop = class_range
        if initial_norm is not None and not 0 < initial_norm < math.inf:
            raise OptionError(f"initial_norm is {initial_norm}; expected a number above 0")
        rows = initial_rows(
            seed, start * centers, stop * centers, emb_size, row_dtype, initial_norm
        )
        shape = (stop - start, emb_size) if centers == 1 else (stop - start, centers, emb_size)
        self.weight = nn.Parameter(rows.view(shape))
        bias_dtype = torch.float64 if row_dtype is torch.float64 else torch.float32
        self.bias = (
            None if margin.is_cosine else nn.Parameter(torch.zeros(stop - start, dtype=bias_dtype))
        )

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        with_accuracy: bool = False,
        with_gauge: bool = False,
        sizes: list[int] | None = None,
    ) -> HeadOutput:
        """Return the loss of the global batch; a collective: every rank calls it.

        embeddings [b, D], floating; labels [b], int64, in 0..C-1. b may differ between ranks. sizes: b of
        every rank, from a caller who knows it, and has looked at the labels: then no GPU is waited for
        because of these. Raises DataError, on every rank alike, for a label out of range.
        """
        raise NotImplementedError

    def sync_gradients(self) -> None:
        """Make the gradients of the parameters whole after backward(); a collective."""


def join_outputs(parts: list[HeadOutput]) -> HeadOutput:
    """Return what the micro-batches of one batch say together; its loss is detached."""
    sizes = [part.batch for part in parts]
    loss = weighted_mean([part.mean_loss for part in parts], sizes)
    accuracies = [part.accuracy for part in parts if part.accuracy is not None]
    names = {name: None for part in parts for name in part.parts}
    return HeadOutput(
        loss,
        loss,
        sum(sizes),
        weighted_mean(accuracies, sizes) if accuracies else None,
        parts[-1].effective_rank,
        torch.stack([part.finite for part in parts]).all(),
        {
            name: join_outputs([part.parts[name] for part in parts if name in part.parts])
            for name in names
        },
    )


def weighted_mean(values: list[Tensor], weights: Sequence[int]) -> Tensor:
    """Return the mean of scalars, each counted as often as its weight says; 0 if none counts."""
    total = max(1, sum(weights))
    return torch.stack([v * (w / total) for v, w in zip(values, weights, strict=True)]).sum()


@dataclass
class GlobalBatch:
    """What all ranks brought: embeddings [B, D], labels [B], and the rows each rank brought.

    mine: where this rank's rows are among them.
    """

    embeddings: Tensor
    labels: Tensor
    sizes: list[int]
    mine: slice


def check_batch(embeddings: Tensor, labels: Tensor, emb_size: int) -> None:
    """Raise DataError unless these are embeddings [b, D], floating, and labels [b], int64."""
    if (
        embeddings.ndim != 2
        or embeddings.shape[1] != emb_size
        or not embeddings.is_floating_point()
    ):
        raise DataError(
            f"the embeddings are {embeddings.dtype} {list(embeddings.shape)}; expected floating numbers "
            f"[b, {emb_size}]"
        )
    if labels.dtype is not torch.int64 or labels.shape != embeddings.shape[:1]:
        raise DataError(
            f"the labels are {labels.dtype} {list(labels.shape)}; expected int64 [{len(embeddings)}], the "
            "number of each sample's class"
        )


def gather_batch(
    embeddings: Tensor,
    labels: Tensor,
    class_num: int,
    group: dist.ProcessGroup | None,
    sizes: list[int] | None = None,
) -> GlobalBatch:
    """Bring the batches of all ranks together and check the labels, alike on every rank.

    sizes: of every rank's batch, if they are known, and the labels checked.
    """
    is_checked = sizes is not None
    if sizes is None:
        sizes = gather_sizes(len(embeddings), embeddings.device, group)
    if sum(sizes) == 0:
        raise DataError(
            "the global batch is empty: no rank has a sample (were all its images bad? look above)"
        )
    all_labels = gather_rows(labels, sizes, group)
    outside = (all_labels < 0) | (all_labels >= class_num)
    if not is_checked and bool(outside.any()):
        position = int(outside.nonzero()[0])
        raise DataError(
            f"label {int(all_labels[position])} at position {position} of the global batch is outside "
            f"0..{class_num - 1}; fix the label, or have more classes (set_class_num)"
        )
    rank = 0 if group is None else group.rank()
    first = sum(sizes[:rank])
    mine = slice(first, first + sizes[rank])
    return GlobalBatch(gather_rows(embeddings, sizes, group), all_labels, sizes, mine)


def effective_rank(embeddings: Tensor) -> Tensor:
    """Return how many directions the unit vectors of embeddings [B, D] spread over around their mean.

    (sum of l)^2 / (sum of l^2) over the eigenvalues l of their covariance (the participation ratio): 1 to
    min(B - 1, D), and 0 where all vectors are equal to about three digits.
    """
    unit, _ = normalised(embeddings.detach().float())
    centred = unit - unit.mean(dim=0)
    gram = centred.T @ centred if len(unit) > unit.shape[1] else centred @ centred.T
    total = gram.trace()
    return torch.where(total <= _EQUAL * len(unit), 0.0, total.square() / gram.square().sum())
