"""Values that hold tensors: samples, and the states of parts that other people wrote.

Samples that are not images are tensors of any type, or dicts of tensors, which the network gets unchanged. A
network declares them by `BaseModel.example_input`: two samples, of the shapes and types of all others.

States are any Python values, written exactly as JSON and tensors; also as bytes, to exchange them between
ranks without pickles, which can run code.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from plsc.errors import CheckpointError, DataError, OptionError

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


_CONTAINERS = (list, tuple, set, frozenset, torch.Size, dict, OrderedDict)
_TYPES: dict[str, Callable[[Any], Any]] = {
    **{f"${kind.__name__}": kind for kind in (*_CONTAINERS, float)},
    "$str": lambda of: of.encode().decode("unicode_escape"),
    "$bytes": lambda of: of.encode("latin-1"),
    "$Path": Path,
    "$dtype": lambda of: torch.empty(0, dtype=getattr(torch, of)).dtype,
}


def encode(
    value: Any,
    what: str,
    tensors: dict[str, Any],
    known: Mapping[int, Any] = MappingProxyType({}),
    path: str = "",
) -> Any:
    """Return a value as JSON, and add its tensors to `tensors`, by names such as ``history.0``.

    What JSON lacks (infinities, tuples, order, keys other than strings) becomes ``{"$type": content}``.

    what: whose value it is. known: JSON of objects that are stored elsewhere, by id. path: of the value.
    Raises CheckpointError for any other type.
    """
    kind, tensor = type(value), getattr(value, "local", value)  # of a ShardedTensor
    if id(value) in known:
        return {"$known": known[id(value)]}
    if value is None or kind in (bool, int) or (kind is float and math.isfinite(value)):
        return value
    if kind is str:  # a manifest has no control characters
        return value if value.isprintable() else {"$str": value.encode("unicode_escape").decode()}
    if kind in (float, torch.dtype):
        return {f"${kind.__name__}": repr(value).removeprefix("torch.")}
    if kind is bytes or isinstance(value, Path):
        text = value.decode("latin-1") if kind is bytes else str(value)
        return {"$bytes" if kind is bytes else "$Path": encode(text, what, tensors, known, path)}
    if kind in _CONTAINERS:
        items = []
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            name = encode(key, what, tensors, known, f"{path} key")
            item = encode(one, what, tensors, known, f"{path}.{name}" if path else f"{name}")
            items.append([name, item] if isinstance(value, dict) else item)
        return items if kind is list else {f"${kind.__name__}": items}
    shape = list(value.shape) if kind is np.ndarray else None
    if (shape is not None or isinstance(value, np.generic)) and value.dtype.kind in "biufcSUMm":
        raw = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), np.uint8))
        return {"$array": [value.dtype.str, shape, encode(raw, what, tensors, known, path)]}
    if isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_meta:
        name = path
        while name in tensors:
            name += "_"
        tensors[name] = value
        return {"$tensor": [name, tensor.is_cpu]}
    raise CheckpointError(
        f"{what}: {path or 'it'} is of type {kind.__name__}, which cannot be stored; expected "
        "numbers, strings, lists, tuples, sets, dictionaries, arrays and tensors"
    )


def decode(
    value: Any, tensors: dict[str, Any], device: Any = None, known: Callable[..., Any] | None = None
) -> Any:
    """Return the value that was encoded. Raises CheckpointError for JSON that `encode` does not return.

    tensors: by name; those of the value are removed. device: for those that were not on the CPU. known:
    returns an object by its JSON.
    """

    def inner(value: Any) -> Any:
        if isinstance(value, list):
            return [inner(item) for item in value]
        if not isinstance(value, dict):
            return value
        kind, of = next(iter(value.items())) if len(value) == 1 else ("", [])
        if kind == "$tensor":
            tensor = tensors.pop(of[0])
            return tensor if of[1] or device is None else tensor.to(device)
        if kind == "$array":
            array = np.frombuffer(inner(of[2]).numpy().tobytes(), np.dtype(of[0]))
            return array[0] if of[1] is None else array.reshape(of[1]).copy()
        if kind == "$known" and known is not None:
            return known(*of)
        if kind in _TYPES:
            return _TYPES[kind](inner(of))
        return {key: inner(item) for key, item in value.items()}  # of older checkpoints

    try:
        return inner(value)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint is damaged: {str(error)[:200]}; choose another one") from error


def to_bytes(value: Any) -> bytearray:
    """Return a value as bytes, for `from_bytes`. Raises CheckpointError for a type that `encode` refuses."""
    tensors: dict[str, Any] = {"": torch.empty(0)}  # no other tensor gets this name
    text = json.dumps(encode(value, "a value for other ranks", tensors)).encode()
    tensors[""] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return bytearray(safetensors.torch.save(tensors))


def from_bytes(data: bytes | bytearray) -> Any:
    """Return the value that `to_bytes` was given; other bytes raise an exception."""
    tensors = safetensors.torch.load(bytes(data))
    return decode(json.loads(bytes(tensors.pop("").numpy())), tensors)
