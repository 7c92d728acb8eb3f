"""The training that benchmarks/kill.py kills: two ranks whose journal tells what was under way.

The journal is written from outside the product: its functions are wrapped. A line is one write to a
file opened for appending, so what a rank has written stays when it is killed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import plsc.checkpoint.retention
import plsc.train.saving
from plsc import Entry
from plsc.checkpoint import read_manifest
from plsc.storage.store import Store

SAVE, UPLOAD, DELETION, REMOTE_DELETION = "save", "upload", "retention", "remote retention"
_FILE_EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"})


@dataclass(frozen=True)
class Job:
    """A training. load: the checkpoint to go on from, a path or a URL."""

    dataset: Path
    local: Path
    remote: str
    classes: int
    steps: int
    save_every: int
    load: str | None = None
    is_quiet: bool = False


@dataclass(frozen=True)
class Plan:
    """When a run is to die: in the `nth` time that rank `actor` is in the phase.

    point: at so many file operations of that phase, or pieces sent: the rank kills itself. delay: so many
    seconds after the phase began: benchmarks/kill.py kills. whole: the launcher and all ranks die at once,
    else the rank alone. wait: nothing is counted before an upload has ended.
    """

    phase: str
    nth: int
    actor: int
    point: int | None
    delay: float | None
    whole: bool
    wait: bool


class Journal:
    """One line of JSON for what begins and ends; kills this process where the plan says so."""

    def __init__(self, path: Path, plan: Plan | None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._rank = int(os.environ["RANK"])
        self._plan = plan if plan and plan.actor == self._rank else None
        self._is_armed = plan is None or not plan.wait
        self._begun: Counter[str] = Counter()
        self._points: Counter[str] = Counter()
        self._phases: dict[int, str] = {}  # of the threads that are in one
        self.write("start", pid=os.getpid())

    def write(self, event: str, **facts: object) -> None:
        """Append a line."""
        line = {"time": time.monotonic(), "rank": self._rank, "event": event, **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    @contextlib.contextmanager
    def inside(self, phase: str, **facts: object) -> Iterator[None]:
        """Note a phase of this thread."""
        if self._is_armed:
            self._begun[phase] += 1
        self._points[phase] = 0
        self.write("begin", phase=phase, nth=self._begun[phase], **facts)
        thread = threading.get_ident()
        self._phases[thread] = phase
        outcome = "failed"
        try:
            yield
            outcome = "end"
        finally:
            del self._phases[thread]
            self.write(outcome, phase=phase, points=self._points[phase], **facts)
        self._is_armed = self._is_armed or phase == UPLOAD

    def point(self, phase: str | None, what: str) -> None:
        """A moment at which a run can be killed."""
        plan = self._plan
        if phase is None:
            return
        self._points[phase] += 1
        if plan is None or plan.point is None or phase != plan.phase:
            return
        if (self._begun[phase], self._points[phase]) == (plan.nth, plan.point):
            self.write("kill", phase=phase, point=plan.point, at=what)
            os.killpg(0, signal.SIGKILL) if plan.whole else os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # not a step further

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Count the file operations of a thread that is in a phase."""
        if event in _FILE_EVENTS and self._phases:
            phase = self._phases.get(threading.get_ident())
            if phase is not None:
                self.point(phase, f"{event} {Path(str(arguments[0])).name}")

    def phase_here(self) -> str | None:
        """Return the phase of this thread."""
        return self._phases.get(threading.get_ident())


def train(job: Job, journal_path: Path, plan: Plan | None) -> None:
    """Train on this rank; for the launcher."""
    journal = Journal(journal_path, plan)
    _watch(journal)
    ins = Entry()
    ins.set_dataset_dir(str(job.dataset))
    ins.set_class_num(job.classes)
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((3, 16, 16))
    ins.set_emb_size(128)
    ins.set_train_batch_size(8)
    ins.set_train_epochs(1000)
    ins.set_train_steps(job.steps)
    ins.set_save_every_n_steps(job.save_every)
    ins.set_save_every_n_epochs(0)
    ins.set_max_last_checkpoint_num(2)
    ins.set_save_top_k(0)
    ins.set_num_workers(0)
    ins.set_model_save_dir(str(job.local))
    ins.set_upload_dir(job.remote)
    ins.set_store_timeout(120)
    if job.load is not None:
        ins.set_checkpoint_dir(job.load)
    ins.train()
    journal.write("complete")


def launch(job: Job, journal: Path, plan: Plan | None, output: Path) -> int:
    """Start two ranks under torchrun's own agent, in a process group of their own; return the agent's pid.

    The agent and the ranks are forked from this process, which has imported torch: that takes seconds,
    else, and a run here lives for few.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        _run_agent(job, journal, plan)
        status = 0
    except BaseException as error:
        print(f"agent: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _run_agent(job: Job, journal: Path, plan: Plan | None) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=f"kill-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, train)(job, journal, plan)


def _watch(journal: Journal) -> None:
    """Have the journal told of what the product does."""
    sys.addaudithook(journal.audit)

    def wrap(module: Any, name: str, phase: str, facts: Callable[..., dict[str, object]]) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with journal.inside(phase, **facts(*args)):
                return original(*args, **kwargs)

        setattr(module, name, wrapped)

    def of_save(folder: Path, name: str, *rest: Any) -> dict[str, object]:
        return {"name": name, "step": rest[0].manifest.step}

    def of_upload(folder: Path, *rest: Any) -> dict[str, object]:
        return {"name": folder.name, "step": read_manifest(folder).step}

    wrap(plsc.train.saving, "save_checkpoint", SAVE, of_save)
    wrap(plsc.train.saving, "upload", UPLOAD, of_upload)
    withdraw = plsc.checkpoint.retention.withdraw

    @functools.wraps(withdraw)
    def watched(store: Store, name: str) -> None:
        with journal.inside(REMOTE_DELETION if store.is_remote else DELETION, name=name):
            withdraw(store, name)

    plsc.checkpoint.retention.withdraw = watched
    for name in ("make_folder", "put", "write", "rename", "delete"):
        setattr(Store, name, _with_points(getattr(Store, name), name, journal))


def _with_points(original: Callable[..., Any], name: str, journal: Journal) -> Callable[..., Any]:
    """Return a method of a store with points before it, after it, and at each piece that is sent."""

    @functools.wraps(original)
    def method(store: Store, *args: Any) -> Any:
        phase = journal.phase_here()
        what = f"{name} {' '.join(one for one in args if isinstance(one, str))}"
        journal.point(phase, f"before {what}")
        if name == "put" and len(args) > 2 and args[2] is not None:
            on_bytes = args[2]

            def told(count: int) -> None:
                on_bytes(count)
                journal.point(phase, f"within {what}")

            args = (*args[:2], told)
        answer = original(store, *args)
        journal.point(phase, f"after {what}")
        return answer

    return method


def plan_as_dict(plan: Plan) -> dict[str, object]:
    """Return a plan for the log, without what does not apply."""
    return {key: value for key, value in asdict(plan).items() if value is not None}
