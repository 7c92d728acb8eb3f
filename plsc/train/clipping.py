"""Clipping gradients by their norm."""

from __future__ import annotations

import torch
from torch import Tensor

from plsc.train.build import Run


def clip_gradients(run: Run) -> float | Tensor:
    """Scale the gradients down to `optim.clip_norm` if their norm is larger; return the factor for the rows.

    Scope backbone: its norm alone counts, and the class rows are not scaled. Scope all: the norm is that of
    all parameters, the rows of all ranks among them, which costs one more pass over the rows. A collective.

    On a GPU the factor is a tensor there, so that nobody waits for it.
    """
    limit, scope = run.options.optim.clip_norm, run.options.optim.clip_scope
    groups = run.optimizer.param_groups if scope == "all" else run.optimizer.param_groups[:1]
    parameters = [p for group in groups for p in group["params"] if p.grad is not None]
    # The gradients are whole and alike on all ranks by now.
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if scope == "all" and run.rows is not None:
        norm = torch.hypot(norm, run.rows.gradient_norm().to(norm))
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    if scope == "backbone" or run.rows is None:
        return 1.0
    if norm.is_cuda:
        return (limit / (norm + 1e-6)).clamp(max=1.0)
    return min(1.0, limit / (float(norm) + 1e-6))
