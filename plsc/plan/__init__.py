"""What a run will need, worked out before it starts: memory, arithmetic, network, time of a step."""

from plsc.plan.arguments import ARGUMENTS, Argument
from plsc.plan.backbone import BackbonePlan, plan_backbone
from plsc.plan.head import HeadPlan, plan_head, tile_rows
from plsc.plan.network import Transfer
from plsc.plan.rates import NODES, Rates
from plsc.plan.run import Plan, plan
from plsc.plan.step_time import StepTime, step_time

__all__ = [
    "ARGUMENTS",
    "NODES",
    "Argument",
    "BackbonePlan",
    "HeadPlan",
    "Plan",
    "Rates",
    "StepTime",
    "Transfer",
    "plan",
    "plan_backbone",
    "plan_head",
    "step_time",
    "tile_rows",
]
