"""Compare the tensors that the head communicates with docs/life_of_a_step.md; exit with 1 if they differ."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from plsc.heads import RowSGD, Sampling, ShardedHead, build_margin
from plsc.parallel.world import ALL_GATHER, REDUCE_SCATTER, World

# The collectives of the head, with the argument position of the full tensor.
WHOLE = {
    ALL_GATHER: ("all-gather", 0),
    REDUCE_SCATTER: ("reduce-scatter", 1),
    "all_reduce": ("all-reduce", 0),
}
OTHERS = """
    all_gather all_gather_object all_to_all all_to_all_single barrier broadcast broadcast_object_list gather
    isend recv reduce reduce_scatter scatter send
""".split()  # noqa: SIM905


def record(calls: list[tuple[str, int]]) -> None:
    """Record the name and the bytes of the full tensor of each following collective."""

    def noting(name, function):
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            collective, whole = WHOLE.get(name, (name, None))
            calls.append((collective, -1 if whole is None else args[whole].nbytes))
            return function(*args, **kwargs)

        return wrapped

    for name in (*WHOLE, *OTHERS):
        setattr(dist, name, noting(name, getattr(dist, name)))


def check(world: World, calls: list[tuple[str, int]], sizes: list[int], dtype: str, ratio: float) -> None:
    head = ShardedHead(23, 12, build_margin("arcface"), sampling=Sampling(ratio), group=world.head_group)
    rows = RowSGD(head)
    size = sizes[world.rank]
    embeddings = torch.randn(size, 12, dtype=getattr(torch, dtype), requires_grad=True)
    labels = torch.randint(23, (size,))
    calls.clear()
    head(embeddings, labels).loss.backward()
    rows.step()
    padded, total = world.size * max(sizes), sum(sizes)  # batches are padded to the largest
    expected = [
        ("all-gather", world.size * 8),  # batch sizes
        ("all-gather", padded * 8),  # labels
        ("all-gather", padded * 12 * embeddings.itemsize),
        ("all-reduce", 2 * total * 4),  # two sums per sample
        ("reduce-scatter", padded * 12 * 4),  # gradient of the embeddings
    ]
    assert calls == expected, f"batches {sizes}, {dtype}, ratio {ratio}: {calls} != {expected}"


def main() -> None:
    world = World.from_environment("cpu")
    calls: list[tuple[str, int]] = []
    record(calls)
    even, uneven = [5] * world.size, [2 + 3 * rank for rank in range(world.size)]
    with_empty = [4] + [0] * (world.size - 1)
    for sizes, dtype, ratio in (
        (even, "float32", 1.0), (even, "bfloat16", 0.5), (uneven, "float32", 0.5),
        (with_empty, "bfloat16", 1.0),
    ):  # fmt: skip
        check(world, calls, sizes, dtype, ratio)
    world.close()


if __name__ == "__main__":
    main()
