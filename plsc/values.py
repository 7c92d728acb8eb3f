"""Python values as JSON and tensors and back, exactly: the states of parts that other people wrote.

Also as bytes, to exchange values between ranks without pickles, which can run code.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from plsc.errors import CheckpointError

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
