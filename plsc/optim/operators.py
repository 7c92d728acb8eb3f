"""The operators whose precision can be set by name, and how a network's calls of them are caught."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_CONVOLUTIONS = {
    f"conv{prefix}{n}d": (getattr(torch, f"conv{prefix}{n}d"),)
    for prefix in ("", "_transpose")
    for n in (1, 2, 3)
}
_PRODUCTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "linear": (F.linear,),
    "matmul": (
        torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.bmm,
        Tensor.bmm, torch.addmm, torch.einsum,
    ),
    "attention": (F.scaled_dot_product_attention,),
}  # fmt: skip
_OTHERS: dict[str, tuple[Callable[..., Any], ...]] = {
    "batch_norm": (F.batch_norm, torch.batch_norm),
    "layer_norm": (F.layer_norm, torch.layer_norm),
    "group_norm": (F.group_norm, torch.group_norm),
    "instance_norm": (F.instance_norm, torch.instance_norm),
    "normalize": (F.normalize,),
    "softmax": (F.softmax, torch.softmax, Tensor.softmax),
    "log_softmax": (F.log_softmax, torch.log_softmax, Tensor.log_softmax),
    "prelu": (F.prelu, torch.prelu, Tensor.prelu),
    "relu": (F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
    "gelu": (F.gelu,),
    "silu": (F.silu,),
    "sigmoid": (F.sigmoid, torch.sigmoid, Tensor.sigmoid),
    "tanh": (F.tanh, torch.tanh, Tensor.tanh),
    "exp": (torch.exp, Tensor.exp),
    "log": (torch.log, Tensor.log),
    "pow": (torch.pow, Tensor.pow, Tensor.__pow__),
    "sum": (torch.sum, Tensor.sum),
    "mean": (torch.mean, Tensor.mean),
    "add": (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__),
    "mul": (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__),
    "avg_pool2d": (F.avg_pool2d,),
    "adaptive_avg_pool2d": (F.adaptive_avg_pool2d,),
    "max_pool2d": (F.max_pool2d, torch.max_pool2d),
    "interpolate": (F.interpolate,),
}  # fmt: skip
OPERATORS: dict[str, tuple[Callable[..., Any], ...]] = {**_CONVOLUTIONS, **_PRODUCTS, **_OTHERS}
"""Names of operators, and the functions of torch that they stand for."""

INPUT_ONLY = ("batch_norm", "instance_norm")
"""Operators of which the input alone changes its type: their statistics are float32 whatever comes in."""


class OperatorPrecision(TorchFunctionMode):
    """While it is entered, the named operators compute in the type that is theirs, whatever autocast says.

    white: in `dtype`, 16 bits; black: in float32. It costs some microseconds for each call of torch.
    """

    def __init__(
        self, white: Collection[str], black: Collection[str], dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self._device = device
        self._types: dict[Callable[..., Any], tuple[torch.dtype, bool]] = {}
        for names, kind in ((white, dtype), (black, torch.float32)):
            for name in names:
                for function in OPERATORS[name]:
                    self._types[function] = (kind, name in INPUT_ONLY)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function; torch calls this for each of its own."""
        kwargs = kwargs or {}
        wanted = self._types.get(func)
        if wanted is None:
            return func(*args, **kwargs)
        kind, input_only = wanted
        if input_only:
            args = (*cast(args[:1], kind), *args[1:])
            kwargs = {k: cast(v, kind) if k == "input" else v for k, v in kwargs.items()}
        else:
            args, kwargs = cast(args, kind), cast(kwargs, kind)
        is_within_float32 = not torch.is_autocast_enabled(self._device)
        with torch.autocast(self._device, enabled=False):
            result = func(*args, **kwargs)
        return cast(result, torch.float32) if is_within_float32 else result


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Return values, however nested, with their tensors of 16 or 32 floating bits in `dtype`."""

    def convert(value: Any) -> Any:
        is_cast = isinstance(value, Tensor) and value.dtype in _FLOATS
        return value.to(dtype) if is_cast else value

    return tree_map(convert, values)


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
