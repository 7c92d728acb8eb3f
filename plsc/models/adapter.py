"""Networks of other packages as backbones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from plsc.errors import OptionError, PlscError
from plsc.models.base_model import BaseModel
from plsc.models.modes import evaluating
from plsc.models.neck import EmbeddingNeck


class Adapter(BaseModel):
    """A network that maps images to features [b, F], and a neck; its own names stand behind ``network.``.

    channels: of the images that it takes; gray ones are given to a network of three channels three times.
    A run on blank images says how many features there are.
    """

    def __init__(
        self,
        network: nn.Module,
        channels: int,
        image_shape: Sequence[int],
        emb_size: int,
        dropout: float,
        neck: str,
    ) -> None:
        super().__init__()
        self.network = network
        self.channels = channels
        with evaluating(network), torch.no_grad():
            _, features = network(torch.zeros(2, channels, *image_shape[1:])).shape
        self.neck = EmbeddingNeck(features, emb_size, dropout, neck)

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, emb_size] of the images [b, C, H, W]."""
        if input.shape[1] == 1 < self.channels:
            input = input.expand(-1, self.channels, -1, -1)
        return self.neck(self.network(input))


@contextlib.contextmanager
def making(name: str, image_shape: Sequence[int]) -> Iterator[None]:
    """Turn whatever a package raises for a network into OptionError: each network refuses in its own way."""
    try:
        yield
    except PlscError:
        raise
    except Exception as error:
        raise OptionError(
            f"cannot make {name} for images {list(image_shape)}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}; choose another network or image shape"
        ) from error
