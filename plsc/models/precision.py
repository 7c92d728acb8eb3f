"""Mixed precision: autocast, lists of operators with a fixed dtype, and dynamic loss scaling.

Loss scaling keeps small gradients from underflowing in float16: Micikevicius et al. 2018, "Mixed Precision
Training". torch.amp.GradScaler lowers the scale after each overflow; here, as in the original PLSC, after
several in a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from plsc.models.base_model import ForwardWrapper
from plsc.names import OPERATORS
from plsc.parallel.backbone import gradient_values

# Layers whose operators a TorchFunctionMode does not see: layers of plsc with their own implementation, and
# torch's attention, which is a single function.
_LAYERS: dict[str, type[nn.Module]] = {
    "batch_norm": _BatchNorm,
    "conv2d": nn.Conv2d,
    "prelu": nn.PReLU,
    **dict.fromkeys(("linear", "matmul", "attention", "softmax"), nn.MultiheadAttention),
}


def apply_lists(
    network: nn.Module, white: Collection[str], black: Collection[str], mode: str, device: torch.device
) -> None:
    """Apply lists of OPERATORS to a network in place; they take effect when it is called under autocast.

    white: compute in 16 bits. black: compute in float32. mode: of autocast; nothing changes if it is float32.
    Parameters and state dicts do not change.

    Wraps the ``forward`` of single modules, so that recomputation repeats the same casts.
    `plsc.models.base_model.unwrap` reverts it.
    """
    if mode == "float32" or not (white or black):
        return
    dtype = getattr(torch, mode)
    in_16_bits, exact = (
        tuple(_LAYERS[name] for name in names if name in _LAYERS) for names in (white, black)
    )
    call = _NetworkCall(device.type, OperatorPrecision(white, black, dtype, device.type))
    for module in network.modules():
        fixed = torch.float32 if isinstance(module, exact) else dtype
        is_listed = isinstance(module, in_16_bits + exact)
        module.forward = _ModuleForward(module.forward, call, fixed if is_listed else None)
    network.forward = _NetworkForward(network.forward, call)


class _NetworkCall:
    """Whether autocast was on in the last call of the network, and the operator mode.

    Recomputation in the backward pass belongs to that call, and may run in another thread.
    """

    def __init__(self, device: str, mode: OperatorPrecision) -> None:
        self.device = device
        self.is_autocast = False
        self._mode = mode
        self._threads: set[int] = set()

    @contextmanager
    def operator_mode(self) -> Iterator[None]:
        """Enter the operator mode unless this thread already has."""
        thread = threading.get_ident()
        if thread in self._threads:
            yield
            return
        self._threads.add(thread)
        try:
            with self._mode:
                yield
        finally:
            self._threads.discard(thread)


class _NetworkForward(ForwardWrapper):
    """The forward of the whole network: records whether autocast is on."""

    def __init__(self, inner: Callable[..., Any], call: _NetworkCall) -> None:
        super().__init__(inner)
        self._call = call

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self._call.is_autocast = torch.is_autocast_enabled(self._call.device)
        return self.inner(*inputs, **named)


class _ModuleForward(ForwardWrapper):
    """The forward of a module: enters the operator mode, and applies a dtype if its layer is listed."""

    def __init__(self, inner: Callable[..., Any], call: _NetworkCall, dtype: torch.dtype | None) -> None:
        super().__init__(inner)
        self._call = call
        self._dtype = dtype

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        call, dtype = self._call, self._dtype
        if not call.is_autocast:
            return self.inner(*inputs, **named)
        with call.operator_mode():
            if dtype is None:
                return self.inner(*inputs, **named)
            is_16_bits = dtype is not torch.float32
            is_within_float32 = not torch.is_autocast_enabled(call.device)
            autocast_type = dtype if is_16_bits else None
            with torch.autocast(call.device, dtype=autocast_type, enabled=is_16_bits):
                result = self.inner(*cast(inputs, dtype), **cast(named, dtype))
            return cast(result, torch.float32) if is_within_float32 else result


INPUT_ONLY = ("batch_norm", "instance_norm")
"""Operators for which only the input is cast: their statistics must be float32."""


class OperatorPrecision(TorchFunctionMode):
    """A mode in which the named operators compute in a fixed dtype, independent of autocast.

    white: operators in `dtype` (16 bits). black: operators in float32. Costs microseconds per torch call.
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
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function with cast arguments."""
        kwargs = kwargs or {}
        wanted = self._types.get(getattr(func, "__name__", ""))
        if wanted is None:
            return func(*args, **kwargs)
        dtype, input_only = wanted
        if input_only:
            args = (*cast(args[:1], dtype), *args[1:])
            kwargs = {k: cast(v, dtype) if k == "input" else v for k, v in kwargs.items()}
        else:
            args, kwargs = cast(args, dtype), cast(kwargs, dtype)
        is_within_float32 = not torch.is_autocast_enabled(self._device)
        with torch.autocast(self._device, enabled=False):
            result = func(*args, **kwargs)
        return cast(result, torch.float32) if is_within_float32 else result


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast the float16, bfloat16 and float32 tensors in a nested structure to `dtype`."""

    def convert(value: Any) -> Any:
        is_cast = isinstance(value, Tensor) and value.dtype in _FLOATS
        return value.to(dtype) if is_cast else value

    return tree_map(convert, values)


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


LOWEST_SCALE, HIGHEST_SCALE = 1.0, 2.0**24
"""Limits of the loss scale.

The smallest positive float16 is 2^-24: with the highest scale, gradients as small as 2^-48 are representable.
In float32, where gradients are summed and divided by the scale, 65504 * 2^24 is far from an overflow.
"""
MOST_SKIPS = 20
"""Number of consecutive steps that may be skipped while the scale cannot decrease, before training fails."""


@dataclass
class LossScaler:
    """The loss scale and its counters; call `update` once per step.

    After `incr_every` consecutive finite steps the scale is multiplied by `incr_ratio`, after `decr_every`
    consecutive overflows by `decr_ratio`, within 1 to 2^24. If not dynamic, the scale is constant and
    overflows are only counted.

    Attributes:
        scale: loss scale of the next step.
        finite, overflowed: consecutive finite or overflowed steps since the last change of the scale.
        skipped: total number of overflowed steps.
        stuck: consecutive overflowed steps during which the scale could not decrease.
    """

    scale: float = 1.0
    incr_every: int = 2000
    decr_every: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    is_dynamic: bool = True
    finite: int = 0
    overflowed: int = 0
    skipped: int = 0
    stuck: int = 0

    @property
    def can_fall(self) -> bool:
        """Whether an overflow can still decrease the scale."""
        return self.is_dynamic and self.scale > LOWEST_SCALE

    @property
    def is_hopeless(self) -> bool:
        """Whether `MOST_SKIPS` consecutive steps overflowed although the scale could not decrease."""
        return self.stuck >= MOST_SKIPS

    def update(self, overflowed: bool) -> None:
        """Count a step, and change the scale if due. overflowed: the step overflowed and was skipped."""
        if overflowed:
            self.skipped += 1
            self.stuck = 0 if self.can_fall else self.stuck + 1
            self.overflowed, self.finite = self.overflowed + 1, 0
            if self.overflowed == self.decr_every:
                self.overflowed = 0
                self._change(self.decr_ratio)
        else:
            self.stuck = 0
            self.finite, self.overflowed = self.finite + 1, 0
            if self.finite == self.incr_every:
                self.finite = 0
                self._change(self.incr_ratio)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain JSON values."""
        return {"scale": self.scale, **{name: getattr(self, name) for name in COUNTS}}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the values of `state`; a scale that is not dynamic keeps the value of the options."""
        if self.is_dynamic:
            self.scale = min(max(state["scale"], LOWEST_SCALE), HIGHEST_SCALE)
        for name in COUNTS:
            setattr(self, name, state[name])
        # A run may resume with smaller periods than it had.
        self.finite = min(self.finite, self.incr_every - 1)
        self.overflowed = min(self.overflowed, self.decr_every - 1)

    def _change(self, ratio: float) -> None:
        if self.is_dynamic:
            self.scale = min(max(self.scale * ratio, LOWEST_SCALE), HIGHEST_SCALE)


COUNTS = ("finite", "overflowed", "skipped", "stuck")


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, embeddings.dtype
        return embeddings.to(_work_type(embeddings.dtype), copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return (gradients[0] * ctx.scale).to(ctx.dtype), None


def scale_gradient(embeddings: Tensor, scale: float) -> Tensor:
    """Return the embeddings [b, D] in float32; their gradient is multiplied by `scale` before it is rounded.

    So only the gradients of the backbone are scaled, not the loss, the head or its class weights.
    """
    return _Scaled.apply(embeddings, scale)


def unscale(gradients: Iterable[Tensor], scale: float) -> Tensor:
    """Divide gradients by the scale, in place; return a bool tensor: whether one is not finite.

    Supports sparse gradients. Does not synchronise with the GPU. Without gradients: False, on the CPU.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        numbers = gradient_values(gradient)
        kinds.setdefault((numbers.device, numbers.dtype), []).append(numbers)
    total = None
    for (device, _), values in kinds.items():
        bad = torch.zeros((), device=device)
        # The function that torch.amp.GradScaler calls.
        factor = torch.full((), 1.0 / scale, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(values, bad, factor)
        total = bad if total is None else total + bad.to(total)
    return torch.tensor(False) if total is None else total > 0


def _work_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
