"""Evaluate embeddings: embed images, verify pairs, plot the results (`plots` imports matplotlib).

Functions that compute from arrays take tensors, too, of any device.
"""

from __future__ import annotations

import functools
from importlib import import_module
from types import FunctionType
from typing import Any

import torch


def as_array(value: Any) -> Any:
    """Return a tensor, also one in a list, tuple or dict, as an array; anything else unchanged.

    On any device, with or without a gradient; floats of 16 bits and less become float32.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.is_floating_point() and value.element_size() < 4 else value).numpy()
    if type(value) is dict:
        return {name: as_array(one) for name, one in value.items()}
    return type(value)(map(as_array, value)) if type(value) in (list, tuple) else value


def take_tensors(module_name: str) -> None:
    """Let all public functions that a module defines take tensors."""
    module = import_module(module_name)
    for name, function in list(vars(module).items()):
        if isinstance(function, FunctionType) and function.__module__ == module_name and name[0] != "_":
            setattr(module, name, _converting(function))


def _converting(function: FunctionType) -> Any:
    @functools.wraps(function)
    def converting(*arguments: Any, **named: Any) -> Any:
        return function(*as_array(arguments), **as_array(named))

    return converting


for _name in ("all_pairs", "capacity", "curves", "groups", "identification", "templates", "verification"):
    take_tensors(f"{__name__}.{_name}")
