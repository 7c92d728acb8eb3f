"""`plsc profile`: measure where the time of a training step goes, with torch.profiler on real steps."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import os
import re
import resource
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from plsc.config import Options
from plsc.config.option import shown_value
from plsc.errors import OptionError, TrainingError
from plsc.parallel.world import World
from plsc.run.callbacks import Callback, Callbacks, Context
from plsc.run.run import Run, build_run
from plsc.run.settle import settle
from plsc.run.user_parts import UserParts
from plsc.spans import PREFIX
from plsc.state.find import open_to_resume
from plsc.state.snapshot import seed_generators
from plsc.train.loop import Trainer

logger = logging.getLogger(__name__)
WARM_UP = 5  # steps in which memory is allocated, workers fill their queues and code is compiled
TRACED = 10  # maximum number of traced steps: larger traces open slowly
MOST_STEPS = 1000
OTHER = "other"
_ENDLESS = 2**31
_OURS = re.compile(r"trace-rank\d+\.json\.gz|operators-rank\d+\.txt|profile\.(txt|json)")


@dataclass(frozen=True)
class Phase:
    """Time of one phase of a step.

    Attributes:
        milliseconds: mean over ranks and steps; on CUDA, of the kernels that the phase launches.
        share: share of the step.
        least, most: smallest and largest mean of a rank, in milliseconds.
        host: mean host time in milliseconds; equal to `milliseconds` on a CPU.
    """

    name: str
    milliseconds: float
    share: float
    least: float
    most: float
    host: float


@dataclass(frozen=True)
class ProfileResult:
    """The result of `plsc profile`. Milliseconds are means over ranks and steps.

    Attributes:
        steps: number of steps that were timed without the profiler.
        step: milliseconds per step without the profiler.
        traced_step: milliseconds per step with the profiler.
        phases: phases of a traced step, longest first.
        memory: peak memory in bytes, maximum over the ranks.
        operators: table of operators of rank 0, from torch.profiler.
        folder: folder of the output files.
    """

    device: str
    ranks: int
    steps: int
    step: float
    traced_step: float
    phases: list[Phase]
    images_per_second: float
    memory: int
    operators: str
    folder: Path

    def of(self, *names: str) -> float:
        """Return the total share of these phases, such as ``data``, in a step."""
        return sum(phase.share for phase in self.phases if phase.name in names)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "folder": str(self.folder)}

    def render(self) -> str:
        """Return the table of phases and torch's table of operators."""
        on_gpu = self.device == "cuda"
        width = max(len(phase.name) for phase in self.phases)
        lines = [
            f"{self.steps} steps on {self.ranks} rank{'s' * (self.ranks > 1)} ({self.device}): "
            f"{self.step:.2f} ms per step ({self.traced_step:.2f} with the profiler), "
            f"{self.images_per_second:,.0f} images/s",
            f"peak {'device' if on_gpu else 'process'} memory per rank: {self.memory / 2**20:,.0f} MiB",
            "",
            f"{'phase of a step':{width}} {'ms':>9} {'share':>7} {'min ms':>9} {'max ms':>9}"
            + (f" {'host ms':>9}" if on_gpu else ""),
        ]
        for phase in self.phases:
            line = f"{phase.name:{width}} {phase.milliseconds:9.2f} {phase.share:7.1%}"
            line += f" {phase.least:9.2f} {phase.most:9.2f}"
            lines.append(line + (f" {phase.host:9.2f}" if on_gpu else ""))
        traces = f"traces (ui.perfetto.dev, chrome://tracing) and operators: {self.folder}"
        return "\n".join([*lines, "", self.operators.rstrip(), "", traces])


def run_profile(
    options: Options, world: World, user: UserParts, *, steps: int, output: str | os.PathLike[str]
) -> ProfileResult:
    """Run and profile some training steps, and print the result on rank 0; a collective.

    Writes trace-rank<r>.json.gz and operators-rank<r>.txt for every rank, and profile.txt and profile.json,
    to `output`. Nothing is evaluated or saved. The options of `checkpoint.load_dir` are used as in a resumed
    run, but its weights are not loaded: they do not change the time.

    Raises OptionError for invalid `steps` or `output`, and all errors of training.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        raise OptionError(
            f"the number of profiled steps is {steps!r}; expected an integer from 1 to {MOST_STEPS}"
        )
    folder = _folder(output)
    user = replace(user, model=copy.deepcopy(user.model))  # the user's network is not trained
    checkpoint = open_to_resume(options, world)
    config = settle(options, checkpoint, world.size, user.model)
    # With save_dir set to this folder, building the run checks that it does not become a class folder.
    config = config.changed({"train.with_test": False, "checkpoint.save_dir": str(folder)})
    run = build_run(config, world, user, checkpoint)
    _clear(folder, world)
    seed_generators(world, config.train.seed)
    watch = _train(run, steps, folder)
    return _report(watch, world, folder)


class _ProfilingWatch(Callback):
    """Times and traces the steps of a run, as a callback: warm-up, timed steps, traced steps.

    One extra step follows the timed steps, while the profiler starts. Another one follows the traced steps,
    so that the last trace ends with its step and not with the run.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.steps = steps
        self.traced = min(steps, TRACED)
        self.total = WARM_UP + steps + 1 + self.traced + 1
        self.images = 0
        self.seconds = 0.0
        self.memory = 0
        self._device = device
        self._made = 0
        self._is_open = False
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        before = schedule(wait=WARM_UP + steps, warmup=1, active=self.traced, repeat=1)
        self.profile = profile(activities=activities, schedule=before)

    def step_start(self, context: Context) -> None:
        """Start a step. At the end of an epoch, the loop calls this twice before a step is made."""
        if self._is_open:
            return
        self._is_open = True
        if self._made == 0:
            self.profile.start()
        else:
            self.profile.step()
        if self._made == WARM_UP:
            self.seconds -= self._now()
        elif self._made == WARM_UP + self.steps:
            self.seconds += self._now()
            self.memory = _peak_memory(self._device)

    def after_step(self, context: Context) -> None:
        """Finish a step."""
        if WARM_UP <= self._made < WARM_UP + self.steps:
            self.images += context.output.batch
        self._made += 1
        self._is_open = False

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _train(run: Run, steps: int, output: Path) -> _ProfilingWatch:
    device = run.world.device
    watch = _ProfilingWatch(device, steps)
    endless = {"train.steps": watch.total, "train.epochs": _ENDLESS}
    run.options, run.total_steps = run.options.changed(endless), watch.total
    run.callbacks = Callbacks([*run.callbacks.all, watch], run.network)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        Trainer(run).train()
    finally:
        watch.profile.stop()
    return watch


def _report(watch: _ProfilingWatch, world: World, output: Path) -> ProfileResult:
    on_gpu = world.device.type == "cuda"
    trace = output / f"trace-rank{world.rank}.json.gz"
    averages = watch.profile.key_averages()
    averages[:] = [one for one in averages if not one.key.startswith((PREFIX, "ProfilerStep"))]
    operators = functools.partial(
        averages.table,
        sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total",
        max_name_column_width=40,
    )
    with _writing(output):
        watch.profile.export_chrome_trace(str(trace))
        (output / f"operators-rank{world.rank}.txt").write_text(operators(row_limit=40), "utf-8")
    host, device = phases_of(watch.profile.events(), watch.traced)
    step = 1e3 * watch.seconds / watch.steps
    mine = (host, device if on_gpu else host, step, watch.images / watch.seconds, watch.memory)
    hosts, mains, step_times, rates, memories = zip(*world.all_gather_object(mine), strict=True)
    traced_step = fmean(sum(times.values()) for times in hosts)
    result = ProfileResult(
        device=world.device.type,
        ranks=world.size,
        steps=watch.steps,
        step=fmean(step_times),
        traced_step=traced_step,
        phases=_over_ranks(mains, hosts, traced_step),
        images_per_second=fmean(rates),
        memory=max(memories),
        operators=world.broadcast_object(operators(row_limit=10)),
        folder=output,
    )
    if world.is_main:
        text = result.render()
        with _writing(output):
            (output / "profile.txt").write_text(text + "\n", "utf-8")
            (output / "profile.json").write_text(json.dumps(result.as_dict(), indent=1) + "\n")
        logger.info(text)
    world.barrier()  # afterwards, the files of all ranks exist
    return result


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write the profile to {output}: {error.strerror or error}; free space there, or "
            "choose another output"
        ) from error


class _Span(NamedTuple):
    start: float
    stop: float
    name: str


def phases_of(events: Iterable[Any], steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the milliseconds per step of each phase: on the host, and of the kernels that it launches.

    events: FunctionEvents of torch.profiler over `steps` steps. Time belongs to the innermost open span, so
    host times add up to the step; time outside of all spans is ``other``.
    """
    spans, launches, kernels = [], {}, []
    for event in events:
        start, stop = float(event.time_range.start), float(event.time_range.end)
        if event.device_type.name == "CPU":
            if event.name.startswith("ProfilerStep"):
                spans.append(_Span(start, stop, OTHER))
            elif event.name.startswith(PREFIX):
                spans.append(_Span(start, stop, event.name.removeprefix(PREFIX)))
            elif event.name.startswith("cu"):  # cudaLaunchKernel, cuLaunchKernelEx, cudaMemcpyAsync
                launches[event.id] = start
        elif not event.is_user_annotation:
            kernels.append((event.id, stop - start))
    pieces = _cut(spans)
    host: defaultdict[str, float] = defaultdict(float)
    device: defaultdict[str, float] = defaultdict(float)
    for piece in pieces:
        host[piece.name] += (piece.stop - piece.start) / 1000 / steps
    starts = [piece.start for piece in pieces]
    for number, took in kernels:
        index = bisect_right(starts, launches.get(number, 0.0)) - 1
        device[pieces[index].name if index >= 0 else OTHER] += took / 1000 / steps
    return dict(host), dict(device)


def _cut(spans: Sequence[_Span]) -> list[_Span]:
    """Split the spans into consecutive pieces, each with the name of the innermost open span."""
    waiting = sorted(spans, key=lambda span: (-span.start, span.stop))
    pieces: list[_Span] = []
    now_open: list[_Span] = []
    for start, stop in itertools.pairwise(sorted({edge for span in spans for edge in span[:2]})):
        while waiting and waiting[-1].start <= start:
            now_open.append(waiting.pop())
        now_open = [span for span in now_open if span.stop > start]
        if now_open:
            pieces.append(_Span(start, stop, now_open[-1].name))
    return pieces


def _over_ranks(
    mains: Sequence[dict[str, float]], hosts: Sequence[dict[str, float]], step: float
) -> list[Phase]:
    phases = []
    for name in {name for times in hosts for name in times}:
        each = [times.get(name, 0.0) for times in mains]
        host = fmean([times.get(name, 0.0) for times in hosts])
        phases.append(Phase(name, fmean(each), fmean(each) / step, min(each), max(each), host))
    return sorted(phases, key=lambda phase: -phase.milliseconds)


def _folder(output: str | os.PathLike[str]) -> Path:
    reason: object = "it is not a folder"
    try:
        folder = Path(output)
        folder.stat()
        if folder.is_dir() and output:
            return folder
    except FileNotFoundError:
        return folder
    except (OSError, ValueError, TypeError) as error:  # a name that is too long, or has a zero byte
        reason = getattr(error, "strerror", None) or error
    raise OptionError(f"output is {shown_value(output)}: {reason}; choose another folder")


def _clear(output: Path, world: World) -> None:
    """Create the folder; delete the files of an earlier profile."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path in output.iterdir():  # on every rank: each machine may have its own folder
            if _OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise OptionError(f"output is {output}: {error.strerror}; choose another folder") from error
    world.barrier()


def _peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on a GPU, else of the process without its workers."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
