"""Networks of torchvision and timm, without their classifier and followed by our neck.

Weights are never downloaded, also for names with a weights tag; `model.pretrained` loads them from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plsc.errors import OptionError, did_you_mean, refusing
from plsc.models.base_model import LIBRARIES, BaseModel, evaluating
from plsc.models.resnet import EmbeddingNeck
from plsc.version import install

_CLASSES = 1  # identifies the classifier: no other layer has one output


class Adapter(BaseModel):
    """A network that maps images to features [b, F], followed by an `EmbeddingNeck`.

    State-dict keys of the network have the prefix ``network.``. A run on blank images determines F.

    channels: input channels of the network; if it has three, gray images are repeated three times.
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
        self.is_repeated = image_shape[0] == 1 < channels  # not in build_network, which torch.fx traces
        self.channels = channels
        with evaluating(network), torch.no_grad():
            _, features = network(torch.zeros(2, channels, *image_shape[1:])).shape
        self.neck = EmbeddingNeck(features, emb_size, dropout, neck)

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, emb_size] of the images [b, C, H, W]."""
        if self.is_repeated:
            input = input.expand(-1, self.channels, -1, -1)
        return self.neck(self.network(input))


def _torchvision_network(name: str, image_shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Return a torchvision network without its last linear layer, and its number of input channels."""
    from torchvision import models

    _check_name(name, "torchvision", models.list_models(module=models))
    settings: dict[str, Any] = {}
    if name.startswith("vit_"):
        settings = {"image_size": image_shape[-1]}
    elif name == "maxvit_t":
        settings = {"input_size": image_shape[1:]}
    elif name in ("googlenet", "inception_v3"):  # without auxiliary classifiers
        settings = {"aux_logits": False, "init_weights": True}
    network = models.get_model(name, weights=None, num_classes=_CLASSES, **settings)
    layers = [(path, m) for path, m in network.named_modules() if not list(m.children())]
    linear = [at for at, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear)]
    path, last = layers[linear[-1]] if linear else ("", None)
    if last is None or last.out_features != _CLASSES:
        raise OptionError(f"torchvision/{name} does not end with a linear layer, so it has no embeddings")
    _, before = layers[linear[-1] - 1]
    if isinstance(before, nn.Dropout):
        before.p = 0.0
    network.set_submodule(path, nn.Identity())
    return network, 3


def _check_name(name: str, library: str, known: Sequence[str]) -> None:
    if name not in known:
        raise OptionError(
            f"{library} has no network {name!r} for classification; {library}'s list_models() lists the names"
            f"{did_you_mean(name, known)}"
        )


def _timm_network(name: str, image_shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Return a timm network without its classifier, and its number of input channels.

    Networks that depend on the image size get it.
    """
    try:
        import timm
    except ImportError as error:
        raise OptionError(f"model 'timm/{name}' needs the package timm: {install('timm')}") from error
    # Also rejects names such as hf-hub:..., which would be downloaded.
    _check_name(name.partition(".")[0], "timm", timm.list_models())
    channels = image_shape[0]
    settings: dict[str, Any] = {"pretrained": False, "num_classes": 0, "in_chans": channels, "drop_rate": 0.0}
    try:
        return timm.create_model(name, img_size=image_shape[1:], **settings), channels
    except TypeError:  # a network without img_size; any other error comes again
        return timm.create_model(name, **settings), channels


def _adapted(make: Callable[[str, tuple[int, ...]], tuple[nn.Module, int]]) -> Callable[..., Adapter]:
    """Return a function that adapts the network of a name in a library, with the options of a run."""

    def build(name: str, emb_size: int, image_shape: tuple[int, ...], dropout: float, neck: str) -> Adapter:
        # Each network raises its own kind of error.
        with refusing(f"cannot create {name} for images {list(image_shape)}", "choose another network"):
            return Adapter(*make(name, image_shape), image_shape, emb_size, dropout, neck)

    return build


LIBRARIES |= {"torchvision": _adapted(_torchvision_network), "timm": _adapted(_timm_network)}
