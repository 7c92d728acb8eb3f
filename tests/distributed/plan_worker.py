"""Compare the tensors that the head communicates with the plan; exit with 1 if they differ."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from plsc.heads import RowSGD, Sampling, ShardedHead, build_margin
from plsc.parallel.world import World
from plsc.plan import plan_head

# The collectives of the plan, with the argument positions of the full tensor and of the block.
WHOLE_AND_BLOCK = {
    "all_gather_into_tensor": ("all-gather", 0, 1),
    "reduce_scatter_tensor": ("reduce-scatter", 1, 0),
    "all_reduce": ("all-reduce", 0, 0),
}
OTHERS = (
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)


def record(calls: list[tuple[str, int, int]]) -> None:
    """Record (collective, payload, bytes sent per rank in a ring) of each following call."""

    def noting(name, function):
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            ranks = dist.get_world_size()
            if name in OTHERS:
                calls.append((name, -1, -1))
            else:
                collective, whole, block = WHOLE_AND_BLOCK[name]
                payload = args[whole].nbytes
                sent = (ranks - 1) * args[block].nbytes
                if collective == "all-reduce":  # a reduce-scatter and an all-gather of blocks
                    sent = 2 * (ranks - 1) * -(-payload // ranks)
                calls.append((collective, payload, sent))
            return function(*args, **kwargs)

        return wrapped

    for name in (*WHOLE_AND_BLOCK, *OTHERS):
        setattr(dist, name, noting(name, getattr(dist, name)))


def check(
    world: World, calls: list[tuple[str, int, int]], sizes: list[int], dtype: str, ratio: float
) -> None:
    head = ShardedHead(
        23,
        12,
        build_margin("arcface", scale=64.0, margin=0.5),
        sampling=Sampling(ratio=ratio),
        group=world.head_group,
    )
    rows = RowSGD(head)
    size = sizes[world.rank]
    embeddings = torch.randn(size, 12, dtype=getattr(torch, dtype), requires_grad=True)
    labels = torch.randint(23, (size,))
    calls.clear()
    head(embeddings, labels).loss.backward()
    rows.step()
    planned = plan_head(23, ranks=world.size, embedding=12, batch=sizes, ratio=ratio, embedding_dtype=dtype)
    expected = [(t.collective, t.payload, t.sent) for t in planned.transfers]
    assert calls == expected, f"batches {sizes}, {dtype}, ratio {ratio}: {calls} != {expected}"


def main() -> None:
    world = World.from_environment("cpu")
    calls: list[tuple[str, int, int]] = []
    record(calls)
    even, uneven = [5] * world.size, [2 + 3 * rank for rank in range(world.size)]
    with_empty = [4] + [0] * (world.size - 1)
    for sizes in (even, uneven, with_empty):
        for dtype in ("float32", "bfloat16"):
            for ratio in (1.0, 0.5):
                check(world, calls, sizes, dtype, ratio)
    world.close()


if __name__ == "__main__":
    main()
