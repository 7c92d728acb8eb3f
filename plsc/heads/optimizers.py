"""The optimizers of class weights: settings and states.

`RowOptimizer` (update.py) is their base class; rules.py has the update formulas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plsc.heads.rules import BLOCK, MOMENTUM, MOMENTUM_SCALE
from plsc.heads.sharded import ShardedHead
from plsc.heads.update import RowOptimizer
from plsc.heads.weights import States


class RowSGD(RowOptimizer):
    """SGD with momentum and L2 decay, as torch.optim.SGD. State per class: D values of 4, 2 or 1 bytes.

    state_dtype: of the momentum: 'float32', 'bfloat16' (stochastic rounding) or 'int8' (stochastic rounding,
    one scale per block of 256 values; 8-bit states: Dettmers et al. 2022).
    """

    kind = "sgd"
    state_dtypes = ("float32", "bfloat16", "int8")

    def __init__(
        self,
        head: ShardedHead,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        state_dtype: str | torch.dtype = "float32",
    ) -> None:
        super().__init__(
            head, state_dtype, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov
        )

    def _empty_states(self, parameter: Tensor) -> States:
        if not self.defaults["momentum"]:
            return {}
        states = {MOMENTUM: self._zeros(parameter)}
        if states[MOMENTUM].dtype is torch.int8:
            blocks = -(-parameter.shape[-1] // BLOCK)
            states[MOMENTUM_SCALE] = parameter.new_zeros(*parameter.shape[:-1], blocks, dtype=torch.float32)
        return states


class RowAdamW(RowOptimizer):
    """AdamW (Loshchilov and Hutter 2019); the bias correction counts the updates of each class separately.

    State per class: 2 D values of 4 or 2 bytes, and a 4-byte count. state_dtype: 'float32' or 'bfloat16'.
    """

    kind = "adamw"

    def __init__(
        self,
        head: ShardedHead,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        state_dtype: str | torch.dtype = "float32",
    ) -> None:
        super().__init__(head, state_dtype, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _empty_states(self, parameter: Tensor) -> States:
        return {
            "exp_avg": self._zeros(parameter),
            "exp_avg_sq": self._zeros(parameter),
            "steps": self._zeros(parameter, torch.int32, per_row=True),
        }


class RowAdagrad(RowOptimizer):
    """Row-wise Adagrad: one state per class, the sum of its mean squared gradients (Duchi et al. 2011).

    State per class: one value of 4 or 2 bytes. state_dtype: 'float32' or 'bfloat16'.
    """

    kind = "adagrad"

    def __init__(
        self,
        head: ShardedHead,
        lr: float = 0.1,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        state_dtype: str | torch.dtype = "float32",
    ) -> None:
        super().__init__(head, state_dtype, lr=lr, eps=eps, weight_decay=weight_decay)

    def _empty_states(self, parameter: Tensor) -> States:
        return {"sum_of_squares": self._zeros(parameter, per_row=True)}


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {"sgd": RowSGD, "adamw": RowAdamW, "adagrad": RowAdagrad}
