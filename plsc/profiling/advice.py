"""What a profile suggests: a line for each part that takes more than it should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from plsc.errors import OptionError, as_worded
from plsc.marks import Part
from plsc.profiling.result import ProfileResult, RankTimes
from plsc.train.advice import advise
from plsc.train.build import Run, check_combinations
from plsc.train.precision import head_products

_MUCH_HEAD = 0.4
_MUCH_BACKBONE = 0.5
_MUCH_COMMUNICATION = 0.15
_MUCH_WAITING = 0.1
_MUCH_OPTIMIZER = 0.15
_MUCH_COPYING = 0.1
_MUCH_LOGGING = 0.05
_MOST_KEPT = 1024.0  # MiB


def advice_of(result: ProfileResult, ranks: Sequence[RankTimes], run: Run) -> list[str]:
    """Return the lines, the same on all ranks."""
    lines = []
    data = advise([one.reading for one in ranks], run.options.data)
    if data:
        lines.append(data)
    lines += [as_worded(line) for line in _lines(result, ranks, run)]
    return lines


def _lines(result: ProfileResult, ranks: Sequence[RankTimes], run: Run) -> Iterator[str]:
    options = run.options
    head, backbone = result.of_group("head"), result.of_group("backbone")
    if head >= _MUCH_HEAD:
        ways = "; ".join(_ways_of_head(run))
        yield f"head {head:.0%}: {ways or 'it does what it can; more ranks share the classes'}"
    if backbone >= _MUCH_BACKBONE:
        ways = "; ".join(_ways_of_backbone(run, ranks))
        if ways:
            yield f"backbone {backbone:.0%}: {ways}"
    exposed = result.of(Part.GRADIENTS)
    if exposed >= _MUCH_COMMUNICATION:
        yield (
            f"waiting for the sum of the gradients {exposed:.0%}: a larger batch a rank, or "
            f"set_micro_batches({options.train.micro_batches * 2}) with a batch twice as large, sums as many "
            "bytes for more images"
        )
    normalising = result.of(Part.BATCH_NORM)
    if normalising >= _MUCH_COMMUNICATION:
        yield (
            f"batch norm over the ranks {normalising:.0%}: two collectives a layer; with a larger batch "
            "a rank, set_sync_batch_norm(False) may do"
        )
    others = result.of(Part.GATHER, Part.REDUCE, Part.SCATTER)
    if others >= _MUCH_COMMUNICATION:
        yield (
            f"the head's collectives {others:.0%}: they move little, so the ranks wait for each other or for "
            "a slow network; fewer ranks of more threads, or a larger batch a rank"
        )
    if result.of(Part.CONTROL) >= _MUCH_WAITING:
        yield _slow_rank(result, ranks)
    if result.of_group("optimizer") >= _MUCH_OPTIMIZER:
        yield f"optimizer {result.of_group('optimizer'):.0%}: a larger batch makes fewer updates an epoch"
    if result.of(Part.COPY) >= _MUCH_COPYING:
        yield f"copying {result.of(Part.COPY):.0%}: {_way_of_copying(run)}"
    if result.of(Part.LOGGING) >= _MUCH_LOGGING:
        yield f"logging {result.of(Part.LOGGING):.0%}: set_log_period({options.train.log_period * 10})"


def _way_of_copying(run: Run) -> str:
    head = run.options.head
    if not head.offload:
        return "a reader that yields uint8 images moves a quarter of what floats are"
    ways = ["a smaller set_sample_ratio"]
    if head.row_dtype == "float32":
        ways.append("set_row_dtype('bfloat16')")
    return (
        f"class rows travel in each step; {' or '.join(ways)} moves fewer bytes, set_head_offload(False) "
        "none where the device has room for them"
    )


def _ways_of_head(run: Run) -> Iterator[str]:
    options, ranks = run.options.head, run.world.size
    if not options.loss_type.startswith("dist_"):
        yield f"set_loss_type('dist_{options.loss_type}') makes no matrix of all logits"
        return
    if head_products(run.options) == "float32":
        yield "set_head_products('bfloat16')"
    batch = run.options.train.global_batch_size or run.options.train.batch_size * ranks
    needed = batch * -(-run.head.class_num // ranks) * options.sub_centers * 2 / 2**20
    if options.keep_mb < needed <= _MOST_KEPT:
        yield f"set_head_keep_mb({needed:.0f}) saves the second pass a product"
    if options.kernels == "torch":
        yield "set_head_kernels('auto')"
    if options.sample_ratio == 1:
        yield "set_sample_ratio(0.1) lets a tenth of the classes take part"


def _ways_of_backbone(run: Run, ranks: Sequence[RankTimes]) -> Iterator[str]:
    mine = ranks[0].reading
    beside = sum(one.reading.host == mine.host for one in ranks)
    threads, free = torch.get_num_threads(), mine.cores // beside
    if run.world.device.type == "cpu" and threads < free:
        yield f"it computes on {threads} of {free} cores a rank: set_cpu_threads({free})"
    is_plain = run.options.precision.mode == "float32"
    if is_plain and _has_fast_bfloat16(run) and _is_allowed(run, "precision.mode", "bfloat16"):
        yield "set_precision('bfloat16')"
    if not run.options.speed.compile and _is_allowed(run, "speed.compile", True):
        yield "set_compile(True)"
    if run.options.parallel.backbone == "sharded" and run.world.size > 1:
        yield "set_backbone_parallel('replicated') gathers no parameters, where the device has room for them"


def _is_allowed(run: Run, path: str, value: Any) -> bool:
    """Whether the run's other options go with this one."""
    try:
        check_combinations(run.options.changed({path: value}), run.world.size)
    except OptionError:
        return False
    return True


def _has_fast_bfloat16(run: Run) -> bool:
    if run.world.device.type == "cuda":
        return torch.cuda.get_device_capability(run.world.device) >= (8, 0)
    known = getattr(torch.cpu, "_is_amx_tile_supported", None)  # torch has no public name for it
    return known is not None and bool(known())


def _slow_rank(result: ProfileResult, ranks: Sequence[RankTimes]) -> str:
    waits = [one.host.get(Part.CONTROL, 0.0) for one in ranks]
    slowest = waits.index(min(waits))
    times = ranks[slowest].host
    longer = {
        part: time - sum(one.host.get(part, 0.0) for one in ranks) / len(ranks)
        for part, time in times.items()
        if part.group != "communication"
    }
    where = max(longer, key=lambda part: longer[part])
    return (
        f"the ranks wait for each other {result.of(Part.CONTROL):.0%}: rank {slowest} is the last to come; "
        f"it takes longer than the others in '{where.value}'"
    )
