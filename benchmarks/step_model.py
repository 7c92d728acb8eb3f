"""Checks the model of a step's time (docs/scaling.md) against steps that are made.

    python benchmarks/step_model.py                                   # one rank
    torchrun --nproc-per-node=2 benchmarks/step_model.py              # two, a core each

Measures the rates of this machine first, with operators of their own: a 3 x 3 convolution, a
product of the head's shape, a copy, an all-reduce, a short all-reduce. Then steps of a whole run, and of its
parts alone: backbone forward and backward, head, gradients' sum. Bytes that the ranks hand to collectives are
counted and compared with the plan. Rank 0 prints a table, and lines of JSON to --output.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from training_run import TrainingRun

from plsc.heads import Execution, RowSGD, ShardedHead, build_margin
from plsc.parallel.world import World
from plsc.plan import Rates, plan_backbone, plan_head, step_time
from plsc.plan.network import total_seconds

EMBEDDING = 512


clock = time.perf_counter


def median_seconds(act: Callable[[], object], times: int, world: World) -> float:
    """Return the median over some calls of the seconds on the slowest rank."""
    act()
    taken = []
    for _ in range(times):
        world.barrier()
        began = clock()
        act()
        taken.append(clock() - began)
    return statistics.median(
        max(each) for each in zip(*world.all_gather_object(taken), strict=True)
    )


def measure_rates(world: World, batch: int, times: int) -> Rates:
    """Return what this machine reaches, all ranks at work at once."""
    images = torch.randn(8, 128, 28, 28, requires_grad=True)
    kernel = torch.randn(128, 128, 3, 3, requires_grad=True)

    def convolve() -> None:
        F.conv2d(images, kernel, padding=1).backward(torch.ones(8, 128, 28, 28))

    flops = 3 * 2 * 8 * 128 * 128 * 9 * 28 * 28
    backbone = flops / median_seconds(convolve, times, world)
    x, rows = torch.randn(batch, EMBEDDING), torch.randn(8192, EMBEDDING)
    product = 2 * batch * 8192 * EMBEDDING
    product_rate = product / median_seconds(lambda: x @ rows.T, times, world)
    source = torch.ones(2**24)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / median_seconds(lambda: target.copy_(source), times, world)
    if world.size == 1:
        return Rates(product_rate, backbone, copy, copy)
    group = world.backbone_group
    assert group is not None
    short, long = torch.ones(2), torch.ones(2**22)
    latency = median_seconds(lambda: dist.all_reduce(short, group=group), times, world)
    seconds = median_seconds(lambda: dist.all_reduce(long, group=group), times, world)
    sent = 2 * (world.size - 1) / world.size * long.nbytes
    return Rates(product_rate, backbone, copy, copy, sent / seconds, latency=latency / 2)


def count_bytes(counted: Counter[str]) -> Callable[[], None]:
    """Add the bytes that this rank hands to collectives to `counted`; return what stops it."""
    given = {"all_reduce": 0, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
    plain = {name: getattr(dist, name) for name in given}

    def counting(name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        counted[name] += arguments[given[name]].nbytes
        return call(*arguments, **named)

    for name, call in plain.items():
        setattr(dist, name, functools.partial(counting, name, call))

    def stop() -> None:
        for name, call in plain.items():
            setattr(dist, name, call)

    return stop


def time_head(world: World, classes: int, batch: int, times: int) -> float:
    """Return the seconds of a head's step, update of the rows included."""
    margin = build_margin("arcface", scale=64.0, margin=0.5)
    # float32 and no kept terms: what the plan counts.
    execution = Execution(products="float32")
    head = ShardedHead(classes, EMBEDDING, margin, execution=execution, group=world.head_group)
    rows = RowSGD(head, lr=0.1, momentum=0.9, weight_decay=5e-4)
    x = torch.randn(batch, EMBEDDING, requires_grad=True)
    labels = torch.randint(classes, (batch,))

    def step() -> None:
        x.grad = None
        head(x, labels).loss.backward()
        rows.step()

    return median_seconds(step, times, world)


def compare(world: World, model: str, image: int, batch: int, classes: int, times: int) -> dict:
    """Return predictions and measurements of a step and its parts."""
    ranks = world.size
    rates = measure_rates(world, batch * ranks, times)
    head = plan_head(classes, ranks=ranks, embedding=EMBEDDING, batch=batch)
    backbone = plan_backbone(model, image=image, embedding=EMBEDDING, batch=batch, ranks=ranks)
    time_of = step_time(rates, head, backbone, ranks, batch * ranks)
    assert time_of is not None
    parts = time_of.parts
    predicted = {"step": time_of.total, "backbone": parts["backbone"]}
    predicted["head"] = sum(v for name, v in parts.items() if name.startswith("head's"))
    settings = {
        "model.name": model,
        "model.image_shape": (3, image, image),
        "model.emb_size": EMBEDDING,
        "train.batch_size": batch,
        "head.class_num": classes,
        "head.products": "float32",
    }
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingRun(world, folder, settings)
        measured = {"step": median_seconds(training.step, times, world)}
        counted: Counter[str] = Counter()
        stop = count_bytes(counted)
        training.step()
        stop()
        images = torch.randn(batch, 3, image, image)
        ones = torch.ones(batch, EMBEDDING)
        network = training.run.network

        def pass_through() -> None:
            network(images).backward(ones)

        measured["backbone"] = median_seconds(pass_through, times, world)
    measured["head"] = time_head(world, classes, batch, times)
    facts: dict[str, Any] = {"given": dict(counted)}
    if ranks > 1:
        transfers = backbone.transfers(ranks)
        assert rates.network is not None
        predicted["gradients' sum"] = total_seconds(transfers, ranks, rates.network, rates.latency)
        buffers = [torch.ones(one.payload // 4) for one in transfers]
        group = world.backbone_group

        def reduce() -> None:
            for buffer in buffers:
                dist.all_reduce(buffer, group=group)

        measured["gradients' sum"] = median_seconds(reduce, times, world)
        facts["planned"] = planned_bytes(head, backbone, ranks)
    return {
        "model": model,
        "image": image,
        "batch": batch,
        "classes": classes,
        "ranks": ranks,
        "rates": {name: value for name, value in vars(rates).items() if value is not None},
        "parts": parts,
        "hidden": time_of.hidden,
        "predicted": predicted,
        "measured": measured,
        **facts,
    }


def planned_bytes(head: Any, backbone: Any, ranks: int) -> dict[str, int]:
    """Return the bytes that a rank hands over in a step: its block of a gather, else the whole tensor."""
    names = {
        "all-reduce": "all_reduce",
        "all-gather": "all_gather_into_tensor",
        "reduce-scatter": "reduce_scatter_tensor",
    }
    planned: Counter[str] = Counter()
    for one in (*head.transfers, *backbone.transfers(ranks)):
        share = ranks if one.collective == "all-gather" else 1
        planned[names[one.collective]] += one.payload // share
    return dict(planned)


def main() -> None:
    """Compare a large backbone with few classes, and a small one with many."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5, help="calls of which the median is taken")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time that the processor worked for this process: for one rank on a busy machine",
    )
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.cpu_time:
        global clock
        clock = time.process_time
    world = World.from_environment("cpu")
    if world.is_main:
        print("| run | ranks | part | predicted ms | measured ms | predicted / measured |")
        print("|---|---|---|---|---|---|")
    for model, image, batch, classes in (
        ("ResNet18", 112, 8, 10_000),
        ("SmallResNet", 32, 64, 100_000),
    ):
        facts = compare(world, model, image, batch, classes, arguments.times)
        if not world.is_main:
            continue
        for name, measured in facts["measured"].items():
            predicted = facts["predicted"][name]
            print(
                f"| {model}, {batch} images, {classes:,} classes | {world.size} | {name} | "
                f"{predicted * 1000:,.1f} | {measured * 1000:,.1f} | {predicted / measured:.2f} |",
                flush=True,
            )
        if world.size > 1:
            print(f"bytes handed to collectives: {facts['given']}, planned {facts['planned']}")
        if arguments.output is not None:
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
    world.close()


if __name__ == "__main__":
    main()
