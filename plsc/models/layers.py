"""Layers of the networks: the embedding neck, and `PReLU` and `Conv2d` with faster gradients on CPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plsc.errors import OptionError
from plsc.names import DEFAULT_NECK

BATCH_NORM_EPS = 2e-5
BATCH_NORM_MOMENTUM = 0.1  # weight of the new batch, as in torch; 0.9 in the original's convention
DOWNSAMPLING = 16


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Return a BatchNorm2d with the constants of the original networks."""
    return nn.BatchNorm2d(channels, eps=BATCH_NORM_EPS, momentum=BATCH_NORM_MOMENTUM)


def prelu() -> PReLU:
    """Return a PReLU with one slope for all channels, initially 0.25."""
    return PReLU(init=0.25)


class EmbeddingNeck(nn.Sequential):
    """Map features [b, C], or feature maps [b, C, h, w] with h * w = ``cells``, to embeddings [b, emb_size].

    parts: see the option `model.neck`; the default is "option E" of ArcFace (Deng et al. 2019, section 3.1).
    """

    def __init__(
        self,
        channels: int,
        emb_size: int,
        dropout: float,
        parts: str = DEFAULT_NECK,
        cells: int | None = None,
    ) -> None:
        super().__init__()
        before, _, after = parts.partition("linear")
        if "norm" in before:
            self.norm = _vector_norm(channels) if cells is None else batch_norm(channels)
        if "dropout" in before:
            self.dropout = nn.Dropout(dropout)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels * (cells or 1), emb_size)
        if after:
            self.norm_out = _vector_norm(emb_size)


def _vector_norm(size: int) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(size, eps=BATCH_NORM_EPS, momentum=BATCH_NORM_MOMENTUM)


def initialise(model: nn.Module) -> None:
    """Initialise convolutions and linear layers: normal with standard deviation sqrt(2 / fan_out), zero bias.

    That is Xavier initialisation (Glorot and Bengio 2010) with fan_in 0, as in the original networks.
    fan_out = output channels per group * kernel height * kernel width.
    """
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            outputs = layer.weight.shape[0] // getattr(layer, "groups", 1)
            fan_out = outputs * math.prod(layer.weight.shape[2:])
            nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_out))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def count_cells(image_shape: Sequence[int]) -> int:
    """Return h * w of the last feature map for images (C, H, W).

    Raises:
        OptionError: not 1 or 3 channels, or a height or width that is not a multiple of 16.
    """
    fits = (
        len(image_shape) == 3
        and image_shape[0] in (1, 3)
        and all(side >= DOWNSAMPLING and side % DOWNSAMPLING == 0 for side in image_shape[1:])
    )
    if not fits:
        raise OptionError(
            f"image_shape is {tuple(image_shape)}; expected (channels, height, width) with 1 or 3 channels "
            f"and sides that are multiples of {DOWNSAMPLING}, such as (3, 112, 112)"
        )
    return math.prod(image_shape[1:]) // DOWNSAMPLING**2


_PIECE = 2**17  # elements per piece, so that intermediate results fit into the cache of a core
_FEW_THREADS = 4  # torch.dot uses one thread; with more threads torch's implementation is faster
_FEW_CELLS = 49  # cells of an output map; measured by benchmarks/convolution.py of commit b9b1a5e8
_CAST = {torch.float32, torch.float16, torch.bfloat16}


class PReLU(nn.PReLU):
    """`nn.PReLU` with a faster gradient of a shared slope on CPUs.

    torch stores the slope's gradient per element before it sums them, which took a fifth of a bfloat16 step
    of ResNet18. torch's implementation is used on other devices, with one slope per channel, and under
    torch.compile.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return max(x, 0) + slope * min(x, 0), element by element."""
        is_ours = (
            self.weight.numel() == 1
            and input.device.type == "cpu"
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )
        return _SharedSlope.apply(input, self.weight) if is_ours else super().forward(input)


class _SharedSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, slope: Tensor) -> Tensor:
        # As a Python float, to read it once. There is no synchronisation on a CPU.
        ctx.number = float(slope)
        ctx.save_for_backward(input)
        ctx.shape, ctx.dtype = slope.shape, slope.dtype
        return F.leaky_relu(input, ctx.number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (input,) = ctx.saved_tensors
        d_output = gradients[0]
        d_input = d_slope = None
        if ctx.needs_input_grad[0]:
            d_input = torch.ops.aten.leaky_relu_backward(d_output, input, ctx.number, False)
        if ctx.needs_input_grad[1]:
            d_slope = _sum_below_zero(input, d_output).to(ctx.dtype).reshape(ctx.shape)
        return d_input, d_slope


def _sum_below_zero(input: Tensor, d_output: Tensor) -> Tensor:
    """Return the sum of min(x, 0) dy, in float32 or float64."""
    exact = torch.promote_types(input.dtype, torch.float32)
    x, dy = _flat_view(input), _flat_view(d_output)
    is_split = torch.get_num_threads() > _FEW_THREADS
    if is_split or x is None or dy is None or input.stride() != d_output.stride():
        return input.clamp_max(0).mul_(d_output).sum(dtype=exact)
    # Piece by piece, to stay in the cache; torch.dot of 16 bits takes nine times as long as of float32.
    pieces = [
        torch.dot(below.clamp_max(0).to(exact), gradients.to(exact))
        for below, gradients in zip(x.split(_PIECE), dy.split(_PIECE), strict=True)
    ]
    return torch.stack(pieces).sum()


def _flat_view(values: Tensor) -> Tensor | None:
    """Return a view [n] in memory order, or None if the tensor is not dense."""
    if values.is_contiguous():
        return values.view(-1)
    if values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last):
        return values.permute(0, 2, 3, 1).reshape(-1)
    return None


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` with a faster weight gradient for small output maps, in bfloat16 on CPUs.

    oneDNN is slow for maps of 2 x 2 to 7 x 7 cells (3 % of the peak speed at 2 x 2). This layer copies the
    input patches of all images into one matrix and computes the gradient as one product. It uses torch's
    convolution for larger maps (the matrix would be too large), in float32 (little gain), with bias, groups
    or dilation, and on other devices.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the maps [b, out_channels, h', w'] of the images [b, in_channels, h, w]."""
        if not (torch.is_grad_enabled() and self._is_ours(input)):
            return super().forward(input)
        # Cast here, where autograd records it; inside the function it would not.
        input, weight = input.to(torch.bfloat16), self.weight.to(torch.bfloat16)
        result: Tensor = _SmallMapConvolution.apply(input, weight, self.stride, self.padding)
        return result

    def _is_ours(self, input: Tensor) -> bool:
        is_plain = self.bias is None and self.groups == 1 and self.dilation == (1, 1)
        if input.device.type != "cpu" or input.ndim != 4 or not (is_plain and self._is_16_bit(input)):
            return False
        if isinstance(self.padding, str) or self.padding_mode != "zeros":
            return False
        height, width = (
            (side + 2 * padding - kernel) // stride + 1
            for side, padding, kernel, stride in zip(
                input.shape[2:], self.padding, self.kernel_size, self.stride, strict=True
            )
        )
        return 0 < height * width <= _FEW_CELLS

    def _is_16_bit(self, input: Tensor) -> bool:
        types = {input.dtype, self.weight.dtype}
        if torch.is_autocast_enabled("cpu"):
            # Autocast does not cast other dtypes, such as float64.
            return torch.get_autocast_dtype("cpu") == torch.bfloat16 and types <= _CAST
        return types == {torch.bfloat16}


class _SmallMapConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(input, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        input, weight = ctx.saved_tensors
        d_output = gradients[0]
        d_input = d_weight = None
        if ctx.needs_input_grad[0]:
            d_input = torch.ops.aten.convolution_backward(
                d_output, input, weight, None, ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1,
                (True, False, False),
            )[0]  # fmt: skip
        if ctx.needs_input_grad[1]:
            d_weight = weight_gradient(input, d_output, weight.shape[2:], ctx.stride, ctx.padding)
        return d_input, d_weight, None, None


def weight_gradient(
    input: Tensor,
    d_output: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Tensor:
    """Return the weight gradient of a convolution, [O, C, kh, kw] in channels-last layout, by one product.

    input: [b, C, h, w]. d_output: gradient of the output, [b, O, h', w'].
    """
    outputs, channels = d_output.shape[1], input.shape[1]
    (down, right), (high, wide) = padding, kernel
    cells = F.pad(input.permute(0, 2, 3, 1), (0, 0, right, right, down, down))
    seen = cells.unfold(1, high, stride[0]).unfold(2, wide, stride[1])  # [b, h', w', C, kh, kw]
    # The input patch of each output cell, [b h' w', kh kw C].
    patches = seen.permute(0, 1, 2, 4, 5, 3).reshape(-1, high * wide * channels)
    rows = d_output.permute(0, 2, 3, 1).reshape(-1, outputs)  # one row per output cell
    return (rows.t() @ patches).view(outputs, *kernel, channels).permute(0, 3, 1, 2)


def use_torch_layers(network: nn.Module) -> None:
    """Make the `PReLU` and `Conv2d` layers of a network use torch's implementation on CPUs."""
    for module in network.modules():
        if isinstance(module, (PReLU, Conv2d)):
            plain: type[nn.Module] = nn.PReLU if isinstance(module, PReLU) else nn.Conv2d
            module.forward = plain.forward.__get__(module)  # type: ignore[method-assign]
