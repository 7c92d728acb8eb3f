"""Clipping gradients by their norm."""

from __future__ import annotations

import torch
from torch import Tensor

from plsc.parallel.sharding import gradient_norm, local_part
from plsc.train.build import Run


def clip_gradients(run: Run) -> float | Tensor:
    """Scale the gradients down to `optim.clip_norm` if their norm is larger; return the factor for the rows.

    Scope backbone: its norm alone counts, and the class rows are not scaled. Scope all: the norm is that of
    all parameters, the rows of all ranks among them, which costs one more pass over the rows. A collective.

    On a GPU the factor is a tensor there, so that nobody waits for it.
    """
    limit, scope = run.options.optim.clip_norm, run.options.optim.clip_scope
    assert limit is not None  # see with_rate
    every = [p for group in run.optimizer.param_groups for p in group["params"]]
    wanted = every if scope == "all" else run.network.parameters()
    gradients = [p.grad for p in wanted if p.grad is not None]
    # The gradients are summed over the ranks by now; a sharded backbone's are split over them.
    norm = gradient_norm(gradients)
    if scope == "all" and run.rows is not None:
        norm = torch.hypot(norm, run.rows.gradient_norm().to(norm))
    # Gradients that are not finite stay as they are: `stop_at_bad_weights` names those alone.
    factor = torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
    if not factor.is_cuda and factor == 1:
        return 1.0
    if gradients:
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)
    if scope == "backbone" or run.rows is None:
        return 1.0
    return factor if factor.is_cuda else float(factor)
