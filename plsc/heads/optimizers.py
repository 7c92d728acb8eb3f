"""The optimizers of class weights: their settings, and the states that they keep of a row.

What is common to them is `RowOptimizer` (update.py); how a tile of rows changes is in rules.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plsc.heads.rules import BLOCK, MOMENTUM, MOMENTUM_SCALE
from plsc.heads.sharded import ShardedHead
from plsc.heads.update import RowOptimizer
from plsc.heads.weights import States


class RowSGD(RowOptimizer):
    """SGD with momentum and L2 decay: torch.optim.SGD. Bytes of state per row: D times 4, 2 or 1.

    state_dtype: of the momentum: 'float32', 'bfloat16' (rounded at random) or 'int8' (blocks of 256
    share a scale; rounded at random; 8-bit states: Dettmers et al. 2022).
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
            head,
            state_dtype,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
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
    """AdamW (Loshchilov and Hutter 2019); the bias correction counts the steps that a row itself made.

    Bytes of state per row: 2 D times 4 or 2, and 4. state_dtype: 'float32' or 'bfloat16'.
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
    """Adagrad with one number per row, the sum of the mean squares of its gradients (Duchi et al. 2011).

    Bytes of state per row: 4 or 2. state_dtype: 'float32' or 'bfloat16'.
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


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "sgd": RowSGD,
    "adamw": RowAdamW,
    "adagrad": RowAdagrad,
}
