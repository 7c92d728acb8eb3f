"""The plan of a whole run: head, backbone, time."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plsc.errors import OptionError
from plsc.plan.backbone import PRECISIONS, BackbonePlan, plan_backbone
from plsc.plan.checks import batch_sizes, check_kinds, one_of, whole
from plsc.plan.head import HeadPlan, plan_head
from plsc.plan.rates import Rates, choose_rates
from plsc.plan.report import render
from plsc.plan.step_time import StepTime, step_time

CLUSTERS = (8, 64, 1024)
"""Ranks for which a plan with rates estimates the time of a step, besides its own."""


@dataclass(frozen=True)
class Plan:
    """What a run needs; head and backbone are None where they were not asked for.

    times: estimates for its own ranks and for those of `CLUSTERS`, with as many samples a rank and the
    classes split over them; empty where the rates are not known.
    """

    ranks: int
    head: HeadPlan | None
    backbone: BackbonePlan | None
    rates: Rates
    times: tuple[StepTime, ...]

    @property
    def device_bytes(self) -> int:
        """What the device must hold for both."""
        return sum(one.device_bytes for one in (self.head, self.backbone) if one is not None)

    def render(self) -> str:
        """Return the plan as tables of text."""
        return render(self.head, self.backbone, self.rates, self.times)


def plan(
    classes: float | None = None,
    *,
    model: str | None = None,
    ranks: int = 1,
    batch: int | Sequence[int] = 128,
    precision: str = "float32",
    **more: Any,
) -> Plan:
    """Work out what a run needs. See `plsc.plan.ARGUMENTS` for the arguments; a backbone loads torch.

    Raises:
        OptionError: neither classes nor a model, an unknown argument, or one that is out of range.
    """
    if classes is None and model is None:
        raise OptionError(
            "nothing to plan; give classes for the head, model for the backbone, or both"
        )
    of_head, of_backbone, of_rates = _sort(more)
    if classes is None:
        _refuse_lone(of_head, (of_backbone, of_rates), "the head", "classes")
    if model is None:
        _refuse_lone(of_backbone, (of_head, of_rates), "the backbone", "model")
    check_kinds({"classes": classes, "model": model, "precision": precision, **more})
    ranks = whole("ranks", ranks, 1)
    of_rates["precision"] = PRECISIONS[one_of("precision", precision, PRECISIONS)]
    rates = choose_rates(**of_rates)
    if "embedding" in more:
        of_backbone["embedding"] = more["embedding"]
    one = max(batch_sizes(batch, ranks))

    def head(count: int, sizes: int | Sequence[int]) -> HeadPlan | None:
        return None if classes is None else plan_head(classes, ranks=count, batch=sizes, **of_head)

    mine = head(ranks, batch)  # first: a mistake there is noticed before torch is loaded
    backbone = None
    if model is not None:
        backbone = plan_backbone(model, batch=one, ranks=ranks, precision=precision, **of_backbone)
    times = []
    for count in sorted({ranks, *CLUSTERS}):
        part = mine if count == ranks else head(count, one)
        time = step_time(rates, part, backbone, count, count * one)
        if time is not None:
            times.append(time)
    return Plan(ranks, mine, backbone, rates, tuple(times))


def _refuse_lone(
    own: dict[str, Any], others: Sequence[dict[str, Any]], what: str, wanted: str
) -> None:
    """Raise OptionError for an argument that is about nothing but what is not planned."""
    lone = [name for name in own if not any(name in other for other in others)]
    if lone:
        raise OptionError(f"{lone[0]} is about {what}, which is planned if {wanted} is given")


def _sort(more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the arguments of head, backbone and rates."""
    found = []
    for function in (plan_head, plan_backbone, choose_rates):
        known = inspect.signature(function).parameters
        found.append({name: value for name, value in more.items() if name in known})
    for name in more:
        if not any(name in arguments for arguments in found):
            raise OptionError(f"there is no argument {name!r} of a plan; see plsc plan --help")
    return found[0], found[1], found[2]
