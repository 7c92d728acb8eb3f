"""Networks by name. The names of plsc's own are registered in `plsc.options.model.NETWORKS`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from plsc.errors import OptionError, PlscError, kind_and_line, suggest
from plsc.models.adapted import TIMM, TORCHVISION, build_timm, build_torchvision
from plsc.models.base_model import BaseModel
from plsc.named import load_function
from plsc.options.model import DEFAULT_NECK, NETWORKS


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
    if name.startswith(TORCHVISION):
        return build_torchvision(name, emb_size, tuple(image_shape), dropout, neck)
    if name.startswith(TIMM):
        return build_timm(name, emb_size, tuple(image_shape), dropout, neck)
    options = {
        "emb_size": emb_size,
        "image_shape": tuple(image_shape),
        "dropout": dropout,
        "neck": neck,
    }
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
    network: BaseModel = getattr(importlib.import_module(module), made)(**own, **options)
    return network


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
    try:
        return chosen(**{name: value for name, value in options.items() if name in accepted})
    except PlscError:
        raise
    except Exception as error:  # a user's constructor may throw anything
        raise OptionError(
            f"cannot make model {reference!r}: {kind_and_line(error)}; its __init__ is given "
            f"those of {', '.join(options)} that it names; or give an instance (set_model)"
        ) from error
