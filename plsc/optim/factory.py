"""The optimizer of the backbone, by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from plsc.options.optim import OptimOptions


def build_optimizer(
    options: OptimOptions, groups: Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Return torch's optimizer `options.optimizer` over parameter groups.

    Weight decay is added to the gradient by SGD and Adam (L2), taken from the weights by AdamW.
    """
    lr, decay = options.lr, options.weight_decay
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr, options.momentum, weight_decay=decay)
    adam = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return adam(groups, lr, (options.betas[0], options.betas[1]), weight_decay=decay)
