"""The classification networks of torchvision as backbones: ``torchvision/resnet18``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from plsc.errors import OptionError, did_you_mean
from plsc.models.adapter import Adapter, making
from plsc.models.neck import check_sizes

PREFIX = "torchvision/"
_CHANNELS = 3
_CLASSES = 1  # as wide as no other layer


def build_torchvision(
    name: str, emb_size: int, image_shape: Sequence[int], dropout: float, neck: str
) -> Adapter:
    """Return the network of ``torchvision/<name>`` with fresh weights, and a neck in place of its last layer.

    Weights are never fetched; plsc.entry's set_pretrained takes a file of them. dropout, neck: see
    `EmbeddingNeck`.

    Raises:
        OptionError: unknown name, an image that the network cannot take, or no fully connected layer at its
            end.
    """
    from torchvision import models

    check_sizes(emb_size, dropout)
    short = name.removeprefix(PREFIX)
    known = models.list_models(module=models)
    if short not in known:
        raise OptionError(f"torchvision has no network {short!r}{did_you_mean(short, known)}")
    with making(name, image_shape):
        network = models.get_model(
            short, weights=None, num_classes=_CLASSES, **_settings(short, image_shape)
        )
        _remove_last(network, name)
        return Adapter(network, _CHANNELS, image_shape, emb_size, dropout, neck)


def _settings(short: str, image_shape: Sequence[int]) -> dict[str, Any]:
    """Return what the network wants to know besides its width."""
    if short.startswith("vit_"):
        return {"image_size": image_shape[-1]}
    if short == "maxvit_t":
        return {"input_size": tuple(image_shape[1:])}
    if short in (
        "googlenet",
        "inception_v3",
    ):  # without further classifiers, whose losses nobody computes
        return {"aux_logits": False, "init_weights": True}
    return {}


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
