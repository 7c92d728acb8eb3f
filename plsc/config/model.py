"""Options of the backbone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plsc.config.option import at_least, between, declare, not_empty, of_model, of_run
from plsc.errors import suggest
from plsc.names import DEFAULT_NECK, NETWORKS, names_code


def _image_shape(shape: tuple[int, ...]) -> str | None:
    good = len(shape) == 3 and shape[0] in (1, 3) and min(shape) >= 1
    return None if good else "(channels, height, width) with 1 or 3 channels, such as (3, 112, 112)"


def check_network(name: str) -> str | None:
    """Return None for a known network, one of a library or a custom one, else what was expected."""
    if name in NETWORKS or names_code(name) or name.startswith(("torchvision/", "timm/")):
        return None
    others = "'torchvision/NAME', 'timm/NAME', your own 'package.module:Class'"
    return f"{others}, or a name; {suggest(name, NETWORKS)}"


_NECK = re.compile(r"(norm-)?(dropout-)?linear(-norm)?")


def check_neck(parts: str) -> str | None:
    """Return None for a valid neck, else a description of valid ones."""
    if _NECK.fullmatch(parts):
        return None
    return (
        "'linear', optionally with 'norm-', 'dropout-' or 'norm-dropout-' before it and '-norm' after it, "
        "such as 'dropout-linear'"
    )


@dataclass(frozen=True)
class ModelOptions:
    """Backbone network."""

    name: str = of_model(
        "ResNet50",
        f"network: {', '.join(NETWORKS)}, 'torchvision/NAME', 'timm/NAME', or 'package.module:Class' (a "
        "subclass of BaseModel)",
        "set_model_name(model_name)",
        check_network,
    )
    emb_size: int = of_model(512, "size of the embedding", "set_emb_size(size)", at_least(1))
    image_shape: tuple[int, int, int] = of_model(
        (3, 112, 112),
        "channels, height and width of the input; on the command line [3,112,112]",
        "set_image_shape(shape)",
        _image_shape,
    )
    dropout: float = of_model(
        0.4, "dropout probability before the embedding layer", "set_dropout(ratio)", between(0, 0.99)
    )
    neck: str = of_model(
        DEFAULT_NECK,
        "layers between features and embedding, joined by '-': norm (batch norm), dropout, linear",
        "set_neck(parts)",
        check_neck,
    )
    sync_batch_norm: bool = of_run(
        False, "use batch-norm statistics of the global batch", "set_sync_batch_norm(sync)"
    )
    pretrained: str | None = declare(
        None,
        "initial weights: a checkpoint, a .safetensors file, or a state dict of torch.save",
        "set_pretrained(path)",
        not_empty,
    )
