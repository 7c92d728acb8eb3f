"""The networks of timm as backbones: ``timm/vit_tiny_patch16_224``. Needs the extra ``plsc[timm]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plsc.errors import OptionError, did_you_mean
from plsc.models.adapter import Adapter, making
from plsc.models.neck import check_sizes

PREFIX = "timm/"


def build_timm(
    name: str, emb_size: int, image_shape: Sequence[int], dropout: float, neck: str
) -> Adapter:
    """Return the network of ``timm/<name>`` with fresh weights, and a neck in place of its last layer.

    Weights are never fetched, whatever tag the name has; plsc.entry's set_pretrained takes a file of them.
    The image size is passed to networks that depend on it. dropout, neck: see `EmbeddingNeck`.

    Raises:
        OptionError: timm is not installed, an unknown name, or an image that the network cannot take.
    """
    try:
        import timm
    except ImportError as error:
        raise OptionError(
            f"model {name!r} needs the package timm; pip install 'plsc[timm]'"
        ) from error
    check_sizes(emb_size, dropout)
    short = name.removeprefix(PREFIX)
    # Also keeps out names such as hf-hub:..., which would be fetched.
    if not timm.is_model(short):
        raise OptionError(f"timm has no network {short!r}{did_you_mean(short, timm.list_models())}")
    settings: dict[str, Any] = {
        "pretrained": False,
        "num_classes": 0,
        "in_chans": image_shape[0],
        "drop_rate": 0.0,
    }
    with making(name, image_shape):
        try:
            network = timm.create_model(short, img_size=tuple(image_shape[1:]), **settings)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            network = timm.create_model(short, **settings)  # a network for images of any size
        return Adapter(network, image_shape[0], image_shape, emb_size, dropout, neck)
