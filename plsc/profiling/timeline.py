"""The time of steps, split among the parts that the marks name."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from plsc.marks import Part

MILLION = 1_000_000


@dataclass
class Stretch:
    """From a mark to the next one: which part had it, and the times at its end.

    host: nanoseconds of a clock that never goes back; device: an event on the device's stream, if any.
    """

    part: Part
    host: int
    device: torch.cuda.Event | None


class Timeline:
    """Records steps, each cut into stretches without a gap, so that the parts add up to the step.

    A part has the time in which it is open and no part inside it is. On a CUDA device each mark also leaves
    an event on the current stream. The time between two events is what the device spent on a part, idle time
    included; where the device is behind, what the host does meanwhile counts as nothing. So these add up to
    the step, too, and reading the clock makes nobody wait.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._clock = clock
        self._has_events = device.type == "cuda"
        self._open: list[Part] = []
        self._steps: list[list[Stretch]] = []

    def begin(self) -> None:
        """A step begins."""
        self._open = [Part.OTHER]
        self._steps.append([])
        self._note(Part.OTHER)  # its end is where the step begins

    def end(self) -> None:
        """The step ends; what is still open has the time until now."""
        self._note(self._open[-1])
        self._open = []

    def enter(self, part: Part) -> None:
        """See `plsc.marks.Recorder`."""
        if self._open:
            self._note(self._open[-1])
            self._open.append(part)

    def switch(self, part: Part) -> None:
        """See `plsc.marks.Recorder`."""
        if len(self._open) > 1:
            self._note(self._open[-1])
            self._open[-1] = part

    def leave(self) -> None:
        """See `plsc.marks.Recorder`."""
        if len(self._open) > 1:  # else it was open before the step began
            self._note(self._open.pop())

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self._steps)

    @property
    def marks(self) -> int:
        """How many marks there were in all steps."""
        return sum(len(step) - 2 for step in self._steps)

    def host_nanoseconds(self) -> Counter[Part]:
        """Return the time of each part on the host, over all steps."""
        found: Counter[Part] = Counter()
        for step in self._steps:
            for before, after in itertools.pairwise(step):
                found[after.part] += after.host - before.host
        return found

    def device_nanoseconds(self) -> Counter[Part] | None:
        """Return the same on the device's stream; None without one. Waits for the device."""
        if not self._has_events:
            return None
        torch.cuda.synchronize()
        found: Counter[Part] = Counter()
        for step in self._steps:
            for before, after in itertools.pairwise(step):
                if before.device is not None and after.device is not None:
                    took = before.device.elapsed_time(after.device)
                    found[after.part] += round(took * MILLION)
        return found

    def whole_nanoseconds(self) -> int:
        """Return the time of all steps on the host, from their first and last moments alone."""
        return sum(step[-1].host - step[0].host for step in self._steps)

    def _note(self, part: Part) -> None:
        event = None
        if self._has_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._steps[-1].append(Stretch(part, self._clock(), event))
