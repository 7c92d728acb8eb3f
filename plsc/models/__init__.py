"""Networks (backbones) that map images to embeddings, by name: ours, torchvision's, timm's, a user's class.

Weights are never downloaded, also for names with a weights tag; `model.pretrained` loads them from a file.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plsc.errors import OptionError, did_you_mean, refusing, suggest
from plsc.models.base_model import BaseModel, check_model, evaluating
from plsc.models.recomputation import find_blocks
from plsc.models.resnet import DEPTHS, IRESNET_BLOCKS, EmbeddingNeck, IResNet, ResNet, SmallResNet
from plsc.names import DEFAULT_NECK, load_function, names_code
from plsc.version import install

__all__ = ["BaseModel", "build_model", "check_model", "find_blocks", "load_custom"]

TORCHVISION, TIMM = "torchvision/", "timm/"

NETWORKS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    **{f"ResNet{depth}": (ResNet, {"depth": depth}) for depth in DEPTHS},
    **{f"IResNet{depth}": (IResNet, {"depth": depth}) for depth in IRESNET_BLOCKS},
    "SmallResNet": (SmallResNet, {}),
}
"""The built-in networks by name: the class and its arguments."""

_CLASSES = 1  # identifies the classifier: no other layer has one output


def build_model(
    name: str | type[BaseModel],
    emb_size: int = 512,
    image_shape: Sequence[int] = (3, 112, 112),
    dropout: float = 0.4,
    neck: str = DEFAULT_NECK,
    arguments: Mapping[str, Any] | None = None,
) -> BaseModel:
    """Return the network of that name, with newly initialised weights.

    name: one of NETWORKS, ``torchvision/<name>``, ``timm/<name>``, ``package.module:Class``, or that class.
    arguments: further constructor arguments of that class.

    Raises:
        OptionError: unknown name, or options that the network does not support.
    """
    shape = tuple(image_shape)
    options = {"emb_size": emb_size, "image_shape": shape, "dropout": dropout, "neck": neck}
    if isinstance(name, str) and name.startswith((TORCHVISION, TIMM)):
        make = _torchvision_network if name.startswith(TORCHVISION) else _timm_network
        # Each network raises its own kind of error.
        with refusing(f"cannot create {name} for images {list(shape)}", "choose another network"):
            network, channels = make(name.partition("/")[2], shape)
            return Adapter(network, channels, shape, emb_size, dropout, neck)
    if isinstance(name, type) or names_code(name):
        return load_custom(name, **{**options, **(arguments or {})})
    if name not in NETWORKS:
        raise OptionError(f"unknown model {name!r}; {suggest(name, NETWORKS)}")
    made, own = NETWORKS[name]
    return made(**own, **options)


def load_custom(reference: str | type[BaseModel], **options: object) -> BaseModel:
    """Import ``package.module:Class`` unless it is the class, and return an instance; runs the user's code.

    options: passed to __init__ if it has parameters of these names.

    Raises:
        OptionError: no such module or class, no subclass of `BaseModel`, or its __init__ fails.
    """
    chosen: Any = reference
    if isinstance(reference, str):
        chosen = load_function(reference, "model.name")
    if not (inspect.isclass(chosen) and issubclass(chosen, BaseModel)):
        raise OptionError(
            f"model.name is {reference!r}, which is not a network; expected a subclass of "
            "plsc.models.base_model.BaseModel"
        )
    accepted = inspect.signature(chosen).parameters
    advice = f"its __init__ can have the parameters {', '.join(options)}"
    with refusing(f"cannot create model {reference!r}", f"{advice}; or pass an instance to set_model"):
        return chosen(**{name: value for name, value in options.items() if name in accepted})


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
        raise OptionError(f"{TORCHVISION}{name} does not end with a linear layer, so it has no embeddings")
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
        raise OptionError(f"model {TIMM + name!r} needs the package timm: {install('timm')}") from error
    # Also rejects names such as hf-hub:..., which would be downloaded.
    _check_name(name.partition(".")[0], "timm", timm.list_models())
    channels = image_shape[0]
    settings: dict[str, Any] = {"pretrained": False, "num_classes": 0, "in_chans": channels, "drop_rate": 0.0}
    try:
        return timm.create_model(name, img_size=image_shape[1:], **settings), channels
    except TypeError:  # a network without img_size; any other error comes again
        return timm.create_model(name, **settings), channels
