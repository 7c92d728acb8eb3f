"""Residual networks for face recognition: ResNet 18 to 152, and a small one.

He et al. 2015 with the changes of ArcFace (Deng et al. 2019), as in PLSC 0.1: a 3x3 stem without stride or
pooling, PReLU, batch norm at the start of each block, and the embedding neck. The first block of each stage
halves the image, so 112 x 112 becomes 7 x 7.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from plsc.errors import OptionError
from plsc.models.base_model import BaseModel
from plsc.models.layers import Conv2d, EmbeddingNeck, batch_norm, count_cells, initialise, prelu
from plsc.names import DEFAULT_NECK

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
