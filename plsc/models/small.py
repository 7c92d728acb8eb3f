"""A small residual network that trains on two CPU cores."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from plsc.config.model import DEFAULT_NECK
from plsc.models.base_model import BaseModel
from plsc.models.neck import (
    EmbeddingNeck,
    batch_norm,
    count_cells,
    initialise,
    prelu,
)
from plsc.models.resnet import ResidualBlock, convolution

WIDTHS = (16, 64, 128, 256)


def small_block(inputs: int, outputs: int, stride: int) -> ResidualBlock:
    """Return conv 3x3 with the stride, BN, PReLU, conv 3x3, BN.

    The stride comes first, unlike in the large networks: half the arithmetic.
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
    """Four residual blocks, 16 to 256 channels wide, for images of about 32 x 32, gray or RGB.

    The stem halves the image, and so does every block but the first: 32 x 32 ends at 2 x 2. About
    1.3 million parameters and 12 million multiplications for an image of 1 x 32 x 32.

    Raises:
        OptionError: as `ResNet`.
    """

    def __init__(
        self,
        emb_size: int = 128,
        image_shape: Sequence[int] = (1, 32, 32),
        dropout: float = 0.1,
        neck: str = DEFAULT_NECK,
    ) -> None:
        super().__init__()
        cells = count_cells(image_shape, emb_size, dropout)
        self.stem = nn.Sequential(
            convolution(image_shape[0], WIDTHS[0], 3, 2), batch_norm(WIDTHS[0]), prelu()
        )
        self.stages = nn.Sequential()
        inputs = WIDTHS[0]
        for index, width in enumerate(WIDTHS):
            self.stages.append(
                nn.Sequential(small_block(inputs, width, 1 if index == 0 else 2), prelu())
            )
            inputs = width
        self.neck = EmbeddingNeck(inputs, emb_size, dropout, neck, cells)
        initialise(self)

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, emb_size] of the images [b, C, H, W]."""
        return self.neck(self.stages(self.stem(input)))
