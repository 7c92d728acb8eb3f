"""The options of the backbone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from plsc.option import at_least, between, declare, not_empty, of_model, of_run
from plsc.options.initialization import read_initializations


def _image_shape(shape: tuple[int, ...]) -> str | None:
    good = len(shape) == 3 and shape[0] in (1, 3) and min(shape) >= 1
    return None if good else "(channels, height, width) with 1 or 3 channels, such as (3, 112, 112)"


NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"ResNet{depth}": ("plsc.models.resnet:ResNet", {"depth": depth})
        for depth in (18, 34, 50, 101, 152)
    },
    **{
        f"IResNet{depth}": ("plsc.models.iresnet:IResNet", {"depth": depth})
        for depth in (18, 34, 50, 100, 200)
    },
    "SmallResNet": ("plsc.models.resnet:SmallResNet", {}),
}
"""The networks of plsc by name: the class, imported when it is made, and arguments of its own."""

DEFAULT_NECK = "norm-dropout-linear-norm"
_NECK = re.compile(r"(norm-)?(dropout-)?linear(-norm)?")


def check_neck(parts: str) -> str | None:
    """Return None for the parts of a neck, else what was expected."""
    if _NECK.fullmatch(parts):
        return None
    return (
        "'linear', with 'norm-', 'dropout-' or 'norm-dropout-' before it and '-norm' after it where wanted, "
        "such as 'dropout-linear'"
    )


def _initializations(values: tuple[dict[str, Any], ...]) -> None:
    read_initializations(values)


@dataclass(frozen=True)
class ModelOptions:
    """The backbone."""

    name: str = of_model(
        "ResNet50",
        f"{', '.join(NETWORKS)}, 'torchvision/<name>', 'timm/<name>', or 'package.module:Class' for a "
        "BaseModel of your own",
        "set_model_name(name)",
        not_empty,
    )
    emb_size: int = of_model(512, "size of the embedding", "set_emb_size(size)", at_least(1))
    image_shape: tuple[int, int, int] = of_model(
        (3, 112, 112),
        "channels, height, width of the input; on the command line [3,112,112]",
        "set_image_shape(shape)",
        _image_shape,
    )
    dropout: float = of_model(
        0.4, "dropout before the embedding layer", "set_dropout(ratio)", between(0, 0.99)
    )
    neck: str = of_model(
        DEFAULT_NECK,
        "layers between features and embedding, joined by '-': norm (batch norm), dropout, linear",
        "set_neck(parts)",
        check_neck,
    )
    sync_batch_norm: bool = of_run(
        False, "batch-norm statistics over the global batch", "set_sync_batch_norm(sync)"
    )
    pretrained: str | None = declare(
        None,
        "weights to start from, where name and shape match: a checkpoint, a .safetensors file, or a state "
        "dict of torch.save; optimizer and position start afresh",
        "set_pretrained(path)",
        not_empty,
    )
    initialization: tuple[dict[str, Any], ...] = declare(
        (),
        "first values of parameters by rule: each has a pattern, a rule (xavier_uniform, xavier_normal, "
        "kaiming_uniform, kaiming_normal, orthogonal, normal, trunc_normal, uniform, constant) and its "
        "arguments; the first that matches counts; set_initialization adds one",
        "set_initializations(rules)",
        _initializations,
    )
