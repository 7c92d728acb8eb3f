"""The verb: some steps of the real training, timed and traced; the model is thrown away."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path

import torch

from plsc.config import Options
from plsc.config.option import shown_value
from plsc.errors import OptionError, TrainingError
from plsc.marks import Part
from plsc.parallel.world import World
from plsc.profiling.advice import advice_of
from plsc.profiling.collectives import collectives_of
from plsc.profiling.result import ProfileResult, RankTimes, combine
from plsc.profiling.table import render
from plsc.profiling.watch import TRACED, ProfileWatch
from plsc.train.build import Run, UserParts, build_run
from plsc.train.find import open_to_resume
from plsc.train.logs import METRICS_NAME, RunLog
from plsc.train.loop import Trainer
from plsc.train.randomness import seed_generators
from plsc.train.resume import resolve_run
from plsc.train.saving import Saver

MOST_STEPS = 1000
_ENDLESS = 2**31
_OURS = re.compile(r"trace-rank\d+\.json\.gz|operators-rank\d+\.txt|profile\.(txt|json)")


def run_profile(
    options: Options, world: World, user: UserParts, *, steps: int, output: str | os.PathLike[str]
) -> ProfileResult:
    """Train some steps and return where their time goes; the main rank prints it. A collective.

    Writes trace-rank<r>.json.gz and operators-rank<r>.txt on every rank, profile.txt and profile.json on the
    main one, into `output`. Nothing is evaluated or saved. From `checkpoint.load_dir` come the options, as
    when a run resumes, but not the weights: they do not change the time.

    Raises OptionError for `steps` or `output`, and whatever training raises.
    """
    folder = _check(steps, output)
    # A network of the user's is trained as a copy.
    user = replace(user, model=copy.deepcopy(user.model))
    checkpoint = open_to_resume(options.resolve(), world)
    config = resolve_run(options, checkpoint, world.size, user.model)
    # The folder is refused where every folder is a class.
    config = config.changed({"train.with_test": False, "checkpoint.save_dir": str(folder)})
    run = build_run(config, world, user, checkpoint)
    _clear(folder, world)
    seed_generators(world, config.train.seed)
    watch = _train(run, steps, folder)
    return _report(run, watch, steps, folder)


def _train(run: Run, steps: int, output: Path) -> ProfileWatch:
    watch = ProfileWatch(run, steps)
    run.save_dir = output  # of what the loop lists beside the checkpoints
    run.options = run.options.changed({"train.steps": watch.total, "train.epochs": _ENDLESS})
    log = _QuietLog(output, run.world.is_main, 0, watch.total)
    if run.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.world.device)
    try:
        Trainer(run, log, _NoSaver(), watch).train()
    finally:
        watch.abandon()
        log.close()
        (output / METRICS_NAME).unlink(missing_ok=True)
    return watch


def _report(run: Run, watch: ProfileWatch, steps: int, output: Path) -> ProfileResult:
    world = run.world
    memory = _peak_memory(world.device)  # before the trace is worked up
    watch.tracer.write(output, world.rank)
    device = watch.timeline.device_nanoseconds()
    mine = RankTimes(
        host=_milliseconds(watch.timeline.host_nanoseconds(), steps),
        device=None if device is None else _milliseconds(device, steps),
        step=watch.timeline.whole_nanoseconds() / 1e6 / steps,
        plain=sum(watch.plain) * 1e3 / steps,
        traced=sum(watch.traced) * 1e3 / TRACED,
        images_per_second=watch.images / watch.seconds,
        memory=memory,
        reading=watch.meter.reading(),
    )
    ranks = world.all_gather_object(mine)
    result = combine(ranks, world.device.type, steps, output)
    collectives = collectives_of(watch.tracer.events(), TRACED) if world.is_main else None
    result.collectives = world.broadcast_object(collectives)
    result.advice = advice_of(result, ranks, run)
    if world.is_main:
        text = render(result)
        _write(output, text, result)
        print(text)
    world.barrier()  # when it returns, all files are there
    return result


def _check(steps: int, output: str | os.PathLike[str]) -> Path:
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        raise OptionError(f"steps is {steps!r}; expected a whole number from 1 to {MOST_STEPS}")
    if not isinstance(output, (str, os.PathLike)) or not str(output):
        raise OptionError(f"output is {output!r}; expected the path of a folder")
    folder = Path(output)
    try:
        folder.stat()
    except FileNotFoundError:
        return folder
    except (OSError, ValueError) as error:  # a name that is too long, or has a zero byte
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            f"output is {shown_value(str(output))}: {reason}; choose another"
        ) from error
    if not folder.is_dir():
        raise OptionError(f"output is {folder}, which is no folder; choose another")
    return folder


def _clear(output: Path, world: World) -> None:
    """Make the folder; what an earlier profile of more ranks left there goes."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path in output.iterdir():  # every rank: each machine may have a folder of its own
            if _OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise OptionError(f"output is {output}: {error.strerror}; choose another folder") from error
    world.barrier()


def _write(output: Path, text: str, result: ProfileResult) -> None:
    try:
        (output / "profile.txt").write_text(text + "\n", encoding="utf-8")
        plain = json.dumps(result.as_dict(), indent=1)
        (output / "profile.json").write_text(plain + "\n", encoding="utf-8")
    except OSError as error:
        raise TrainingError(
            f"cannot write the profile to {output}: {error.strerror}; see to the folder"
        ) from error


def _milliseconds(nanoseconds: dict[Part, int], steps: int) -> dict[Part, float]:
    return {part: time / 1e6 / steps for part, time in nanoseconds.items()}


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes that were in use: tensors on a GPU, or the process, without its workers."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _QuietLog(RunLog):
    """Writes its lines to a file, as in training, and tells the terminal nothing."""

    def say(self, text: str) -> None:
        """Say nothing."""

    def plot(self) -> None:
        """Draw nothing."""


class _NoSaver(Saver):
    """Saves nothing."""

    def __init__(self) -> None:
        self.last = None
        self.best = None

    def save(self, name: str, metrics: dict[str, float], *, wait: bool = False) -> None:
        """Save nothing."""

    def is_done(self) -> bool:
        """Nothing is under way."""
        return True

    def settle(self) -> None:
        """There is nothing to wait for."""

    def close(self, seconds: float | None = None) -> list[Path]:
        """There is nothing to send."""
        return []
