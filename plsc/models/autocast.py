"""What of a network runs in 16 bits: autocast, and lists of modules and operators in types of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from plsc.config.runtime import check_apart
from plsc.errors import OptionError, did_you_mean
from plsc.models.base_model import ForwardWrapper

# Layers in which operators are not seen: those of plsc that compute them without calling torch's, and torch's
# attention, which is one function of torch's with the others inside.
_LAYERS: dict[str, type[nn.Module]] = {
    "batch_norm": _BatchNorm,
    "conv2d": nn.Conv2d,
    "prelu": nn.PReLU,
    **dict.fromkeys(("linear", "matmul", "attention", "softmax"), nn.MultiheadAttention),
}


@dataclass(frozen=True)
class PrecisionLists:
    """Two lists of `AutoMixedPrecisionLists`, looked up in a network.

    Modules are named as in `named_modules`.
    """

    white_modules: list[str] = field(default_factory=list)
    black_modules: list[str] = field(default_factory=list)
    white_operators: list[str] = field(default_factory=list)
    black_operators: list[str] = field(default_factory=list)

    @staticmethod
    def look_up(network: nn.Module, white: Sequence[str], black: Sequence[str]) -> PrecisionLists:
        """Return what the names mean in a network.

        Raises OptionError for a name that means nothing, with near ones, and for modules that both lists
        name.
        """
        check_apart(white, black)
        white_modules, white_operators = _look_up(network, "white_list", white)
        black_modules, black_operators = _look_up(network, "black_list", black)
        both = [name for name in white_modules if name in black_modules]
        if both:
            raise OptionError(
                f"both precision.white_list and precision.black_list name {both[0] or 'the whole network'}"
                f"{f' and {len(both) - 1} more modules' if len(both) > 1 else ''}; leave each in one of them"
            )
        return PrecisionLists(white_modules, black_modules, white_operators, black_operators)


def apply_lists(network: nn.Module, lists: PrecisionLists, dtype: torch.dtype, device: torch.device) -> None:
    """Let a network's modules follow the lists whenever it is called with autocast on, in place.

    A module of the black list, and all within it, computes in float32, one of the white list in `dtype`; of
    modules within each other the innermost decides (within one in float32 its result is float32 again), and
    for an operator that is named itself its name does. Parameters and state dicts stay what they are. It is
    the ``forward`` of single modules that is wrapped, so that what activation checkpointing computes again
    goes the same way; `plsc.models.base_model.unwrap` takes it back.
    """
    white, black = (
        tuple(_LAYERS[name] for name in names if name in _LAYERS)
        for names in (lists.white_operators, lists.black_operators)
    )
    operators = (lists.white_operators, lists.black_operators)
    watch = OperatorPrecision(*operators, dtype, device.type) if any(operators) else None
    scope = _Scope(device.type, watch)
    for name, module in network.named_modules():
        kinds: list[torch.dtype | None] = []
        if isinstance(module, white + black):
            kinds.append(torch.float32 if isinstance(module, black) else dtype)
        if name in lists.white_modules:
            kinds.append(dtype)
        if name in lists.black_modules:
            kinds.append(torch.float32)
        if watch is not None and not kinds:
            kinds.append(None)
        for kind in kinds:
            module.forward = _Listed(module.forward, scope, kind)
    network.forward = _Entered(network.forward, scope)


def autocast(mode: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a network runs in a mode: 'float32', 'float16' or 'bfloat16'."""
    if mode == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, mode))


def _look_up(network: nn.Module, option: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the modules and the operators that names mean."""
    modules = {name: type(module).__name__ for name, module in network.named_modules()}
    found: dict[str, None] = {}
    operators = [name for name in names if name in OPERATORS]
    for pattern in names:
        mine = [
            name
            for name, kind in modules.items()
            if (name and fnmatchcase(name, pattern)) or fnmatchcase(kind, pattern)
        ]
        if not mine and pattern not in OPERATORS:
            near = did_you_mean(pattern, [*OPERATORS, *modules.values(), *filter(None, modules)])
            raise OptionError(
                f"precision.{option} has {pattern!r}, which is no name or class of a module of "
                f"{type(network).__name__}{near}; nor is it an operator: {', '.join(OPERATORS)}"
            )
        found.update(dict.fromkeys(mine))
    return list(found), operators


class _Scope:
    """Whether the network was last called with autocast on, and the watch over the operators, if any.

    A backward pass that computes a part of the network again belongs to that call, perhaps in another thread.
    """

    def __init__(self, device: str, watch: OperatorPrecision | None) -> None:
        self.device = device
        self.is_on = False
        self._watch = watch
        self._threads: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have the operators watched, once in a thread."""
        thread = threading.get_ident()
        if self._watch is None or thread in self._threads:
            yield
            return
        self._threads.add(thread)
        try:
            with self._watch:
                yield
        finally:
            self._threads.discard(thread)


class _Entered(ForwardWrapper):
    """The forward of the whole network: sees whether autocast is on."""

    def __init__(self, inner: Callable[..., Any], scope: _Scope) -> None:
        super().__init__(inner)
        self._scope = scope

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self._scope.is_on = torch.is_autocast_enabled(self._scope.device)
        return self.inner(*inputs, **named)


class _Listed(ForwardWrapper):
    """A module's forward with the operators in it watched, and in a type of its own if it has one."""

    def __init__(self, inner: Callable[..., Any], scope: _Scope, dtype: torch.dtype | None) -> None:
        super().__init__(inner)
        self._scope = scope
        self._dtype = dtype

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        scope, dtype = self._scope, self._dtype
        if not scope.is_on:
            return self.inner(*inputs, **named)
        with scope.watching():
            if dtype is None:
                return self.inner(*inputs, **named)
            is_16_bits = dtype is not torch.float32
            is_within_float32 = not torch.is_autocast_enabled(scope.device)
            autocast_type = dtype if is_16_bits else None
            with torch.autocast(scope.device, dtype=autocast_type, enabled=is_16_bits):
                result = self.inner(*cast(inputs, dtype), **cast(named, dtype))
            return cast(result, torch.float32) if is_within_float32 else result


_NAMED_ALIKE = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear",
    "batch_norm", "layer_norm", "group_norm", "instance_norm", "normalize", "softmax", "log_softmax", "prelu",
    "gelu", "silu", "sigmoid", "tanh", "exp", "log", "sum", "mean", "avg_pool2d", "adaptive_avg_pool2d",
    "max_pool2d", "interpolate",
)  # fmt: skip
OPERATORS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in _NAMED_ALIKE},
    "matmul": ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "einsum"),
    "attention": ("scaled_dot_product_attention",),
    "relu": ("relu", "relu_"),
    "pow": ("pow", "__pow__"),
    "add": ("add", "__add__", "__radd__"),
    "mul": ("mul", "__mul__", "__rmul__"),
}
"""Names of operators, and of the functions of torch and methods of tensors that they stand for."""

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
        self._types = {
            function: (kind, name in INPUT_ONLY)
            for names, kind in ((white, dtype), (black, torch.float32))
            for name in names
            for function in OPERATORS[name]
        }

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function; torch calls this for each of its own."""
        kwargs = kwargs or {}
        wanted = self._types.get(getattr(func, "__name__", ""))
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
