"""The heads on one backbone: one, or several that have their own classes and samples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plsc.errors import DataError
from plsc.heads.base import Head, HeadOutput, check_batch, mean_output
from plsc.heads.optimizers import RowOptimizer
from plsc.parallel.collectives import sum_over_ranks


class Heads(nn.Module):
    """Heads by name, with consecutive class indices. The name of a single head is empty.

    The loss is the mean over all images of the step: the sum over the heads of the head's mean loss times the
    head's fraction of the images.

    Attributes:
        by_name: the heads.
        rows: the optimizers of sharded class weights, by the names of their heads.
        class_num: number of classes of all heads together.
    """

    def __init__(
        self,
        heads: Mapping[str, Head],
        rows: Mapping[str, RowOptimizer] = MappingProxyType({}),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.by_name = dict(heads)
        self.rows = dict(rows)
        for name, head in heads.items():
            self.add_module(f"head_{name}" if name else "head", head)
        self.group = group
        self.class_num = sum(head.class_num for head in heads.values())
        self._first_classes = list(accumulate((head.class_num for head in heads.values()), initial=0))

    @property
    def only(self) -> Head | None:
        """The single head; None if there are several."""
        return self.by_name.get("")

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        with_accuracy: bool = False,
        with_gauge: bool = False,
        sizes: list[int] | None = None,
        all_labels: Tensor | None = None,
    ) -> HeadOutput:
        """Return the mean loss of the global batch, and the output of each of several heads; a collective.

        embeddings: [b, D]. labels: int64 [b], in the joint class numbering. A head without images in the
        global batch is skipped. Accuracy and effective rank are means over the heads, weighted by images.
        sizes, all_labels: of a single head; several heads gather their own.

        Raises:
            DataError: a label is out of range, or no rank has an image; raised on every rank.
        """
        if self.only is not None:
            return self.only(embeddings, labels, with_accuracy, with_gauge, sizes, all_labels)
        labels = check_batch(embeddings, labels, next(iter(self.by_name.values())).emb_size)
        ends = torch.tensor(self._first_classes[1:-1], device=labels.device)
        owners = torch.bucketize(labels, ends, right=True)
        rows = [(owners == place).nonzero()[:, 0] for place in range(len(self.by_name))]
        counts = self._count(rows, (labels < 0) | (labels >= self.class_num))
        parts: dict[str, HeadOutput] = {}
        for place, (name, head) in enumerate(self.by_name.items()):
            if counts[place]:
                mine = labels[rows[place]] - self._first_classes[place]
                parts[name] = head(embeddings[rows[place]], mine, with_accuracy, with_gauge)
        return mean_output(list(parts.values()), parts)

    def topk(self, embeddings: Tensor, k: int, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Return `Head.topk` of each sample among the classes of one head, jointly numbered; a collective.

        owners: int64 [b], position of each sample's head in `by_name`. Where its head has fewer than k
        classes, the other logits are -inf and their classes -1.
        """
        k = min(k, max(head.class_num for head in self.by_name.values()))
        scores = embeddings.new_full((len(embeddings), k), -torch.inf)
        classes = torch.full_like(scores, -1, dtype=torch.int64)
        for place, head in enumerate(self.by_name.values()):
            mine = (owners == place).nonzero()[:, 0]
            found, numbers = head.topk(embeddings[mine], k)
            scores[mine, : found.shape[1]] = found.to(scores)
            classes[mine, : found.shape[1]] = numbers + self._first_classes[place]
        return scores, classes

    def sync_gradients(self) -> None:
        """Complete the gradients of the parameters after backward(); a collective."""
        for head in self.by_name.values():
            head.sync_gradients()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers of sharded class weights."""
        return [group for each in self.rows.values() for group in each.param_groups]

    def update(self) -> None:
        """Update the sharded class weights of all heads; see `RowOptimizer.step`."""
        for each in self.rows.values():
            each.step()

    def skip(self) -> None:
        """Skip the update of all heads; see `RowOptimizer.skip`."""
        for each in self.rows.values():
            each.skip()

    def _count(self, rows: list[Tensor], wrong: Tensor) -> list[int]:
        """Return the number of images of each head in the global batch; one collective.

        rows: positions of each head's samples in the local batch. wrong: bool [b], labels out of range.
        """
        mine = torch.tensor([len(part) for part in rows] + [int(wrong.sum())], device=wrong.device)
        *counts, outside = sum_over_ranks(mine, self.group).tolist()
        if outside:
            raise DataError(
                f"{outside} labels of the global batch are outside 0..{self.class_num - 1}; fix the labels"
            )
        if not any(counts):
            raise DataError(
                "the global batch is empty: no rank has a sample; see the warnings above if its images were "
                "bad"
            )
        return counts
