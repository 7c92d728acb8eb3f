"""The embedding neck of all networks, and initialisation and checks of the residual networks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from plsc.errors import OptionError
from plsc.models.layers import PReLU
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
