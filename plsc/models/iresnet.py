"""The iresnet networks of insightface, with the same layers and state-dict keys.

iresnet 18 to 200 of https://github.com/deepinsight/insightface, recognition/arcface_torch/backbones. State
dicts can be exchanged in both directions. Differences from `plsc.models.resnet`: one PReLU slope per channel,
another batch norm epsilon, and a fixed scale of the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from plsc.errors import OptionError
from plsc.models.base_model import BaseModel
from plsc.models.neck import count_cells
from plsc.models.resnet import convolution
from plsc.names import DEFAULT_NECK

EPS = 1e-5
WIDTHS = (64, 128, 256, 512)
# depth: number of blocks per stage
BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 14, 3),
    100: (3, 13, 30, 3),
    200: (6, 26, 60, 6),
}


class Block(nn.Module):
    """BN, conv 3x3, BN, PReLU, conv 3x3 with the stride, BN; 1x1 conv shortcut if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs, eps=EPS)
        self.conv1 = convolution(inputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs, eps=EPS)
        self.prelu = nn.PReLU(outputs)
        self.conv2 = convolution(outputs, outputs, 3, stride)
        self.bn3 = nn.BatchNorm2d(outputs, eps=EPS)
        self.downsample: nn.Module | None = None
        if inputs != outputs or stride != 1:
            self.downsample = nn.Sequential(
                convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs, eps=EPS)
            )

    def forward(self, features: Tensor) -> Tensor:
        """Map features [b, inputs, h, w] to [b, outputs, h / stride, w / stride]."""
        inner = self.prelu(self.bn2(self.conv1(self.bn1(features))))
        shortcut = features if self.downsample is None else self.downsample(features)
        return self.bn3(self.conv2(inner)) + shortcut


class IResNet(BaseModel):
    """An iresnet of ``depth`` 18, 34, 50, 100 or 200 that returns embeddings [b, emb_size].

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
        self.conv1 = convolution(image_shape[0], WIDTHS[0], 3)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0], eps=EPS)
        self.prelu = nn.PReLU(WIDTHS[0])
        inputs = WIDTHS[0]
        stages = []
        for width, repeats in zip(WIDTHS, BLOCKS[depth], strict=True):
            stage = nn.Sequential()
            for index in range(repeats):
                stage.append(Block(inputs, width, 2 if index == 0 else 1))
                inputs = width
            stages.append(stage)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.bn2 = nn.BatchNorm2d(inputs, eps=EPS)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(inputs * cells, emb_size)
        self.features = nn.BatchNorm1d(emb_size, eps=EPS)
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
