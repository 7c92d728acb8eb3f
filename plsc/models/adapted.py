"""Networks of other packages as backbones: ``torchvision/resnet18``, ``timm/vit_tiny_patch16_224``.

Weights are never fetched, whatever tag a name has; `model.pretrained` takes a file of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plsc.errors import OptionError, PlscError, did_you_mean
from plsc.models.base_model import BaseModel, evaluating
from plsc.models.neck import EmbeddingNeck

TORCHVISION, TIMM = "torchvision/", "timm/"

_TORCHVISION_CHANNELS = 3
_CLASSES = 1  # as wide as no other layer


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


def build_torchvision(
    name: str, emb_size: int, image_shape: Sequence[int], dropout: float, neck: str
) -> Adapter:
    """Return the network of ``torchvision/<name>`` with fresh weights, and a neck in place of its last layer.

    Raises:
        OptionError: unknown name, an image that the network cannot take, or no fully connected layer at its
            end.
    """
    from torchvision import models

    short = name.removeprefix(TORCHVISION)
    known = models.list_models(module=models)
    if short not in known:
        raise OptionError(f"torchvision has no network {short!r}{did_you_mean(short, known)}")
    settings: dict[str, Any] = {}
    if short.startswith("vit_"):
        settings = {"image_size": image_shape[-1]}
    elif short == "maxvit_t":
        settings = {"input_size": tuple(image_shape[1:])}
    elif short in ("googlenet", "inception_v3"):  # without auxiliary classifiers
        settings = {"aux_logits": False, "init_weights": True}
    with _making(name, image_shape):
        network = models.get_model(short, weights=None, num_classes=_CLASSES, **settings)
        _remove_last(network, name)
        return Adapter(network, _TORCHVISION_CHANNELS, image_shape, emb_size, dropout, neck)


def _remove_last(network: nn.Module, name: str) -> None:
    """Have the network return the input of its last layer, without the dropout before it."""
    layers = [(path, m) for path, m in network.named_modules() if not list(m.children())]
    linear = [at for at, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear)]
    path, last = layers[linear[-1]] if linear else ("", None)
    if last is None or last.out_features != _CLASSES:
        raise OptionError(
            f"{name} does not end in a fully connected layer, so it gives no embeddings; choose another"
        )
    _, before = layers[linear[-1] - 1]
    if isinstance(before, nn.Dropout):
        before.p = 0.0
    network.set_submodule(path, nn.Identity())


def build_timm(
    name: str, emb_size: int, image_shape: Sequence[int], dropout: float, neck: str
) -> Adapter:
    """Return the network of ``timm/<name>`` with fresh weights, and a neck in place of its last layer.

    The image size is passed to networks that depend on it.

    Raises:
        OptionError: timm is not installed, an unknown name, or an image that the network cannot take.
    """
    try:
        import timm
    except ImportError as error:
        raise OptionError(
            f"model {name!r} needs the package timm; pip install 'plsc[timm]'"
        ) from error
    short = name.removeprefix(TIMM)
    # Also keeps out names such as hf-hub:..., which would be fetched.
    if not timm.is_model(short):
        raise OptionError(f"timm has no network {short!r}{did_you_mean(short, timm.list_models())}")
    settings: dict[str, Any] = {
        "pretrained": False,
        "num_classes": 0,
        "in_chans": image_shape[0],
        "drop_rate": 0.0,
    }
    with _making(name, image_shape):
        try:
            network = timm.create_model(short, img_size=tuple(image_shape[1:]), **settings)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            network = timm.create_model(short, **settings)  # a network for images of any size
        return Adapter(network, image_shape[0], image_shape, emb_size, dropout, neck)


@contextlib.contextmanager
def _making(name: str, image_shape: Sequence[int]) -> Iterator[None]:
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
