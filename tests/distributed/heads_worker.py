"""Compares every head with the textbook on the ranks that it is started on; exits 1 at a difference."""

from __future__ import annotations

import torch

from plsc.heads import LOSS_TYPES, build_head, reference
from plsc.parallel.shard import class_ranges
from plsc.parallel.world import World


def textbook(loss_type, embeddings, weight, bias, labels):
    if loss_type.endswith("arcface"):
        logits = reference.arcface_logits(embeddings, weight, labels, 64.0, 0.5)
    else:
        logits = reference.softmax_logits(embeddings, weight, bias)
    return logits, reference.cross_entropy(logits, labels)


def check(world: World, loss_type: str, classes: int, sizes: list[int]) -> None:
    where = f"{loss_type}, {classes} classes, batches {sizes}, rank {world.rank}"
    generator = torch.Generator().manual_seed(classes)
    embeddings = torch.randn(sum(sizes), 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(classes, (sum(sizes),), generator=generator)
    whole = build_head(loss_type, classes, 6, seed=5).double()
    if whole.bias is not None:
        torch.nn.init.normal_(whole.bias, generator=generator)

    head = build_head(loss_type, classes, 6, seed=5, group=world.head_group).double()
    start, stop = class_ranges(classes, world.size)[world.rank] if head.is_sharded else (0, classes)
    assert head.weight.shape == (stop - start, 6), where
    assert torch.equal(head.weight, whole.weight[start:stop]), where
    if head.bias is not None:
        head.bias.data.copy_(whole.bias.data[start:stop])

    first = sum(sizes[: world.rank])
    mine = slice(first, first + sizes[world.rank])
    local = embeddings[mine].clone().requires_grad_()
    output = head(local, labels[mine], with_accuracy=True, with_gauge=True)
    output.loss.backward()
    head.sync_gradients()

    embeddings.requires_grad_()
    logits, truth = textbook(loss_type, embeddings, whole.weight, whole.bias, labels)
    truth.backward()
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(output.mean_loss, truth.detach(), **close)
    torch.testing.assert_close(local.grad, embeddings.grad[mine], **close)
    torch.testing.assert_close(head.weight.grad, whole.weight.grad[start:stop], **close)
    if head.bias is not None:
        torch.testing.assert_close(head.bias.grad, whole.bias.grad[start:stop], **close)
    plain = logits.detach()
    if loss_type.endswith("arcface"):
        plain = reference.cosines(embeddings, whole.weight).detach()
    right = (plain.argmax(1) == labels).float().mean()
    assert abs(float(output.accuracy) - float(right)) < 1e-6, where
    assert output.batch == sum(sizes), where


def main() -> None:
    world = World.from_environment("cpu")
    even, uneven = [3] * world.size, [2 + rank for rank in range(world.size)]
    with_empty = [4] + [0] * (world.size - 1)
    for loss_type in LOSS_TYPES:
        # 1 and 5 classes leave some of 4 ranks (one of 3) without any.
        for classes in (1, 5, 12, 23):
            for sizes in (even, uneven, with_empty):
                check(world, loss_type, classes, sizes)
    world.close()


if __name__ == "__main__":
    main()
