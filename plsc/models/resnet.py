"""Residual networks for face recognition, ResNet 18 to 152, a small one, and IResNet; and their layers.

He et al. 2015 with the changes of ArcFace (Deng et al. 2019), as in PLSC 0.1: a 3x3 stem without stride or
pooling, PReLU, batch norm at the start of each block, and the embedding neck. The first block of each stage
halves the image, so 112 x 112 becomes 7 x 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plsc.errors import OptionError
from plsc.models.base_model import NETWORKS, BaseModel
from plsc.names import DEFAULT_NECK

BATCH_NORM_EPS = 2e-5
BATCH_NORM_MOMENTUM = 0.1  # weight of the new batch, as in torch; 0.9 in the original's convention
DOWNSAMPLING = 16
STEM_WIDTH = 64
BASIC_WIDTHS = (64, 128, 256, 512)
BOTTLENECK_WIDTHS = (256, 512, 1024, 2048)
# depth: (number of blocks per stage, whether they are bottleneck blocks)
DEPTHS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 14, 3), False),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Return a BatchNorm2d with the constants of the original networks."""
    return nn.BatchNorm2d(channels, eps=BATCH_NORM_EPS, momentum=BATCH_NORM_MOMENTUM)


def prelu() -> PReLU:
    """Return a PReLU with one slope for all channels, initially 0.25."""
    return PReLU(init=0.25)


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Conv2d:
    """Return a convolution without bias, with "same" padding."""
    return Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class ResidualBlock(nn.Module):
    """``residual(x) + shortcut(x)``; the shortcut is a 1x1 convolution if the shape changes."""

    def __init__(self, residual: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(convolution(inputs, outputs, 1, stride), batch_norm(outputs))

    def forward(self, features: Tensor) -> Tensor:
        """Map features [b, inputs, h, w] to [b, outputs, h / stride, w / stride]."""
        return self.residual(features) + self.shortcut(features)


def basic_block(inputs: int, outputs: int, stride: int) -> ResidualBlock:
    """Return the block "IR" of ArcFace: BN, conv 3x3, BN, PReLU, conv 3x3 with the stride, BN."""
    residual = nn.Sequential(
        batch_norm(inputs),
        convolution(inputs, outputs, 3),
        batch_norm(outputs),
        prelu(),
        convolution(outputs, outputs, 3, stride),
        batch_norm(outputs),
    )
    return ResidualBlock(residual, inputs, outputs, stride)


def bottleneck_block(inputs: int, outputs: int, stride: int) -> ResidualBlock:
    """Return BN, conv 1x1 and 3x3 (with a quarter of the channels), conv 1x1 with stride; BN after each."""
    narrow = outputs // 4
    residual = nn.Sequential(
        batch_norm(inputs),
        convolution(inputs, narrow, 1),
        batch_norm(narrow),
        prelu(),
        convolution(narrow, narrow, 3),
        batch_norm(narrow),
        prelu(),
        convolution(narrow, outputs, 1, stride),
        batch_norm(outputs),
    )
    return ResidualBlock(residual, inputs, outputs, stride)


class ResNet(BaseModel):
    """A residual network of ``depth`` 18, 34, 50, 101 or 152 that returns embeddings [b, emb_size].

    image_shape: (C, H, W), 1 or 3 channels, sides that are multiples of 16. dropout, neck: see
    `EmbeddingNeck`.

    Raises:
        OptionError: unsupported image shape.
    """

    def __init__(
        self,
        depth: int = 50,
        emb_size: int = 512,
        image_shape: Sequence[int] = (3, 112, 112),
        dropout: float = 0.4,
        neck: str = DEFAULT_NECK,
    ) -> None:
        super().__init__()
        cells = count_cells(image_shape)
        blocks, is_bottleneck = DEPTHS[depth]
        widths = BOTTLENECK_WIDTHS if is_bottleneck else BASIC_WIDTHS
        make_block = bottleneck_block if is_bottleneck else basic_block
        self.stem = nn.Sequential(convolution(image_shape[0], STEM_WIDTH, 3), batch_norm(STEM_WIDTH), prelu())
        self.stages = nn.Sequential()
        inputs = STEM_WIDTH
        for width, repeats in zip(widths, blocks, strict=True):
            stage = nn.Sequential()
            for index in range(repeats):
                stage.append(make_block(inputs, width, 2 if index == 0 else 1))
                inputs = width
            self.stages.append(stage)
        self.neck = EmbeddingNeck(inputs, emb_size, dropout, neck, cells)
        initialise(self)

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, emb_size] of the images [b, C, H, W]."""
        return self.neck(self.stages(self.stem(input)))


SMALL_WIDTHS = (16, 64, 128, 256)


def small_block(inputs: int, outputs: int, stride: int) -> ResidualBlock:
    """Return conv 3x3 with the stride, BN, PReLU, conv 3x3, BN.

    Unlike in the large networks the first convolution has the stride, which halves the arithmetic.
    """
    residual = nn.Sequential(
        convolution(inputs, outputs, 3, stride),
        batch_norm(outputs),
        prelu(),
        convolution(outputs, outputs, 3),
        batch_norm(outputs),
    )
    return ResidualBlock(residual, inputs, outputs, stride)


class SmallResNet(BaseModel):
    """Four residual blocks with 16 to 256 channels, for gray or RGB images of about 32 x 32.

    The stem and every block but the first halve the image: 32 x 32 becomes 2 x 2. About 1.3 million
    parameters, and 12 million multiplications per image of 1 x 32 x 32.

    Raises:
        OptionError: unsupported image shape.
    """

    def __init__(
        self,
        emb_size: int = 128,
        image_shape: Sequence[int] = (1, 32, 32),
        dropout: float = 0.1,
        neck: str = DEFAULT_NECK,
    ) -> None:
        super().__init__()
        cells = count_cells(image_shape)
        self.stem = nn.Sequential(
            convolution(image_shape[0], SMALL_WIDTHS[0], 3, 2), batch_norm(SMALL_WIDTHS[0]), prelu()
        )
        self.stages = nn.Sequential()
        inputs = SMALL_WIDTHS[0]
        for index, width in enumerate(SMALL_WIDTHS):
            self.stages.append(nn.Sequential(small_block(inputs, width, 1 if index == 0 else 2), prelu()))
            inputs = width
        self.neck = EmbeddingNeck(inputs, emb_size, dropout, neck, cells)
        initialise(self)

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, emb_size] of the images [b, C, H, W]."""
        return self.neck(self.stages(self.stem(input)))


_EPS = 1e-5
# depth: number of blocks per stage
IRESNET_BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 14, 3),
    100: (3, 13, 30, 3),
    200: (6, 26, 60, 6),
}


class IResNetBlock(nn.Module):
    """BN, conv 3x3, BN, PReLU, conv 3x3 with the stride, BN; 1x1 conv shortcut if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs, eps=_EPS)
        self.conv1 = convolution(inputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs, eps=_EPS)
        self.prelu = nn.PReLU(outputs)
        self.conv2 = convolution(outputs, outputs, 3, stride)
        self.bn3 = nn.BatchNorm2d(outputs, eps=_EPS)
        self.downsample: nn.Module | None = None
        if inputs != outputs or stride != 1:
            self.downsample = nn.Sequential(
                convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs, eps=_EPS)
            )

    def forward(self, features: Tensor) -> Tensor:
        """Map features [b, inputs, h, w] to [b, outputs, h / stride, w / stride]."""
        inner = self.prelu(self.bn2(self.conv1(self.bn1(features))))
        shortcut = features if self.downsample is None else self.downsample(features)
        return self.bn3(self.conv2(inner)) + shortcut


class IResNet(BaseModel):
    """An iresnet of insightface, of ``depth`` 18, 34, 50, 100 or 200, that returns embeddings [b, emb_size].

    iresnet 18 to 200 of https://github.com/deepinsight/insightface, recognition/arcface_torch/backbones, with
    the same layers and state-dict keys: state dicts can be exchanged in both directions. Differences from
    `ResNet`: one PReLU slope per channel, another batch norm epsilon, and a fixed scale of the embedding.

    image_shape: (C, H, W), sides that are multiples of 16. dropout: before the embedding layer. The scale of
    the last batch norm is fixed to 1, as in insightface.

    Raises:
        OptionError: unsupported image shape, or a neck other than the default.
    """

    def __init__(
        self,
        depth: int = 50,
        emb_size: int = 512,
        image_shape: Sequence[int] = (3, 112, 112),
        dropout: float = 0.0,
        neck: str = DEFAULT_NECK,
    ) -> None:
        super().__init__()
        cells = count_cells(image_shape)
        if neck != DEFAULT_NECK:
            raise OptionError(
                f"neck is {neck!r}; IResNet{depth} supports only {DEFAULT_NECK!r}, as in insightface: leave "
                "model.neck unset or choose another network"
            )
        self.conv1 = convolution(image_shape[0], BASIC_WIDTHS[0], 3)
        self.bn1 = nn.BatchNorm2d(BASIC_WIDTHS[0], eps=_EPS)
        self.prelu = nn.PReLU(BASIC_WIDTHS[0])
        inputs = BASIC_WIDTHS[0]
        stages = []
        for width, repeats in zip(BASIC_WIDTHS, IRESNET_BLOCKS[depth], strict=True):
            stage = nn.Sequential()
            for index in range(repeats):
                stage.append(IResNetBlock(inputs, width, 2 if index == 0 else 1))
                inputs = width
            stages.append(stage)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.bn2 = nn.BatchNorm2d(inputs, eps=_EPS)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(inputs * cells, emb_size)
        self.features = nn.BatchNorm1d(emb_size, eps=_EPS)
        self.features.weight.requires_grad_(False)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.1)

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, emb_size] of the images [b, C, H, W]."""
        maps = self.prelu(self.bn1(self.conv1(input)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            maps = stage(maps)
        return self.features(self.fc(self.dropout(self.bn2(maps)).flatten(1)))


# The layers.


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


NETWORKS |= {f"ResNet{depth}": (ResNet, {"depth": depth}) for depth in DEPTHS}
NETWORKS |= {f"IResNet{depth}": (IResNet, {"depth": depth}) for depth in IRESNET_BLOCKS}
NETWORKS["SmallResNet"] = SmallResNet, {}


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
