"""Optimizers of parameters with sparse gradients: those of `nn.Embedding(sparse=True)`.

A step updates only the rows that occur in the batch. Momentum and decay would change every row, so these
parameters have neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

SPARSE = "sparse"
"""Key in an optimizer's parameter groups: the gradients of the group are sparse."""

_OFF: dict[str, Any] = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}


def sparse_parameters(network: nn.Module) -> set[Tensor]:
    """Return the trained weights of the layers with `sparse=True`."""
    layers = (one for one in network.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag)))
    return {layer.weight for layer in layers if layer.sparse and layer.weight.requires_grad}


def settings_of_sparse(takes: tuple[str, ...], has_fused: bool) -> dict[str, Any]:
    """Return the settings of a group with sparse gradients; takes, has_fused: those of the optimizer."""
    off = {name: value for name, value in _OFF.items() if name in takes}
    return {**off, "foreach": False, **({"fused": False} if has_fused else {})}


class SparseAdam(torch.optim.Optimizer):
    """torch's SparseAdam for the groups with SPARSE, and Adam for all others.

    params: parameter groups. weight_decay, amsgrad, foreach: only of Adam.
    """

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        foreach: bool | None = None,
    ) -> None:
        dense = [group for group in params if not group.get(SPARSE)] or [{"params": []}]
        sparse = [group for group in params if group.get(SPARSE)]
        adam = torch.optim.Adam(dense, lr, betas, eps, weight_decay, amsgrad, foreach=foreach)
        self.parts: list[torch.optim.Optimizer] = [adam]
        if sparse:
            self.parts.append(torch.optim.SparseAdam(sparse, lr, betas, eps))
        joined = [group for part in self.parts for group in part.param_groups]
        super().__init__(joined, dict(adam.defaults))
        self.param_groups = joined  # the same dicts, so that all see a changed learning rate
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for part in self.parts:
            part.step()
