"""Networks of other packages as backbones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from plsc.errors import OptionError
from plsc.models.base_model import BaseModel


class Adapter(BaseModel):
    """A network that maps images to vectors, as a backbone; its own names stand behind ``network.``.

    channels: of the images that it takes; gray ones are given to a network of three channels three times.
    """

    def __init__(self, network: nn.Module, channels: int) -> None:
        super().__init__()
        self.network = network
        self.channels = channels

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, emb_size] of the images [b, C, H, W]."""
        if input.shape[1] == 1 < self.channels:
            input = input.expand(-1, self.channels, -1, -1)
        return self.network(input)


@contextlib.contextmanager
def making(name: str, image_shape: Sequence[int]) -> Iterator[None]:
    """Turn whatever a package raises for a network into OptionError: each network refuses in its own way."""
    try:
        yield
    except Exception as error:
        raise OptionError(
            f"cannot make {name} for images {list(image_shape)}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}; choose another network or image shape"
        ) from error


class EmbeddingLayer(nn.Linear):
    """A fully connected layer with dropout before it, under the names of the layer that it replaces."""

    def __init__(self, inputs: int, emb_size: int, dropout: float) -> None:
        super().__init__(inputs, emb_size)
        self.dropout = dropout

    def forward(self, input: Tensor) -> Tensor:
        """Map features [b, inputs] to embeddings [b, emb_size]."""
        return super().forward(F.dropout(input, self.dropout, self.training))
