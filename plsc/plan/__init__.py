"""Estimate memory, arithmetic and network traffic of a training run before it starts."""

from plsc.plan.backbone import BackbonePlan, plan_backbone
from plsc.plan.head import HeadPlan, Transfer, plan_head, tile_rows
from plsc.plan.options import PlanOptions
from plsc.plan.run import Plan, plan

__all__ = [
    "BackbonePlan",
    "HeadPlan",
    "Plan",
    "PlanOptions",
    "Transfer",
    "plan",
    "plan_backbone",
    "plan_head",
    "tile_rows",
]
