"""Networks by name: plsc's own (`plsc.config.model.NETWORKS`), of torchvision and timm, and the user's.

Weights are never fetched, whatever tag a name has; `model.pretrained` takes a file of them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plsc.config.model import DEFAULT_NECK, NETWORKS
from plsc.config.option import load_function
from plsc.errors import OptionError, did_you_mean, refusing, suggest
from plsc.models.base_model import BaseModel, evaluating
from plsc.models.neck import EmbeddingNeck

TORCHVISION, TIMM = "torchvision/", "timm/"

_CLASSES = 1  # as wide as no other layer


def build_model(
    name: str,
    emb_size: int = 512,
    image_shape: Sequence[int] = (3, 112, 112),
    dropout: float = 0.4,
    neck: str = DEFAULT_NECK,
    arguments: Mapping[str, Any] | None = None,
) -> BaseModel:
    """Return the network of that name, with fresh weights.

    name: of NETWORKS, ``torchvision/<name>``, ``timm/<name>``, or ``package.module:Class``. arguments: more
    of that class's.

    Raises:
        OptionError: an unknown name, or options that the network cannot take.
    """
    shape = tuple(image_shape)
    options = {"emb_size": emb_size, "image_shape": shape, "dropout": dropout, "neck": neck}
    if name.startswith((TORCHVISION, TIMM)):
        make = _torchvision_network if name.startswith(TORCHVISION) else _timm_network
        # Each network refuses in its own way.
        with refusing(f"cannot make {name} for images {list(shape)}", "choose another"):
            network, channels = make(name.partition("/")[2], shape)
            return Adapter(network, channels, shape, emb_size, dropout, neck)
    if ":" in name:
        return load_custom(name, **{**options, **(arguments or {})})
    if name not in NETWORKS:
        raise OptionError(
            f"no model is named {name!r}; {suggest(name, NETWORKS)}; "
            f"others are named '{TORCHVISION}resnet18', '{TIMM}vit_tiny_patch16_224', your own "
            "'package.module:Class'"
        )
    reference, own = NETWORKS[name]
    module, _, made = reference.partition(":")
    model: BaseModel = getattr(importlib.import_module(module), made)(**own, **options)
    return model


def load_custom(reference: str, **options: object) -> BaseModel:
    """Import ``package.module:Class`` and make one; it gets those ``options`` that its __init__ names.

    Imports and runs the user's code.

    Raises:
        OptionError: no such module or class, no `BaseModel`, or it cannot be made.
    """
    chosen = load_function(reference, "model.name", "set_model")
    if not (inspect.isclass(chosen) and issubclass(chosen, BaseModel)):
        raise OptionError(
            f"model {reference!r} is {chosen!r}; expected a class derived from "
            "plsc.models.base_model.BaseModel"
        )
    accepted = inspect.signature(chosen).parameters
    advice = f"its __init__ is given those of {', '.join(options)} that it names"
    with refusing(f"cannot make model {reference!r}", f"{advice}; or give an instance (set_model)"):
        return chosen(**{name: value for name, value in options.items() if name in accepted})


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


def _torchvision_network(name: str, image_shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Return a network of torchvision that gives the input of its last layer, and its count of channels."""
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise OptionError(f"torchvision has no network {name!r}{did_you_mean(name, known)}")
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
        raise OptionError(
            f"{TORCHVISION}{name} does not end in a fully connected layer, so it gives no embeddings; "
            "choose another"
        )
    _, before = layers[linear[-1] - 1]
    if isinstance(before, nn.Dropout):
        before.p = 0.0
    network.set_submodule(path, nn.Identity())
    return network, 3


def _timm_network(name: str, image_shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Return a network of timm that gives the input of its last layer, and its count of channels.

    The image size is passed to networks that depend on it.
    """
    try:
        import timm
    except ImportError as error:
        raise OptionError(
            f"model {TIMM + name!r} needs the package timm; pip install 'plsc[timm]'"
        ) from error
    # Also keeps out names such as hf-hub:..., which would be fetched.
    if not timm.is_model(name):
        raise OptionError(f"timm has no network {name!r}{did_you_mean(name, timm.list_models())}")
    channels = image_shape[0]
    settings: dict[str, Any] = {
        "pretrained": False,
        "num_classes": 0,
        "in_chans": channels,
        "drop_rate": 0.0,
    }
    try:
        return timm.create_model(name, img_size=image_shape[1:], **settings), channels
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        return timm.create_model(name, **settings), channels  # a network for images of any size
