"""What a run will need, worked out before it starts: memory, arithmetic, network."""

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
