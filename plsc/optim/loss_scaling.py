"""Dynamic loss scaling, so that small gradients do not underflow in float16.

Micikevicius et al. 2018, "Mixed Precision Training". torch.amp.GradScaler lowers the scale after each
overflow; here, as in the original PLSC, after several in a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from plsc.config.option import read_arguments
from plsc.config.runtime import HIGHEST_SCALE, PrecisionOptions, ScalingArguments
from plsc.parallel.backbone import gradient_values

LOWEST_SCALE = 1.0
MOST_SKIPS = 20
"""Number of consecutive steps that may be skipped while the scale cannot decrease, before training fails."""


@dataclass
class LossScaler:
    """The loss scale and its counters; call `update` once per step.

    After `incr_every` consecutive finite steps the scale is multiplied by `incr_ratio`, after `decr_every`
    consecutive overflows by `decr_ratio`, within 1 to 2^24. If not dynamic, the scale is constant and
    overflows are only counted.

    Attributes:
        scale: loss scale of the next step.
        finite, overflowed: consecutive finite or overflowed steps since the last change of the scale.
        skipped: total number of overflowed steps.
        stuck: consecutive overflowed steps during which the scale could not decrease.
    """

    scale: float = 1.0
    incr_every: int = 2000
    decr_every: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    is_dynamic: bool = True
    finite: int = 0
    overflowed: int = 0
    skipped: int = 0
    stuck: int = 0

    @staticmethod
    def of(options: PrecisionOptions) -> LossScaler:
        """Return a new scaler for these options."""
        given = read_arguments(ScalingArguments, options.scaling_arguments, "precision.scaling_arguments")
        return LossScaler(*astuple(given))

    @property
    def can_fall(self) -> bool:
        """Whether an overflow can still decrease the scale."""
        return self.is_dynamic and self.scale > LOWEST_SCALE

    @property
    def is_hopeless(self) -> bool:
        """Whether `MOST_SKIPS` consecutive steps overflowed although the scale could not decrease."""
        return self.stuck >= MOST_SKIPS

    def update(self, overflowed: bool) -> None:
        """Count a step, and change the scale if due. overflowed: the step overflowed and was skipped."""
        if overflowed:
            self.skipped += 1
            self.stuck = 0 if self.can_fall else self.stuck + 1
            self.overflowed, self.finite = self.overflowed + 1, 0
            if self.overflowed == self.decr_every:
                self.overflowed = 0
                self._change(self.decr_ratio)
        else:
            self.stuck = 0
            self.finite, self.overflowed = self.finite + 1, 0
            if self.finite == self.incr_every:
                self.finite = 0
                self._change(self.incr_ratio)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain JSON values."""
        return {"scale": self.scale, **{name: getattr(self, name) for name in COUNTS}}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the values of `state`; a scale that is not dynamic keeps the value of the options."""
        if self.is_dynamic:
            self.scale = min(max(state["scale"], LOWEST_SCALE), HIGHEST_SCALE)
        for name in COUNTS:
            setattr(self, name, state[name])
        # A run may resume with smaller periods than it had.
        self.finite = min(self.finite, self.incr_every - 1)
        self.overflowed = min(self.overflowed, self.decr_every - 1)

    def _change(self, ratio: float) -> None:
        if self.is_dynamic:
            self.scale = min(max(self.scale * ratio, LOWEST_SCALE), HIGHEST_SCALE)


COUNTS = ("finite", "overflowed", "skipped", "stuck")


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, embeddings.dtype
        return embeddings.to(_work_type(embeddings.dtype), copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return (gradients[0] * ctx.scale).to(ctx.dtype), None


def scale_gradient(embeddings: Tensor, scale: float) -> Tensor:
    """Return the embeddings [b, D] in float32; their gradient is multiplied by `scale` before it is rounded.

    So only the gradients of the backbone are scaled, not the loss, the head or its class weights.
    """
    if scale == 1.0:
        return embeddings.to(_work_type(embeddings.dtype))
    return _Scaled.apply(embeddings, scale)


def unscale(gradients: Iterable[Tensor], scale: float) -> Tensor:
    """Divide gradients by the scale, in place; return a bool tensor: whether one is not finite.

    Supports sparse gradients. Does not synchronise with the GPU. Without gradients: False, on the CPU.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        numbers = gradient_values(gradient)
        kinds.setdefault((numbers.device, numbers.dtype), []).append(numbers)
    found = None
    for (device, _), values in kinds.items():
        bad = torch.zeros((), device=device)
        # The function that torch.amp.GradScaler calls.
        factor = torch.full((), 1.0 / scale, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(values, bad, factor)
        found = bad if found is None else found + bad.to(found)
    return torch.tensor(False) if found is None else found > 0


def _work_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
