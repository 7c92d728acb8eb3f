"""Compare every head with the reference implementation on one to four ranks; exit with 1 if they differ."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

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
from plsc.parallel.world import World, class_ranges, gather_rows
from tests import reference
from tests.distributed.worker import run_worker, smaller_world

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
DIMENSION, RATE, DECAY = 6, 0.1, 0.01
ONE_MARGIN = ("arcface", "cosface", "sphereface", "adaface", "curricularface")


def fill(head: torch.nn.Module, whole: torch.nn.Module) -> None:
    start, stop = head.class_range
    with torch.no_grad():
        for part, all_rows in zip(head.parameters(), whole.parameters(), strict=True):
            part.copy_(all_rows[start:stop])


def filled_whole(loss_type: str, classes: int, centers: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(classes)
    head = build_head(loss_type, classes, DIMENSION, centers=centers, row_dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    return head


def part_of(world: World, sizes: list[int]) -> slice:
    """Return which samples of the global batch are this rank's."""
    first = sum(sizes[: world.rank])
    return slice(first, first + sizes[world.rank])


def global_batch(classes: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(classes)
    embeddings = torch.randn(total, DIMENSION, dtype=torch.float64, generator=generator) * 5
    return embeddings, torch.randint(classes, (total,), generator=generator)


def margins_per_class(name: str, classes: int) -> torch.Tensor:
    """Return different margins from 0 to 1.5 (sphereface: from 1 to 2.5)."""
    return (name == "sphereface") + 1.5 * torch.rand(classes, dtype=torch.float64)


def sampled_classes(world: World, head: ShardedHead) -> torch.Tensor:
    """Return which classes any rank used in the last forward pass, bool [C]."""
    (start, stop), drawn = head.class_range, head.contexts[0].rows.selected
    is_used = torch.zeros(head.class_num, dtype=torch.bool)
    is_used[torch.arange(start, stop) if drawn is None else start + drawn // head.centers] = True
    return torch.from_numpy(np.any(world.all_gather_object(is_used.numpy()), axis=0))


def check(
    world: World, name: str, classes: int, sizes: list[int], *, centers: int = 1, ratio: float = 1.0,
    keep: bool = False, per_class: bool = False, is_sharded: bool = True,
) -> None:  # fmt: skip
    """Compare loss, gradients, accuracy and class weights after an update, in fp64."""
    where = f"{name}, {classes} x {centers}, {sizes}, ratio {ratio}, keep {keep}, rank {world.rank}"
    whole, margin, margins = filled_whole(name, classes, centers), build_margin(name), None
    if per_class:
        margins = margins_per_class(name, classes)
        margin.set_class_margins(margins)
    parts = {"execution": Execution(tile=5, keep_bytes=10**6 * keep), "sampling": Sampling(ratio)}
    head = build_head(
        "dist_" * is_sharded + name, classes, DIMENSION, margin=margin, centers=centers,
        row_dtype=torch.float64, group=world.head_group, **parts,
    )  # fmt: skip
    fill(head, whole)
    rows = RowSGD(head, lr=RATE, momentum=0.9, weight_decay=DECAY) if is_sharded else None
    embeddings, labels = global_batch(classes, sum(sizes))
    mine = part_of(world, sizes)
    local = embeddings[mine].clone().requires_grad_()
    output = head(local, labels[mine], with_accuracy=True)
    output.loss.backward()
    head.sync_gradients()
    everywhere = sampled_classes(world, head) if is_sharded else torch.ones(classes, dtype=torch.bool)
    assert ratio < 1 or everywhere.all()

    embeddings.requires_grad_()
    truth = reference.mean_loss(
        head.margin, embeddings, whole.weight, whole.bias, labels, everywhere, class_margins=margins
    )
    truth.backward()
    torch.testing.assert_close(output.mean_loss, truth.detach(), **CLOSE)
    torch.testing.assert_close(local.grad, embeddings.grad[mine], **CLOSE)
    with torch.no_grad():
        plain = plain_logits(whole, embeddings).masked_fill(~everywhere, -torch.inf)
    right = (plain.argmax(1) == labels).float().mean()
    assert abs(float(output.accuracy) - float(right)) < 1e-6, where
    in_top5 = (reference.top_classes(plain, 5)[1] == labels[:, None]).any(dim=1).float().mean()
    assert abs(float(output.accuracy_top5) - float(in_top5)) < 1e-6, where
    assert output.batch == sum(sizes), where
    if rows is None:
        torch.testing.assert_close(head.weight.grad, whole.weight.grad, **CLOSE)
        return
    norm = torch.cat([p.grad.flatten() for p in whole.parameters()]).norm()
    torch.testing.assert_close(rows.gradient_norm(), norm, **CLOSE)
    rows.step()
    (start, stop), old = head.class_range, [p.detach() for p in whole.parameters()]
    for part, before, parameter in zip(head.parameters(), old, whole.parameters(), strict=True):
        new = before - RATE * (parameter.grad + DECAY * before)
        new = torch.where(everywhere.view(-1, *[1] * (new.ndim - 1)), new, before)
        torch.testing.assert_close(part.detach(), new[start:stop], **CLOSE)
    # The margin's statistics must be identical on all ranks.
    assert margins is None or head.margin.class_margins.equal(margins[start:stop]), where
    for buffer in head.statistics().values():
        copies = gather_rows(buffer.view(1, -1), [1] * world.size, world.head_group)
        assert (copies == copies[0]).all(), where


def check_hard_negatives(world: World, name: str, centers: int, sizes: list[int]) -> None:
    """A step without sampling lists the nearest classes; others use the lists, and list what they sampled."""
    whole = filled_whole(name, 40, centers)
    head = ShardedHead(
        40, DIMENSION, build_margin(name), centers=centers, sampling=Sampling({0: 1.0, 1: 0.6}, hard=0.9),
        execution=Execution(tile=5), row_dtype=torch.float64, group=world.head_group,
    )  # fmt: skip
    fill(head, whole)
    rows = RowSGD(head, lr=0.0)
    embeddings, labels = global_batch(40, sum(sizes))
    (start, stop), mine = head.class_range, part_of(world, sizes)
    with torch.no_grad():
        logits = plain_logits(whole, embeddings)
    logits[torch.arange(len(labels)), labels] = -torch.inf
    lists = torch.zeros(0)
    used = torch.ones(40, dtype=torch.bool)
    for step in range(3):
        output = head(embeddings[mine].requires_grad_(), labels[mine])
        output.loss.backward()
        if step:
            used = sampled_classes(world, head)
            count = math.ceil((stop - start) * 0.6)
            listed = {c - 1 for c in lists[:, 1:].flatten().tolist() if start < c <= stop}
            listed -= {*labels.tolist()}
            taken = {c for c in listed if used[c]}
            positives = len({c for c in labels.tolist() if start <= c < stop})
            assert len(taken) >= min(len(listed), int(count * 0.9), count - positives)
        known = logits.masked_fill(~used, -torch.inf)
        lists = head.neighbours.of_labels(labels)
        assert (lists[:, 0] == step + 1).all()
        for sample, label in enumerate(labels.tolist()):
            scores = known[labels.tolist().index(label)]
            best = scores.topk(min(16, int(scores.isfinite().sum()))).indices + 1
            assert lists[sample, 1:].tolist() == best.tolist() + [0] * (16 - len(best)), (name, step, sample)
        rows.step()


def plain_logits(head: torch.nn.Module, embeddings: torch.Tensor) -> torch.Tensor:
    if head.bias is not None:
        return reference.softmax_logits(embeddings, head.weight, head.bias)
    return reference.cosines(embeddings, head.weight)


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
    fill(head, whole)
    embeddings = torch.randint(-3, 4, (sum(sizes), DIMENSION), generator=generator).double()
    embeddings[:, 0] += 7  # no zero vectors
    mine = part_of(world, sizes)
    logits = plain_logits(whole.double(), embeddings) * head.margin.scale
    for k in (1, 4, 40):
        scores, best = head.topk(embeddings[mine].float(), k)
        expected, numbers = reference.top_classes(logits, k)
        torch.testing.assert_close(scores.double(), expected[mine], rtol=1e-5, atol=1e-5)
        where = f"{loss_type}, {classes} x {centers}, {sizes}, {dtype}, top {k}, rank {world.rank}"
        assert best.equal(numbers[mine]), where
    best, probabilities = head.classify(embeddings[mine].float())
    assert best.equal(reference.top_classes(logits, 1)[1][mine, 0])
    expected = logits.softmax(dim=1).amax(dim=1)[mine]
    torch.testing.assert_close(probabilities.double(), expected, rtol=1e-4, atol=1e-6)


def check_bad_input(world: World) -> None:
    """Bad input on one rank raises on all ranks."""
    head = build_head("dist_arcface", 9, DIMENSION, group=world.head_group)
    is_last = world.rank == world.size - 1
    with pytest.raises(DataError, match="label 99"):
        head(torch.randn(2, DIMENSION), torch.tensor([0, 99 if is_last else 1]))
    embeddings = torch.randn(2, DIMENSION)
    embeddings[1, 0] = torch.nan if is_last else 0
    with pytest.raises(DataError, match="not finite"):
        head(embeddings, torch.tensor([0, 1]))


def check_initial_weights(world: World) -> None:
    """Initial weights do not depend on the ranks; a head without a group on several ranks warns."""
    for loss_type in LOSS_TYPES:
        head = build_head(loss_type, 23, DIMENSION, seed=5, group=world.head_group)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            whole = build_head(loss_type, 23, DIMENSION, seed=5)
        assert any("no process group" in str(warning.message) for warning in caught) == head.is_sharded
        ranges = class_ranges(23, world.size) if head.is_sharded else [(0, 23)] * world.size
        start, stop = ranges[world.rank]
        assert torch.equal(head.weight, whole.weight[start:stop])


def check_all(world: World) -> None:
    even, uneven = [3] * world.size, [2 + rank for rank in range(world.size)]
    with_empty = [4] + [0] * (world.size - 1)
    torch.manual_seed(7)  # the margins are identical on all ranks
    cases = ((1, uneven), (5, with_empty), (12, even), (23, uneven))
    for number, name in enumerate(MARGINS, start=world.size):
        # With 1 and 5 classes some of 4 ranks (one of 3) have none. Each margin has each case on two worlds.
        for classes, sizes in cases[number % 2 :: 2]:
            check(world, name, classes, sizes, keep=classes % 2 == 0)
        centers = 1 if name == "softmax" else 3
        check(world, name, 23, uneven, ratio=0.3)
        check(world, name, 23, uneven, centers=centers, keep=True)
        check(world, name, 23, with_empty, centers=centers, ratio=0.3, keep=True)
        check(world, name, 12, (uneven, with_empty)[number % 2], is_sharded=False)
    for name in ONE_MARGIN:
        check(world, name, 5, with_empty, per_class=True)
        check(world, name, 23, uneven, centers=3, ratio=0.3, keep=True, per_class=True)
        check(world, name, 12, uneven, per_class=True, is_sharded=False)
    with pytest.MonkeyPatch.context() as patch:  # as on a GPU, which is not asked which labels are local
        patch.setattr(
            torch.Tensor, "is_cuda", property(lambda tensor: tensor.dtype is torch.bool), raising=False
        )
        for name in ("curricularface", "adaface", "magface", "softmax"):
            check(world, name, 12, uneven, centers=1 if name == "softmax" else 2, ratio=0.5)
    for name, centers in (("arcface", 1), ("cosface", 3), ("softmax", 1)):
        check_hard_negatives(world, name, centers, uneven)
    for sizes in (uneven, with_empty, [0] * world.size):
        for classes, centers, dtype, offload in (
            (5, 1, "float64", False), (23, 3, "float32", True), (23, 1, "bfloat16", False),
        ):  # fmt: skip
            check_topk(world, "dist_arcface", classes, centers, sizes, dtype, offload)
        check_topk(world, "cosface", 23, 3, sizes, "float32", False)
        for loss_type, classes in (("dist_softmax", 23), ("softmax", 1)):
            check_topk(world, loss_type, classes, 1, sizes, "float32", False)
    check_bad_input(world)
    check_initial_weights(world)


def main() -> None:
    full = World.from_environment("cpu")
    worlds = {ranks: smaller_world(full, ranks) for ranks in (1, 2, 3)}
    for ranks, world in {**worlds, 4: full}.items():
        if world is not None:
            check_all(world)
        dist.barrier()
        if full.is_main:
            print(f"passed on {ranks}", flush=True)
    full.close()


if __name__ == "__main__":
    run_worker(main)
