"""What a run reports of its options: settings without effect, likely mistakes, a better worker count."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from plsc.config import Config, find_option
from plsc.config.data import DataOptions
from plsc.data.batch import Batch
from plsc.data.loader import SourceLoader
from plsc.parallel.backbone import plain_name
from plsc.parallel.machine import usable_cores
from plsc.parallel.world import World

_STEPS = ("step", "multi_step")
_FALLING = ("polynomial", "cosine", "exponential")
_SCALING = (
    "init_loss_scaling",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_ratio",
    "decr_ratio",
    "use_dynamic_loss_scaling",
)
SMALL_WAIT = 0.05  # of a step: below, nothing is said
SKIPPED_STEPS = 5  # at the start of a run and of an epoch: workers begin to read ahead then
MEASURED_STEPS = 40
_BUSY = 0.85  # of the cores' time: the rest is lost between threads that wait for each other
_SPARE = 1.1  # a worker's time for a batch varies
_PER_CORE = 4  # workers that wait for storage, a core


def idle_note(options: Config, made_with: Mapping[str, Any] | None = None) -> str:
    """Return a line that names the options without effect and why, or nothing if there are none.

    made_with: the arguments of the constructor of a custom network.

    One that is set to its default, as `set_mixed_precision` sets many, does not count.
    """
    found = [
        f"{path} ({reason})"
        for paths, reason in _unused(options, made_with)
        for path in paths
        if path in options.explicit and options.get(path) != find_option(path).default
    ]
    return f"note: set, but without effect in this run: {', '.join(found)}" if found else ""


def batch_note(global_batch: int, num_samples: int | None) -> str:
    """Return a line for a batch that shows the images of the set more than once, or nothing."""
    if num_samples is None or global_batch <= num_samples:
        return ""
    return (
        f"note: a step takes {global_batch} images, and the set has {num_samples}: it shows them "
        f"{global_batch / num_samples:.1f} times each"
    )


def frozen_note(network: nn.Module) -> str:
    """Return a line for a network of which nothing is trained, or nothing."""
    if any(parameter.requires_grad for parameter in network.parameters()):
        return ""
    return f"note: {plain_name(network)} has no trainable parameter; only the head is trained"


def threads_note(options: Config) -> str:
    """Return a line for more threads than there are cores, or nothing."""
    threads, cores = options.runtime.cpu_threads, usable_cores()
    if threads <= cores:
        return ""
    return (
        f"note: runtime.cpu_threads is {threads}, but this process may use {cores} core{'s' * (cores != 1)}: "
        "threads that wait for each other can make a step many times as slow"
    )


def _unused(
    options: Config, made_with: Mapping[str, Any] | None
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield options that this run does not look at, and the reason."""
    optim, precision, head = options.optim, options.precision, options.head
    if made_with is not None:
        paths = tuple(
            path
            for path in ("model.dropout", "model.neck")
            if made_with.get(path.removeprefix("model.")) != options.get(path)
        )
        yield paths, "the custom network was not made with it"
    has_own_rows = head.loss_type.startswith("dist_")
    schedule = f"optim.schedule is {optim.schedule}"
    if optim.schedule not in _STEPS:
        yield ("optim.step_boundaries", "optim.lr_decay_factor"), schedule
    if optim.schedule not in _FALLING:
        yield ("optim.decay_steps", "optim.end_lr_factor"), schedule
    if optim.schedule != "cosine":
        yield ("optim.cosine_cycles",), schedule
    if optim.schedule != "polynomial":
        yield ("optim.decay_power",), schedule
    if head.loss_type.removeprefix("dist_") in ("softmax", "normface"):
        yield ("head.margin_warmup_steps",), f"head.loss_type is {head.loss_type}"
    if ":" in optim.optimizer and not has_own_rows:
        yield ("optim.lr", "optim.weight_decay"), "the optimizer's factory decides"
    if optim.optimizer.lower() != "sgd" and not (has_own_rows and head.optimizer == "sgd"):
        yield ("optim.momentum", "optim.nesterov"), "no optimizer here is sgd"
    if optim.clip_norm == 0:
        yield ("optim.clip_scope",), "optim.clip_norm is 0"
    if options.memory.checkpoint_stages.strip() == "none":
        yield ("memory.checkpoint_every",), "memory.checkpoint_stages is none"
    if options.parallel.backbone == "replicated":
        units = ("parallel.shard_size", "parallel.shard_units")
        yield units, "parallel.backbone is replicated"
    else:
        yield ("speed.bucket_mb",), "parallel.backbone is sharded"
    mode = f"precision.mode is {precision.mode}"
    if precision.mode == "float32":
        yield ("precision.white_list", "precision.black_list"), mode
    if precision.mode != "float16" and precision.loss_scaling == "auto":
        yield tuple(f"precision.{name}" for name in _SCALING), mode


@dataclass(frozen=True)
class Reading:
    """What one rank measured: seconds, means over the measured steps.

    host: of ranks that share their cores; wait: of a step, for its batch; step: the whole step. read,
    read_cpu: what a worker took for a batch, and how long it computed for that. cpu: what the rank and its
    workers computed in a step. workers: how many there are. kind: threads, processes, reader, or sharded
    reader.
    """

    host: str
    cores: int
    workers: int
    kind: str
    wait: float
    step: float
    read: float
    read_cpu: float
    cpu: float

    @property
    def share(self) -> float:
        """How much of a step passes before its batch is there."""
        return self.wait / self.step if self.step > 0 else 0.0


class WaitMeter:
    """Measures what a `Reading` says, from batch to batch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.steps = 0
        self._wait = self._step = self._read = self._read_cpu = self._cpu = 0.0
        self._cpu_before = time.process_time()

    def begin_step(self) -> None:
        """A step begins."""
        self._cpu_before = time.process_time()

    def add(self, batch: Batch, wait: float, step: float) -> None:
        """Count a step: its batch, how long it waited for that, and how long it took in all."""
        self.steps += 1
        self._wait += wait
        self._step += step
        self._read += batch.seconds
        self._read_cpu += batch.cpu_seconds
        self._cpu += time.process_time() - self._cpu_before
        if _is_elsewhere(self._loader):
            self._cpu += batch.cpu_seconds

    def reading(self) -> Reading:
        """Return the means."""
        steps = max(1, self.steps)
        return Reading(
            host=platform.node(),
            cores=usable_cores(),
            workers=_workers(self._loader),
            kind=_kind(self._loader),
            wait=self._wait / steps,
            step=self._step / steps,
            read=self._read / steps,
            read_cpu=self._read_cpu / steps,
            cpu=self._cpu / steps,
        )


class WorkerAdvice:
    """Measures the first steps of a run and says once, if they wait for data, what to try."""

    def __init__(self, loader: Any, options: DataOptions, world: World) -> None:
        self._meter: WaitMeter | None = WaitMeter(loader)
        self._options = options
        self._world = world
        self._passed = 0

    def begin_step(self) -> None:
        """A step begins."""
        if self._meter is not None:
            self._meter.begin_step()

    def end_step(
        self, batch: Batch, images: int, step_in_epoch: int, wait: float, step: float
    ) -> str | None:
        """Count a step; return the advice once enough are measured, if there is something to say.

        step_in_epoch: counted from 1. A collective at the last measured step, which is the same on all ranks.
        """
        if self._meter is None:
            return None
        self._passed += 1
        if min(self._passed, step_in_epoch) > SKIPPED_STEPS:
            self._meter.add(batch, wait, step)
        if self._meter.steps < MEASURED_STEPS:
            return None
        readings = self._world.all_gather_object(self._meter.reading())
        self._meter = None
        return advise(readings, self._options)


def advise(readings: Sequence[Reading], options: DataOptions) -> str | None:
    """Return a line on what would make the ranks wait less for data; None if they hardly wait."""
    worst = max(readings, key=lambda reading: reading.share)
    if worst.share < SMALL_WAIT:
        return None
    beside = [reading for reading in readings if reading.host == worst.host]
    problem = (
        f"a step waits {_ms(worst.wait)} of its {_ms(worst.step)} ms ({worst.share:.0%}) for its batch; "
        f"{_count(worst.cores, 'core')} for {_count(len(beside), 'rank')} here, "
        f"{_count(worst.workers, 'worker')} a rank"
    )
    remedy = _remedy_of_reader(worst) if "reader" in worst.kind else None
    return f"{problem}; {remedy or _remedy(worst, beside, options)}"


def _remedy(worst: Reading, beside: Sequence[Reading], options: DataOptions) -> str:
    waits_for_storage = worst.read_cpu < worst.read / 2
    busy = sum(reading.cpu / reading.step for reading in beside) / worst.cores
    if busy < _BUSY or not worst.workers:
        most = max(1, worst.cores // len(beside)) * (_PER_CORE if waits_for_storage else 1)
        computing = max(worst.step - worst.wait, 1e-6)
        wanted = min(most, max(worst.workers + 1, math.ceil(_SPARE * worst.read / computing)))
        if wanted > worst.workers:
            return f"try set_num_workers({wanted})"
    if busy >= _BUSY:
        reason = "the cores are busy, so more workers would not help"
    elif waits_for_storage:
        computes = (
            f"computes for {_ms(worst.read_cpu)} of the {_ms(worst.read)} ms that a batch takes it"
        )
        reason = f"a worker {computes} and waits for the rest, so more of them would hardly help"
    else:
        reason = "there is a worker for each core already"
    return f"{reason}; what would: {_other_ways(waits_for_storage, worst.kind, options)}"


def _remedy_of_reader(worst: Reading) -> str:
    if not worst.workers:
        return "set_num_workers(1) lets the reader run ahead in a process of its own"
    shards = "" if worst.kind == "sharded reader" else "set_reader_shards_itself(True), or "
    return (
        "a generator runs in one process, whatever num_workers is; what would help: a cheaper reader, "
        f"{shards}a map-style Dataset, which several processes read"
    )


def _other_ways(waits_for_storage: bool, kind: str, options: DataOptions) -> str:
    ways = []
    if kind == "threads" and options.cache == "none":
        decoded = "" if waits_for_storage else " with set_cache_decoded(True)"
        ways.append(f"set_cache('memory'){decoded}")
    if waits_for_storage:
        ways.append("a faster disk, or one .rec instead of many files (plsc data convert)")
        if options.order == "global":
            ways.append("set_order('block')")
    elif kind == "threads":
        ways.append("images stored at the size that the network takes")
    else:
        ways.append("a cheaper transform or Dataset of your own")
        ways.append("images stored at the size that the network takes")
    return ", ".join(ways)


def _kind(loader: Any) -> str:
    if isinstance(loader, SourceLoader):
        return loader.kind
    return "sharded reader" if loader.shards_itself else "reader"


def _workers(loader: Any) -> int:
    if isinstance(loader, SourceLoader):
        return loader.num_workers
    return int(loader.ahead)


def _is_elsewhere(loader: Any) -> bool:
    """Whether other processes make the batches, whose time this one's clock does not count."""
    if isinstance(loader, SourceLoader):
        return loader.kind == "processes" and loader.num_workers > 0
    return bool(loader.ahead)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
