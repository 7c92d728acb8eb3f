"""Dropout with one random stream per sample, so that results do not depend on the number of ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

_GOLDEN = -1640531527  # 0x9E3779B9 as int32
_DROPOUTS: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}


class SampleNumbers:
    """The sample numbers of the current batch, shared by all `SampleDropout` layers of a network.

    layers: number of these layers. numbers: int64 [b], on the inputs' device; None: unknown.
    """

    def __init__(self) -> None:
        self.layers = 0
        self.numbers: Tensor | None = None


def use_sample_dropout(network: nn.Module) -> SampleNumbers:
    """Replace a network's dropout layers by `SampleDropout`, in place; return their `SampleNumbers`.

    Replaces layers of exactly the types nn.Dropout, Dropout1d, Dropout2d and Dropout3d, but no calls of
    F.dropout.
    """
    samples = SampleNumbers()
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, SampleDropout):  # of an earlier run
                child.samples = samples
            elif isinstance(child, _DropoutNd) and type(child) in _DROPOUTS:
                layer = SampleDropout(child.p, _DROPOUTS[type(child)], samples)
                setattr(module, name, layer.train(child.training))
            else:
                continue
            samples.layers += 1
    return samples


class SampleDropout(nn.Module):
    """Dropout of elements [b, ...], or of channels [b, C, ...], that is reproducible per sample.

    The mask depends on the sample number and one draw from torch's CPU generator, which is identical on all
    ranks; recomputation restores that generator. If the first dimension of the input is not the
    number of samples, this is ordinary dropout.

    p: probability of an element to be zeroed. whole_channels: drop channels, as nn.Dropout2d.
    """

    def __init__(self, p: float, whole_channels: bool, samples: SampleNumbers) -> None:
        super().__init__()
        self.p = p
        self.whole_channels = whole_channels
        self.samples = samples

    def forward(self, input: Tensor) -> Tensor:
        """Zero elements with probability p and scale the others by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return input
        numbers = self.samples.numbers
        fits = input.ndim > (2 if self.whole_channels else 0)
        if numbers is None or not fits or len(numbers) != len(input):
            drop = torch.feature_dropout if self.whole_channels else F.dropout
            return drop(input, self.p, True)
        drawn = torch.randint(2**31 - 1, ())
        # An int would be a constant of the compiled code and trigger a recompilation in each step.
        is_compiling = torch.compiler.is_compiling()
        key = drawn.to(numbers.device) if is_compiling else int(drawn)
        shape = input.shape[:2] if self.whole_channels else input.shape
        mask = keep_mask(numbers, shape[1:].numel(), self.p, key).view(shape)
        scaled = mask.to(input.dtype) * (1 / (1 - self.p) if self.p < 1 else 0.0)
        return input * scaled.view(*shape, *[1] * (input.ndim - len(shape)))

    def extra_repr(self) -> str:
        """Return the probability for repr()."""
        return f"p={self.p}"


def keep_mask(numbers: Tensor, count: int, p: float, key: int | Tensor) -> Tensor:
    """Return a bool mask [b, count] that is True with probability 1 - p, from (key, number, position) only.

    numbers: sample numbers, int64 [b]. key: below 2^31.
    """
    low, high = numbers.to(torch.int32), (numbers >> 32).to(torch.int32)
    rows = _mix(low ^ _mix(high ^ key))
    columns = torch.arange(count, dtype=torch.int32, device=numbers.device) * _GOLDEN
    bits = _mix(rows[:, None] ^ columns)
    return bits >= min(int(p * 2**32) - 2**31, 2**31 - 1)


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers (Wellons' lowbias32) into a new tensor; products wrap."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -2073254261  # 0x846CA68B as int32
    x ^= (x >> 16) & 0xFFFF
    return x
