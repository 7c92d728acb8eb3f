"""Compare every head with the reference implementation on these ranks; exit with 1 if they differ.

Argument "in short": only margins per class and hard negatives.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings

import numpy as np
import pytest
import torch

from plsc.errors import DataError
from plsc.heads import (
    LOSS_TYPES,
    MARGINS,
    Execution,
    RowSGD,
    Sampling,
    ShardedHead,
    build_head,
    build_margin,
)
from plsc.heads.base import HeadOutput
from plsc.parallel.collectives import class_ranges, gather_rows
from plsc.parallel.world import World
from tests import reference

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
DIMENSION, RATE, DECAY = 6, 0.1, 0.01
ONE_MARGIN = ("arcface", "cosface", "sphereface", "adaface", "curricularface")


def fill(head: torch.nn.Module, whole: torch.nn.Module, start: int, stop: int) -> None:
    with torch.no_grad():
        for mine, all_rows in zip(head.parameters(), whole.parameters(), strict=True):
            mine.copy_(all_rows[start:stop])


def filled_whole(loss_type: str, classes: int, centers: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(classes)
    head = build_head(loss_type, classes, DIMENSION, centers=centers, row_dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    return head


def global_batch(classes: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(classes)
    embeddings = torch.randn(total, DIMENSION, dtype=torch.float64, generator=generator) * 5
    return embeddings, torch.randint(classes, (total,), generator=generator)


def margins_per_class(name: str, classes: int) -> torch.Tensor | None:
    """Return different margins from 0 to 1.5 (sphereface: from 1 to 2.5); None if the loss has none."""
    lowest = 1.0 if name == "sphereface" else 0.0
    return lowest + 1.5 * torch.rand(classes, dtype=torch.float64) if name in ONE_MARGIN else None


def check_sharded(
    world: World,
    name: str,
    classes: int,
    centers: int,
    sizes: list[int],
    ratio: float,
    keep: bool,
    per_class: bool = False,
) -> None:
    """Compare loss, gradient of the embeddings, accuracy and class weights after an update, in fp64."""
    where = f"{name}, {classes} x {centers}, {sizes}, ratio {ratio}, keep {keep}, rank {world.rank}"
    whole = filled_whole(name, classes, centers)
    start, stop = class_ranges(classes, world.size)[world.rank]
    margin, margins = build_margin(name), margins_per_class(name, classes) if per_class else None
    if margins is not None:
        margin.set_class_margins(margins)
    head = ShardedHead(
        classes,
        DIMENSION,
        margin,
        centers=centers,
        sampling=Sampling(ratio),
        execution=Execution(tile=5, keep_bytes=10**6 * keep),
        row_dtype=torch.float64,
        group=world.head_group,
    )
    fill(head, whole, start, stop)
    assert head.weight.shape[0] == stop - start, where
    rows = RowSGD(head, lr=RATE, momentum=0.9, weight_decay=DECAY)
    embeddings, labels = global_batch(classes, sum(sizes))
    first = sum(sizes[: world.rank])
    mine = slice(first, first + sizes[world.rank])
    local = embeddings[mine].clone().requires_grad_()
    output = head(local, labels[mine], with_accuracy=True, with_gauge=True)
    output.loss.backward()

    drawn = head.contexts[0].rows.selected
    allowed = torch.zeros(classes, dtype=torch.bool)
    allowed[start:stop] = True
    if drawn is not None:
        allowed[:] = False
        allowed[start + drawn // centers] = True
    everywhere = torch.zeros(classes, dtype=torch.bool)
    for part in world.all_gather_object(allowed.numpy()):
        everywhere |= torch.from_numpy(part)
    assert ratio < 1 or everywhere.all()

    embeddings.requires_grad_()
    truth = reference.mean_loss(
        head.margin, embeddings, whole.weight, whole.bias, labels, everywhere, class_margins=margins
    )
    truth.backward()
    torch.testing.assert_close(output.mean_loss, truth.detach(), **CLOSE)
    torch.testing.assert_close(local.grad, embeddings.grad[mine], **CLOSE)
    norm = torch.cat([p.grad.flatten() for p in whole.parameters()]).norm()
    torch.testing.assert_close(rows.gradient_norm(), norm, **CLOSE)
    before = [p.detach().clone() for p in whole.parameters()]
    rows.step()
    for part, old, parameter in zip(head.parameters(), before, whole.parameters(), strict=True):
        new = old - RATE * (parameter.grad + DECAY * old)
        new = torch.where(everywhere.view(-1, *[1] * (new.ndim - 1)), new, old)
        torch.testing.assert_close(part.detach(), new[start:stop], **CLOSE)
    with torch.no_grad():
        for parameter, old in zip(whole.parameters(), before, strict=True):
            parameter.copy_(old)
        plain = plain_logits(whole, embeddings).masked_fill(~everywhere, -torch.inf)
    right = (plain.argmax(1) == labels).float().mean()
    assert abs(float(output.accuracy) - float(right)) < 1e-6, where
    assert abs(float(output.accuracy_top5) - top5_accuracy(plain, labels)) < 1e-6, where
    assert output.batch == sum(sizes), where
    check_left_out(head, output, embeddings, whole, labels, everywhere, margins)
    # The margin's statistics must be identical on all ranks.
    assert margins is None or head.margin.class_margins.equal(margins[start:stop]), where
    for buffer in head.statistics().values():
        parts = gather_rows(buffer.view(1, -1), [1] * world.size, world.head_group)
        assert (parts == parts[0]).all(), where


def check_left_out(
    head: ShardedHead,
    output: HeadOutput,
    embeddings: torch.Tensor,
    whole: torch.nn.Module,
    labels: torch.Tensor,
    allowed: torch.Tensor,
    margins: torch.Tensor | None,
) -> None:
    """Compare the share of the softmax of the classes that were not sampled."""
    if head.sampling.ratio == 1:
        assert output.left_out is None
        return
    with torch.no_grad():
        every = reference.logits(head.margin, embeddings, whole.weight, whole.bias, labels, margins)
        shares = 1 - (reference.masked(every, allowed).logsumexp(1) - every.logsumexp(1)).exp()
    torch.testing.assert_close(output.left_out, shares.mean(), **CLOSE)
    half = 1.96 * shares.std() / len(shares) ** 0.5
    torch.testing.assert_close(output.left_out_error, half, **CLOSE, equal_nan=True)


def check_hard_negatives(world: World, name: str, centers: int, sizes: list[int]) -> None:
    """A step without sampling lists the nearest classes; others use the lists, and list what they sampled."""
    whole = filled_whole(name, 40, centers)
    head = ShardedHead(
        40,
        DIMENSION,
        build_margin(name),
        centers=centers,
        sampling=Sampling({0: 1.0, 1: 0.6}, hard=0.9),
        execution=Execution(tile=5),
        row_dtype=torch.float64,
        group=world.head_group,
    )
    start, stop = head.class_range
    fill(head, whole, start, stop)
    rows = RowSGD(head, lr=0.0)
    embeddings, labels = global_batch(40, sum(sizes))
    first = sum(sizes[: world.rank])
    mine = slice(first, first + sizes[world.rank])
    with torch.no_grad():
        logits = plain_logits(whole, embeddings)
    logits[torch.arange(len(labels)), labels] = -torch.inf
    near, lists = logits.topk(16).indices, torch.zeros(0)
    used = torch.ones(40, dtype=torch.bool)
    for step in range(3):
        output = head(embeddings[mine].requires_grad_(), labels[mine], with_gauge=True)
        output.loss.backward()
        if step:
            drawn = torch.zeros(40, dtype=torch.bool)
            drawn[start + head.contexts[0].rows.selected[::centers] // centers] = True
            used = torch.from_numpy(np.any(world.all_gather_object(drawn.numpy()), axis=0))
            assert output.hard_age == 1
            assert abs(float(output.hard_recall) - float(used[near].double().mean())) < 1e-6
            room = int(math.ceil((stop - start) * 0.6) * 0.9)
            listed = {c - 1 for c in lists[:, 1:].flatten().tolist() if start < c <= stop} - {
                *labels.tolist()
            }
            taken = {c for c in listed if drawn[c]}
            positives = len({c for c in labels.tolist() if start <= c < stop})
            assert len(taken) >= min(len(listed), room, math.ceil((stop - start) * 0.6) - positives)
        known = logits.masked_fill(~used, -torch.inf)
        lists = head.neighbours.of_labels(labels)
        assert (lists[:, 0] == step + 1).all()
        for sample, label in enumerate(labels.tolist()):
            one = known[labels.tolist().index(label)]
            best = one.topk(min(16, int(one.isfinite().sum()))).indices + 1
            assert lists[sample, 1:].tolist() == best.tolist() + [0] * (16 - len(best)), (name, step, sample)
        rows.step()


def plain_logits(head: torch.nn.Module, embeddings: torch.Tensor) -> torch.Tensor:
    if head.bias is not None:
        return reference.softmax_logits(embeddings, head.weight, head.bias)
    return reference.cosines(embeddings, head.weight)


def top5_accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    classes = reference.top_classes(logits, 5)[1]
    return float((classes == labels[:, None]).any(dim=1).float().mean())


def check_dense(world: World, name: str, sizes: list[int], per_class: bool = False) -> None:
    """Compare the replicated head."""
    whole = filled_whole(name, 12, 1)
    margin, margins = build_margin(name), margins_per_class(name, 12) if per_class else None
    if margins is not None:
        margin.set_class_margins(margins)
    head = build_head(name, 12, DIMENSION, margin=margin, row_dtype=torch.float64, group=world.head_group)
    fill(head, whole, 0, 12)
    embeddings, labels = global_batch(12, sum(sizes))
    first = sum(sizes[: world.rank])
    mine = slice(first, first + sizes[world.rank])
    local = embeddings[mine].clone().requires_grad_()
    output = head(local, labels[mine], with_accuracy=True)
    output.loss.backward()
    head.sync_gradients()
    embeddings.requires_grad_()
    truth = reference.mean_loss(
        head.margin, embeddings, whole.weight, whole.bias, labels, class_margins=margins
    )
    truth.backward()
    torch.testing.assert_close(output.mean_loss, truth.detach(), **CLOSE)
    torch.testing.assert_close(local.grad, embeddings.grad[mine], **CLOSE)
    torch.testing.assert_close(head.weight.grad, whole.weight.grad, **CLOSE)
    top5 = top5_accuracy(plain_logits(whole, embeddings.detach()), labels)
    assert abs(float(output.accuracy_top5) - top5) < 1e-6


def check_topk(
    world: World, loss_type: str, classes: int, centers: int, sizes: list[int], dtype: str, offload: bool
) -> None:
    """Compare the classes exactly: of small integers and unit vectors, many logits are equal in any dtype."""
    generator = torch.Generator().manual_seed(classes)
    more = {"execution": Execution(tile=5), "offload": offload} if "dist_" in loss_type else {}
    parts = {"centers": centers, "row_dtype": dtype}
    head = build_head(loss_type, classes, DIMENSION, **parts, **more, group=world.head_group)
    whole = build_head(loss_type, classes, DIMENSION, **parts)
    with torch.no_grad():
        axes = torch.randint(DIMENSION, whole.weight.shape[:-1], generator=generator)
        lengths = 2.0 ** torch.randint(-2, 3, axes.shape, generator=generator)
        whole.weight.copy_(torch.nn.functional.one_hot(axes, DIMENSION) * lengths[..., None])
        if whole.bias is not None:
            whole.bias.copy_(torch.randint(-2, 3, (classes,), generator=generator))
    fill(head, whole, *head.class_range)
    embeddings = torch.randint(-3, 4, (sum(sizes), DIMENSION), generator=generator).double()
    embeddings[:, 0] += 7  # no zero vectors
    first = sum(sizes[: world.rank])
    mine = slice(first, first + sizes[world.rank])
    logits = plain_logits(whole.double(), embeddings) * head.margin.scale
    for k in (1, 4, 40):
        scores, found = head.topk(embeddings[mine].float(), k)
        expected, numbers = reference.top_classes(logits, k)
        torch.testing.assert_close(scores.double(), expected[mine], rtol=1e-5, atol=1e-5)
        where = f"{loss_type}, {classes} x {centers}, {sizes}, {dtype}, top {k}, rank {world.rank}"
        assert found.equal(numbers[mine]), where
    found, probabilities = head.classify(embeddings[mine].float())
    assert found.equal(reference.top_classes(logits, 1)[1][mine, 0])
    expected = logits.softmax(dim=1).amax(dim=1)[mine]
    torch.testing.assert_close(probabilities.double(), expected, rtol=1e-4, atol=1e-6)


def check_extreme_norms(world: World, loss_type: str) -> None:
    """Compare loss and gradients in float32 for norms whose squares overflow or underflow."""
    whole = filled_whole("dist_arcface", 23, 1)
    embeddings, labels = global_batch(23, 3 * world.size)
    with torch.no_grad():
        whole.weight *= 10 ** torch.linspace(-30, 30, 23)[:, None]
        embeddings *= 10 ** torch.linspace(-30, 30, len(embeddings))[:, None]
    head = build_head(loss_type, 23, DIMENSION, group=world.head_group)
    start, stop = head.class_range
    fill(head, whole, start, stop)
    mine = slice(3 * world.rank, 3 * world.rank + 3)
    local = embeddings[mine].float().requires_grad_()
    output = head(local, labels[mine])
    output.loss.backward()
    head.sync_gradients()
    embeddings.requires_grad_()
    truth = reference.mean_loss(head.margin, embeddings, whole.weight, None, labels)
    truth.backward()
    torch.testing.assert_close(output.mean_loss.double(), truth.detach(), rtol=1e-5, atol=0)
    pairs = (local, embeddings, mine), (head.weight, whole.weight, slice(start, stop))
    for ours, theirs, part in pairs:
        length = theirs.detach()[part].norm(dim=1, keepdim=True)
        expected = theirs.grad[part] * length
        torch.testing.assert_close(ours.grad * length, expected, rtol=1e-4, atol=1e-4)


def check_bad_input(world: World) -> None:
    """Bad input on one rank raises on all ranks."""
    head = build_head("dist_arcface", 9, DIMENSION, group=world.head_group)
    last = world.rank == world.size - 1
    labels = torch.tensor([0, 99 if last else 1])
    with pytest.raises(DataError, match="label 99"):
        head(torch.randn(2, DIMENSION), labels)
    embeddings = torch.randn(2, DIMENSION)
    embeddings[1, 0] = torch.nan if last else 0
    with pytest.raises(DataError, match="not finite"):
        head(embeddings, torch.tensor([0, 1]))


def check_forgotten_group(world: World) -> None:
    """A head without a group on several ranks warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_head("dist_arcface", 9, DIMENSION)
        build_head("dist_arcface", 9, DIMENSION, group=world.head_group)
    warned = [str(one.message) for one in caught if "has no process group" in str(one.message)]
    assert len(warned) == (1 if world.size > 1 else 0), warned


def main() -> None:
    world = World.from_environment("cpu")
    even, uneven = [3] * world.size, [2 + rank for rank in range(world.size)]
    with_empty = [4] + [0] * (world.size - 1)
    for name in ONE_MARGIN:
        torch.manual_seed(7)  # the margins are identical on all ranks
        for classes, sizes in itertools.product((5, 23), (uneven, with_empty)):
            check_sharded(world, name, classes, 1, sizes, 1.0, keep=False, per_class=True)
        check_sharded(world, name, 23, 3, uneven, 0.3, keep=True, per_class=True)
        check_dense(world, name, uneven, per_class=True)
    for name, centers in (("arcface", 1), ("cosface", 3), ("softmax", 1)):
        check_hard_negatives(world, name, centers, uneven)
    if sys.argv[1:] == ["in short"]:
        world.close()
        return
    for loss_type in LOSS_TYPES:
        rows = build_head(loss_type, 23, DIMENSION, seed=5, group=world.head_group).weight
        whole = build_head(loss_type, 23, DIMENSION, seed=5).weight
        ranges = class_ranges(23, world.size) if "dist_" in loss_type else [(0, 23)] * world.size
        start, stop = ranges[world.rank]
        assert torch.equal(rows, whole[start:stop])
    for name in MARGINS:
        # With 1 and 5 classes some of 4 ranks (one of 3) have none.
        for classes, sizes in itertools.product((1, 5, 12, 23), (even, uneven, with_empty)):
            keep = classes % 2 == 0
            check_sharded(world, name, classes, 1, sizes, 1.0, keep)
        for ratio, keep in itertools.product((0.3, 1.0), (False, True)):
            check_sharded(world, name, 23, 1, uneven, ratio, keep)
            if name != "softmax":
                check_sharded(world, name, 23, 3, uneven, ratio, keep)
        for sizes in (even, uneven, with_empty):
            check_dense(world, name, sizes)
    for loss_type in ("arcface", "dist_arcface"):
        check_extreme_norms(world, loss_type)
    for sizes in (even, uneven, with_empty, [0] * world.size):
        for classes, centers in ((1, 1), (5, 1), (23, 1), (23, 3)):
            for dtype, offload in (("float64", False), ("float32", True), ("bfloat16", False)):
                check_topk(world, "dist_arcface", classes, centers, sizes, dtype, offload)
            check_topk(world, "cosface", classes, centers, sizes, "float32", False)
        check_topk(world, "dist_softmax", 23, 1, sizes, "float32", False)
        check_topk(world, "softmax", 23, 1, sizes, "float64", False)
    check_bad_input(world)
    check_forgotten_group(world)
    world.close()


if __name__ == "__main__":
    main()
