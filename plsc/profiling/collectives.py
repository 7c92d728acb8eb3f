"""Collectives in a trace: how long each kind was under way, and how much of that computation hid."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plsc.marks import Part

Interval = tuple[float, float]
_WAITING = {part.value for part in Part if part.group == "communication"}
_FSDP = "FSDP::"  # torch's ranges around what it does beside the layers: gathering and scattering
_NCCL = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+?)(?:_|\(|$)")


@dataclass(frozen=True)
class Collective:
    """A kind of collective: how many there are in a step, milliseconds a step that they were under way, and
    how many of these went by while something was computed."""

    name: str
    count: float
    milliseconds: float
    hidden: float


def collectives_of(events: Iterable[Any], steps: int) -> list[Collective]:
    """Return the collectives of a trace of so many steps, those that take longest first.

    events: torch's FunctionEvents. Over gloo a collective is hidden where the rank's own thread does not wait
    in a part of the step that is marked as communication, or in FSDP's; over NCCL where another kernel runs
    beside it.
    """
    found: dict[str, list[Interval]] = defaultdict(list)
    waits: list[Interval] = []
    kernels: list[Interval] = []
    for event in events:
        span = (float(event.time_range.start), float(event.time_range.end))
        name = str(event.name)
        if event.device_type.name == "CPU":
            if name.startswith("gloo:"):
                found[name].append(span)
            elif name in _WAITING or name.startswith(_FSDP):
                waits.append(span)
        elif event.is_user_annotation:  # a range, as the device saw it
            continue
        elif (kernel := _NCCL.search(name)) is not None:
            found[f"nccl:{_snake(kernel[1])}"].append(span)
        elif not name.startswith(("Memcpy", "Memset")):
            kernels.append(span)
    waits, kernels = union(waits), union(kernels)
    result = []
    for name, spans in found.items():
        whole = union(spans)  # two may be under way at once
        if name.startswith("gloo:"):
            hidden = _length(whole) - _length(overlap(whole, waits))
        else:
            hidden = _length(overlap(whole, kernels))
        result.append(
            Collective(
                name, len(spans) / steps, _length(whole) / 1000 / steps, hidden / 1000 / steps
            )
        )
    return sorted(result, key=lambda one: -one.milliseconds)


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Return the intervals that the given ones cover, ascending and apart."""
    joined: list[Interval] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def overlap(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """Return what two ascending lists of intervals that are apart both cover."""
    common: list[Interval] = []
    i = j = 0
    while i < len(some) and j < len(others):
        start, stop = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < stop:
            common.append((start, stop))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(spans: list[Interval]) -> float:
    return sum(stop - start for start, stop in spans)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
