"""What a run will need, worked out before it starts: memory, arithmetic, network."""

from plsc.plan.arguments import ARGUMENTS, Argument
from plsc.plan.backbone import BackbonePlan, plan_backbone
from plsc.plan.head import HeadPlan, Transfer, plan_head, tile_rows
from plsc.plan.run import Plan, plan

__all__ = [
    "ARGUMENTS",
    "Argument",
    "BackbonePlan",
    "HeadPlan",
    "Plan",
    "Transfer",
    "plan",
    "plan_backbone",
    "plan_head",
    "tile_rows",
]
