"""Loss scaling: what the loss is multiplied with so that small gradients survive float16, and its changes.

Micikevicius et al. 2018, "Mixed Precision Training". torch.amp.GradScaler lowers its scale at each overflow;
here, as in the original, so many in a row do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plsc.options.precision import HIGHEST_SCALE, PrecisionOptions

LOWEST_SCALE = 1.0
MOST_SKIPS = 20
"""Steps in a row that may be skipped with a scale that cannot fall.

A network that overflows float16 in so many batches without any help of the scale will in the next ones, too.
"""


@dataclass
class LossScaler:
    """The scale, and the counts that decide when it changes; `update` once a step.

    After `incr_every` finite steps in a row it is multiplied by `incr_ratio`, after `decr_every` overflowing
    ones by `decr_ratio`, and stays within 1 and 2^24. Not dynamic: it stays, but overflows are counted.

    Attributes:
        scale: of the next step.
        finite, overflowed: steps in a row of that kind since the scale last changed or the other kind came.
        skipped: all steps that overflowed.
        stuck: overflowing steps in a row during which the scale could not fall.
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
        """Return the scaler of the options, at the beginning of a run."""
        return LossScaler(
            options.init_loss_scaling,
            options.incr_every_n_steps,
            options.decr_every_n_nan_or_inf,
            options.incr_ratio,
            options.decr_ratio,
            options.use_dynamic_loss_scaling,
        )

    @property
    def can_fall(self) -> bool:
        """Whether overflows still lower the scale."""
        return self.is_dynamic and self.scale > LOWEST_SCALE

    @property
    def is_hopeless(self) -> bool:
        """Whether so many steps in a row overflowed, with a scale that could not fall, that none will do."""
        return self.stuck >= MOST_SKIPS

    def update(self, overflowed: bool) -> None:
        """Count a step that overflowed, and was skipped, or did not; change the scale if it is time."""
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
        """Return what a checkpoint keeps, as plain JSON."""
        return {"scale": self.scale, **{name: getattr(self, name) for name in COUNTS}}

    def load(self, scale: float, counts: dict[str, int]) -> None:
        """Go on from the values of `state`; a scale that is not dynamic stays what the options say."""
        if self.is_dynamic:
            self.scale = min(max(scale, LOWEST_SCALE), HIGHEST_SCALE)
        for name in COUNTS:
            setattr(self, name, counts[name])
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

    So the scale is on the gradient that goes into the backbone and nowhere else: the head, its loss and its
    rows are independent of it.
    """
    if scale == 1.0:
        return embeddings.to(_work_type(embeddings.dtype))
    return _Scaled.apply(embeddings, scale)


def unscale(gradients: Iterable[Tensor], scale: float) -> Tensor:
    """Divide gradients by the scale, in place; return whether one was not finite, a bool on their device.

    Sparse gradients and shards of distributed ones are looked at where they are; nothing travels, and the
    device is not waited for. No gradients: False, on the CPU.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        values = local._values() if local.is_sparse else local
        kinds.setdefault((values.device, values.dtype), []).append(values)
    found = None
    for (device, _), values in kinds.items():
        bad = torch.zeros((), device=device)
        # What torch.amp.GradScaler calls.
        factor = torch.full((), 1.0 / scale, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(values, bad, factor)
        found = bad if found is None else found + bad.to(found)
    return torch.tensor(False) if found is None else found > 0


def _work_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
