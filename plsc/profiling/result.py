"""What a profile says: the parts of a step over the ranks, as a table and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plsc.marks import Part
from plsc.profiling.collectives import Collective
from plsc.train.advice import Reading


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured: milliseconds a step.

    host: of each part; device: the same on the device's stream, None on the CPU; step: of a step that was
    split into parts, plain: of one that was not, traced: of one under the profiler. memory: peak bytes.
    """

    host: Mapping[Part, float]
    device: Mapping[Part, float] | None
    step: float
    plain: float
    traced: float
    images_per_second: float
    memory: int
    reading: Reading


@dataclass(frozen=True)
class PartTime:
    """One part of a step: mean milliseconds over ranks and steps, its share, and the ranks' extremes.

    On CUDA these are of the device's stream, and `host` is the host's mean; on the CPU they are the same.
    """

    part: Part
    milliseconds: float
    share: float
    least: float
    most: float
    host: float


@dataclass
class ProfileResult:
    """Where the time of a step goes. Milliseconds are means over ranks and steps.

    parts: longest first; they add up to `step`. plain_step: the same step with nothing recorded;
    traced_step: with torch.profiler. memory: peak bytes of the rank that has most. collectives: of rank 0's
    trace. advice: a line each. folder: where the files are.
    """

    device: str
    ranks: int
    steps: int
    step: float
    plain_step: float
    traced_step: float
    parts: list[PartTime]
    images_per_second: float
    memory: int
    folder: Path
    collectives: list[Collective] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def of_group(self, group: str) -> float:
        """Return the share of a step that goes to the parts of a group, such as ``head``."""
        return sum(part.share for part in self.parts if part.part.group == group)

    def of(self, *parts: Part) -> float:
        """Return the share of a step that goes to these parts."""
        return sum(part.share for part in self.parts if part.part in parts)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = asdict(self)
        values["folder"] = str(self.folder)
        for part in values["parts"]:
            part["part"] = part["part"].value
        return values


def combine(ranks: Sequence[RankTimes], device: str, steps: int, folder: Path) -> ProfileResult:
    """Return the result of what all ranks measured, without collectives and advice."""
    mains = [dict(one.host if one.device is None else one.device) for one in ranks]
    hosts = [dict(one.host) for one in ranks]
    if len(ranks) == 1:  # what is marked as communication moves nothing then
        for times in (*mains, *hosts):
            _fold_communication(times)
    step = _mean([sum(times.values()) for times in mains])
    parts = []
    for part in Part:
        each = [times.get(part, 0.0) for times in mains]
        if any(each):
            mean = _mean(each)
            host = _mean([times.get(part, 0.0) for times in hosts])
            parts.append(PartTime(part, mean, mean / step, min(each), max(each), host))
    return ProfileResult(
        device=device,
        ranks=len(ranks),
        steps=steps,
        step=step,
        plain_step=_mean([one.plain for one in ranks]),
        traced_step=_mean([one.traced for one in ranks]),
        parts=sorted(parts, key=lambda part: -part.milliseconds),
        images_per_second=_mean([one.images_per_second for one in ranks]),
        memory=max(one.memory for one in ranks),
        folder=folder,
    )


def _fold_communication(times: dict[Part, float]) -> None:
    for part in [part for part in times if part.group == "communication"]:
        times[Part.OTHER] = times.get(Part.OTHER, 0.0) + times.pop(part)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
