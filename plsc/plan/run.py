"""The plan of a whole run: head and backbone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plsc.errors import OptionError
from plsc.plan.backbone import PRECISIONS, BackbonePlan, plan_backbone
from plsc.plan.checks import batch_sizes, check_kinds, one_of, whole
from plsc.plan.head import HeadPlan, plan_head
from plsc.plan.report import render


@dataclass(frozen=True)
class Plan:
    """What a run needs; head and backbone are None where they were not asked for."""

    ranks: int
    head: HeadPlan | None
    backbone: BackbonePlan | None

    @property
    def device_bytes(self) -> int:
        """What the device must hold for both."""
        return sum(one.device_bytes for one in (self.head, self.backbone) if one is not None)

    def render(self) -> str:
        """Return the plan as tables of text."""
        return render(self.head, self.backbone)


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
    of_head, of_backbone = _sort(more)
    if classes is None:
        _refuse_lone(of_head, of_backbone, "the head", "classes")
    if model is None:
        _refuse_lone(of_backbone, of_head, "the backbone", "model")
    check_kinds({"classes": classes, "model": model, "precision": precision, **more})
    ranks = whole("ranks", ranks, 1)
    one_of("precision", precision, PRECISIONS)
    if "embedding" in more:
        of_backbone["embedding"] = more["embedding"]
    # The head first: a mistake there is noticed before torch is loaded.
    head = None if classes is None else plan_head(classes, ranks=ranks, batch=batch, **of_head)
    backbone = None
    if model is not None:
        one = max(batch_sizes(batch, ranks))
        backbone = plan_backbone(model, batch=one, ranks=ranks, precision=precision, **of_backbone)
    return Plan(ranks, head, backbone)


def _refuse_lone(own: dict[str, Any], other: dict[str, Any], what: str, wanted: str) -> None:
    """Raise OptionError for an argument that is about nothing but what is not planned."""
    lone = [name for name in own if name not in other]
    if lone:
        raise OptionError(f"{lone[0]} is about {what}, which is planned if {wanted} is given")


def _sort(more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of head and backbone."""
    found = []
    for function in (plan_head, plan_backbone):
        known = inspect.signature(function).parameters
        found.append({name: value for name, value in more.items() if name in known})
    for name in more:
        if not any(name in arguments for arguments in found):
            raise OptionError(f"there is no argument {name!r} of a plan; see plsc plan --help")
    return found[0], found[1]
