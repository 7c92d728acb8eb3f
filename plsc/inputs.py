"""Samples that are not images: tensors of any type, or dicts of tensors, which the network gets unchanged.

A network declares them by `BaseModel.example_input`: two samples, of the shapes and types of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from plsc.errors import DataError, OptionError

Input: TypeAlias = Tensor | dict[str, Tensor]
"""Samples [b, ...]: a tensor, or a dict of tensors."""

NO_IMAGE = "; if it is no image, set the network's example_input"
"""Hint in errors about images."""


def check_example(example: Any, title: str) -> None:
    """Raise OptionError if an example input is no tensor [2, ...] or dict of such tensors."""
    tensors = list(example.values()) if isinstance(example, dict) else [example]
    if not tensors or not all(isinstance(one, Tensor) and one.shape[:1] == (2,) for one in tensors):
        raise OptionError(f"{title} must be a tensor [2, ...] or a dict of such tensors: two samples")


def map_tensors(function: Callable[[Tensor], Any], input: Input) -> Any:
    """Return the result of a function on the tensor, or on each tensor of the dict."""
    if isinstance(input, dict):
        return {name: function(one) for name, one in input.items()}
    return function(input)


def first_tensor(input: Any) -> Any:
    """Return the first tensor of a dict; anything else unchanged."""
    return next(iter(input.values()), None) if isinstance(input, dict) else input


def split_input(input: Input, parts: int) -> list[Input]:
    """Split the samples as `Tensor.tensor_split`."""
    if not isinstance(input, dict):
        return list(input.tensor_split(parts))
    split = {name: one.tensor_split(parts) for name, one in input.items()}
    return [{name: pieces[part] for name, pieces in split.items()} for part in range(parts)]


def split_sizes(total: int, parts: int) -> list[int]:
    """Return the sizes of the parts of `total` samples, as `Tensor.tensor_split` splits them."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def as_input(sample: Any, example: Input) -> Input:
    """Return a copy of a sample as tensors of the types of `example`.

    A sample is a tensor, array or number, or a dict of these. Raises DataError, without the sample's name, if
    its shape or keys differ from those of a sample of `example`, or it has floats instead of integers.
    """
    found, wanted = _structure(sample), _structure(example)
    if found != wanted:
        raise DataError(f"is {found}; expected {wanted}, like the network's example_input")
    if not isinstance(example, dict):
        return _as_tensor(sample, example)
    return {name: _as_tensor(sample[name], one, f"{name} ") for name, one in example.items()}


def _structure(value: Any) -> str:
    return f"a dict of {', '.join(sorted(map(str, value)))}" if isinstance(value, dict) else "no dict"


def _as_tensor(value: Any, example: Tensor, name: str = "") -> Tensor:
    try:
        is_array = isinstance(value, np.ndarray)  # torch warns about a read-only one
        tensor = torch.as_tensor(np.require(value, requirements="W") if is_array else value)
        is_wrong = tensor.shape != example.shape[1:] or not torch.can_cast(tensor.dtype, example.dtype)
        found = f"{_kind(tensor)} {list(tensor.shape)}" if is_wrong else ""
    except (TypeError, ValueError, RuntimeError):
        found = type(value).__name__
    if found:
        wanted = f"{_kind(example)} {list(example.shape[1:])}, like the network's example_input"
        raise DataError(f"{name}is {found}; expected {wanted}")
    return tensor.detach().to("cpu", example.dtype, copy=True)  # readers reuse their buffers


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def stack_inputs(samples: Iterable[Any], example: Input) -> Input:
    """Return a batch [b, ...] of samples from `as_input`; b may be 0."""
    batch = list(samples)

    def stack(tensors: list[Tensor], like: Tensor) -> Tensor:
        return torch.stack(tensors) if tensors else torch.empty_like(like[:0], device="cpu")

    if isinstance(example, dict):
        return {name: stack([one[name] for one in batch], like) for name, like in example.items()}
    return stack(batch, example)
