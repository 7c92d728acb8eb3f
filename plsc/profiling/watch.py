"""Looks on as the training loop makes its steps: some to warm up, some timed, some traced."""

from __future__ import annotations

import time
from enum import Enum, auto

from plsc.data.batch import Batch
from plsc.marks import no_recorder, set_recorder
from plsc.profiling.timeline import Timeline
from plsc.profiling.tracing import Tracer
from plsc.train.advice import WaitMeter
from plsc.train.build import Run

WARM_UP = 5  # steps: memory is allocated, workers read ahead, code is compiled
TRACED = 3  # steps: a trace of more is slow to look at, and says the same


class Kind(Enum):
    """What is done with a step."""

    PASSED_OVER = auto()
    PLAIN = auto()  # timed from outside alone
    MARKED = auto()  # split into its parts
    TRACED = auto()


def plan_steps(steps: int) -> list[Kind]:
    """Return what is done with each step of a run that measures so many.

    Plain and marked ones take turns: whatever else slows the machine down meets both. The last step is made
    so that the one before ends where a step ends, and not with the run.
    """
    return [
        *[Kind.PASSED_OVER] * WARM_UP,
        *[Kind.PLAIN, Kind.MARKED] * steps,
        Kind.PASSED_OVER,  # tracing starts
        *[Kind.TRACED] * TRACED,
        Kind.PASSED_OVER,
    ]


class ProfileWatch:
    """Times and traces the steps of a run, as a `StepWatch`.

    timeline: of the marked steps; plain, traced: seconds of the others; images, seconds: of all timed ones;
    meter: of their waiting for data.
    """

    def __init__(self, run: Run, steps: int) -> None:
        self.timeline = Timeline(run.world.device)
        self.tracer = Tracer(run.world.device)
        self.meter = WaitMeter(run.loader)
        self.plain: list[float] = []
        self.marked: list[float] = []
        self.traced: list[float] = []
        self.images = 0
        self._kinds = plan_steps(steps)
        self._starts_tracing = WARM_UP + 2 * steps
        self._made = 0
        self._is_open = False
        self._began = 0.0

    @property
    def total(self) -> int:
        """How many steps the run is to make."""
        return len(self._kinds)

    @property
    def seconds(self) -> float:
        """The time of all plain and marked steps."""
        return sum(self.plain) + sum(self.marked)

    def begin_step(self) -> None:
        """The step before ends, and the next one begins.

        A step goes on where none was made since the last call: an epoch had ended.
        """
        if self._is_open:
            return
        self._close()
        self._is_open = True
        self.meter.begin_step()
        kind = self._kinds[self._made]
        if self._made == self._starts_tracing:
            self.tracer.start()
        if kind is Kind.MARKED:
            set_recorder(self.timeline)
        elif kind is Kind.TRACED:
            set_recorder(self.tracer)
            self.tracer.next_step()
        self._began = time.perf_counter()
        if kind is Kind.MARKED:
            self.timeline.begin()

    def end_step(
        self, batch: Batch, images: int, step_in_epoch: int, wait: float, step: float
    ) -> str | None:
        """A step is made; what the loop does until the next one is a part of it."""
        if self._kinds[self._made] in (Kind.PLAIN, Kind.MARKED):
            self.images += images
            with no_recorder():
                self.meter.add(batch, wait, step)
        self._made += 1
        self._is_open = False
        return None

    def abandon(self) -> None:
        """Record no more, whatever happened."""
        set_recorder(None)
        self.tracer.stop()

    def _close(self) -> None:
        """End the step that was made last."""
        if not self._made:
            return
        kind = self._kinds[self._made - 1]
        if kind is Kind.MARKED:
            self.timeline.end()
        took = time.perf_counter() - self._began
        set_recorder(None)
        if kind is Kind.PLAIN:
            self.plain.append(took)
        elif kind is Kind.MARKED:
            self.marked.append(took)
        elif kind is Kind.TRACED:
            self.traced.append(took)
            if len(self.traced) == TRACED:
                self.tracer.stop()
