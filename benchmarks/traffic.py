"""Network traffic of the head per step: `torchrun --nproc-per-node=2 benchmarks/traffic.py C B D STEPS`.

Wraps the collectives of torch.distributed and sums the bytes of their input tensors on a rank. Rank 0 prints
a line of JSON. B is the global batch size.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import print_json
from torch import Tensor

from plsc.heads import Execution, RowSGD, ShardedHead, build_margin
from plsc.parallel.collectives import ALL_GATHER, REDUCE_SCATTER

# The input of a rank: its part for a gather, the whole tensor for the others.
_GIVEN = {
    "all_gather_into_tensor": 1,
    "all_gather": 1,
    "all_gather_single": 1,
    "reduce_scatter_tensor": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter": 1,
    "all_reduce": 0,
    "broadcast": 0,
    "reduce": 0,
    "gather": 0,
    "scatter": 0,
    "all_to_all_single": 1,
    "all_to_all": 1,
    "send": 0,
    "isend": 0,
    "broadcast_object_list": 0,
    "all_gather_object": 1,
}


def count_bytes(counted: collections.Counter[str]) -> None:
    """Wrap the collectives so that each counts its input bytes; raises for input that is not a tensor."""

    def wrap(name: str, call: Callable[..., Any], position: int) -> Callable[..., Any]:
        @functools.wraps(call)
        def counting(*arguments: Any, **named: Any) -> Any:
            given = arguments[position] if len(arguments) > position else named["input"]
            tensors = [given] if isinstance(given, Tensor) else list(given)
            counted[name] += sum(tensor.nbytes for tensor in tensors)
            return call(*arguments, **named)

        return counting

    for name, position in _GIVEN.items():
        if hasattr(dist, name):
            setattr(dist, name, wrap(name, getattr(dist, name), position))


def expected(batch: int, dimension: int, ranks: int) -> dict[str, int]:
    """Return the input bytes of a rank per step with ArcFace and fp32 embeddings; independent of C.

    all_gather: the number of samples, b labels (8 bytes each) and b x D embeddings. all_reduce: two numbers
    per sample of the global batch, the sum of exponentials and the logit of the label. reduce_scatter: B x D.
    """
    mine = batch // ranks
    return {
        ALL_GATHER: 8 + mine * 8 + mine * dimension * 4,
        "all_reduce": 2 * batch * 4,
        REDUCE_SCATTER: batch * dimension * 4,
    }


def loopback_bytes() -> int | None:
    """Return the bytes that the loopback device of this machine has received from all programs."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return None


def main() -> None:
    """Run the steps and print their traffic."""
    classes, batch, dimension, steps = map(int, sys.argv[1:5])
    counted: collections.Counter[str] = collections.Counter()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    margin = build_margin("arcface", scale=64.0, margin=0.5)
    execution = Execution(products="float32")
    head = ShardedHead(classes, dimension, margin, execution=execution, group=dist.group.WORLD)
    rows = RowSGD(head, lr=0.1, momentum=0.9, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(rank)
    mine = batch // ranks
    barrier = torch.zeros(1)

    def step() -> None:
        x = torch.randn(mine, dimension, generator=generator).requires_grad_()
        labels = torch.randint(classes, (mine,), generator=generator)
        head(x, labels).loss.backward()
        rows.step()

    step()
    dist.all_reduce(barrier)
    before = loopback_bytes()
    dist.all_reduce(barrier)  # all ranks have read the counter
    count_bytes(counted)
    for _ in range(steps):
        step()
    given = {name: total // steps for name, total in counted.items()}
    dist.all_reduce(barrier)
    after = loopback_bytes()
    seen = None if before is None or after is None else (after - before) // steps
    if rank == 0:
        print_json(
            "traffic",
            ranks=ranks,
            C=classes,
            B=batch,
            D=dimension,
            given=given,
            expected=expected(batch, dimension, ranks),
            loopback=seen,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
