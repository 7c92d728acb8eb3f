"""Dropout whose draws belong to the samples, so that they do not depend on which rank has a sample."""

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
    """The numbers of the samples that the network is being given; `layers` of it ask for them.

    numbers: int64 [b], on the inputs' device, or None where they are unknown.
    """

    def __init__(self) -> None:
        self.layers = 0
        self.numbers: Tensor | None = None


def draw_by_sample(network: nn.Module) -> SampleNumbers:
    """Make a network's dropout layers `SampleDropout`, in place; return what gives them the samples' numbers.

    Layers of exactly the types nn.Dropout, Dropout1d, Dropout2d and Dropout3d; calls of F.dropout in a
    network's code stay what they are.
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
    """Dropout [b, ...] of single numbers, or of whole channels [b, C, ...].

    What is dropped is a function of the sample's number and of one draw from torch's CPU generator, which
    is identical on all ranks; activation checkpointing, which puts that generator back, sees the same again.
    Where the input's first dimension is not that of the samples, it is ordinary dropout.
    """

    def __init__(self, p: float, whole_channels: bool, samples: SampleNumbers) -> None:
        super().__init__()
        self.p = p
        self.whole_channels = whole_channels
        self.samples = samples

    def forward(self, input: Tensor) -> Tensor:
        """Return the input with a share p of it zero, and the rest scaled by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return input
        numbers = self.samples.numbers
        fits = input.ndim > (2 if self.whole_channels else 0)
        if numbers is None or not fits or len(numbers) != len(input):
            drop = torch.feature_dropout if self.whole_channels else F.dropout
            return drop(input, self.p, True)
        drawn = torch.randint(2**31 - 1, ())
        # A number would be a constant of the compiled code, which would be compiled anew at each step.
        is_compiling = torch.compiler.is_compiling()
        key = drawn.to(numbers.device) if is_compiling else int(drawn)
        shape = input.shape[:2] if self.whole_channels else input.shape
        mask = keep_mask(numbers, shape[1:].numel(), self.p, key).view(shape)
        scaled = mask.to(input.dtype) * (1 / (1 - self.p) if self.p < 1 else 0.0)
        return input * scaled.view(*shape, *[1] * (input.ndim - len(shape)))

    def extra_repr(self) -> str:
        """Say the ratio, as torch's does."""
        return f"p={self.p}"


def keep_mask(numbers: Tensor, count: int, p: float, key: int | Tensor) -> Tensor:
    """Return which of ``count`` values of each sample stay, bool [b, count]; each with probability 1 - p.

    A function of (key, number, position) alone. numbers: int64 [b]; key: below 2^31.
    """
    low, high = numbers.to(torch.int32), (numbers >> 32).to(torch.int32)
    rows = _mix(low ^ _mix(high ^ key))
    columns = torch.arange(count, dtype=torch.int32, device=numbers.device) * _GOLDEN
    bits = _mix(rows[:, None] ^ columns)
    return bits >= min(int(p * 2**32) - 2**31, 2**31 - 1)


def _mix(x: Tensor) -> Tensor:
    """Return a hash of 32-bit numbers (Wellons' lowbias32), in a tensor of its own; products wrap."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -2073254261  # 0x846CA68B as int32
    x ^= (x >> 16) & 0xFFFF
    return x
