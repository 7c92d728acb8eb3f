"""What happens just before an optimizer's step: L1 decay, and what torch's fused steps take for granted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plsc.optim.groups import L1_DECAY


def add_l1_decay(optimizer: torch.optim.Optimizer) -> None:
    """Let each step add ``L1_DECAY * sign(weight)`` to the gradients of the groups that have one.

    That is the gradient of the decay times the sum of the absolute values (the lasso's penalty). It comes
    after clipping, as L2 decay does.
    """
    if any(group.get(L1_DECAY) for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_add_signs)


@torch.no_grad()
def _add_signs(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        decay = group.get(L1_DECAY)
        trained = [p for p in group["params"] if p.grad is not None]
        if decay and trained:
            gradients = [p.grad for p in trained]
            torch._foreach_add_(gradients, torch._foreach_sign(trained), alpha=decay)


def check_before_fused(optimizer: torch.optim.Optimizer) -> None:
    """Let each fused step find its tensors as it wants them.

    torch 2.15's fused steps go over memory from front to back: on a CPU, a gradient or a state whose layout
    (strides) is not the parameter's gives wrong results without a word. And the fused SGD fails if some
    parameters have a momentum and others, that had no gradient before, have none.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_align)


@torch.no_grad()
def _align(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        needs_momentum = isinstance(optimizer, torch.optim.SGD) and group["momentum"]
        trained = [p for p in group["params"] if p.grad is not None]
        for parameter in trained:
            assert parameter.grad is not None
            if parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        states = [optimizer.state[parameter] for parameter in trained]
        if needs_momentum and any("momentum_buffer" in state for state in states):
            for parameter, state in zip(trained, states, strict=True):
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = _before_first(parameter, group)


def _before_first(parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the momentum from which a step comes to what a first step has: the decayed gradient g.

    That is the m of ``momentum * m + (1 - dampening) * g = g``.
    """
    gradient = parameter.grad
    if gradient is None or not group["dampening"]:
        return torch.zeros_like(parameter)
    decayed = gradient.add(parameter, alpha=group["weight_decay"])
    return decayed * (group["dampening"] / group["momentum"])
