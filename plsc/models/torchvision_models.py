"""The classification networks of torchvision as backbones: ``torchvision/resnet18``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from plsc.errors import OptionError, did_you_mean
from plsc.models.adapter import Adapter, EmbeddingLayer, making
from plsc.models.neck import check_sizes

PREFIX = "torchvision/"
_CHANNELS = 3


def build_torchvision(
    name: str, emb_size: int, image_shape: Sequence[int], dropout: float
) -> Adapter:
    """Return the network of ``torchvision/<name>`` with fresh weights, its last layer ``emb_size`` wide.

    Weights are never fetched; plsc.entry's set_pretrained takes a file of them. dropout: before that layer.

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
            short, weights=None, num_classes=emb_size, **_settings(short, image_shape)
        )
    _replace_last(network, name, emb_size, dropout)
    return Adapter(network, _CHANNELS)


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


def _replace_last(network: nn.Module, name: str, emb_size: int, dropout: float) -> None:
    """Give the embedding layer its dropout: in a Dropout that is there already, or within the layer."""
    layers = [
        (path, layer) for path, layer in network.named_modules() if not list(layer.children())
    ]
    path, last = layers[-1]
    if not isinstance(last, nn.Linear) or last.out_features != emb_size:
        linear = [item for item in layers if isinstance(item[1], nn.Linear)]
        if not linear or linear[-1][1].out_features != emb_size:
            raise OptionError(
                f"{name} does not end in a fully connected layer, so it gives no embeddings; choose another"
            )
        path, last = linear[-1]
    assert isinstance(last, nn.Linear)
    parent = network.get_submodule(path.rpartition(".")[0])
    before = layers[[item[0] for item in layers].index(path) - 1][1]
    if isinstance(before, nn.Dropout) and before in list(parent.children()):
        before.p = dropout
    else:
        setattr(
            parent, path.rpartition(".")[2], EmbeddingLayer(last.in_features, emb_size, dropout)
        )
