"""Kernels for the softmax over the class weights: their choice, and those in C for CPUs (the .c files here).

Each backend derives from `plsc.heads.softmax.TorchBackend` and computes the same with fewer memory accesses.
If one cannot be used, its `unavailable()` returns the reason, and the head runs in plain PyTorch.

A call into C reads each class weight once. A block of class weights stays in the cache while it is
normalised, multiplied with the batch, and multiplied with the exponentials of its logits. The update also
applies the optimizer and writes class weights and states.

The library has an engine per instruction set: AVX-512 (F, BW, DQ, VL), AVX2 with FMA, and NEON on 64-bit
ARM. bfloat16 products use AMX-BF16 or AVX512-BF16; processors without them compute in float32, which is more
exact. Installing the package builds the library; in a checkout, run ``python setup.py build_ext --inplace``.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plsc.errors import OptionError
from plsc.heads.softmax import ENGINES, ForwardContext, Queries, Sums, TorchBackend, tile_size
from plsc.heads.weights import Rows, Rule, States, kernel_states

_ABI = 4  # PLSC_ABI of native.h
_LIBRARY = Path(__file__).with_name("libnative.so")
_PANEL = 16  # samples per panel; the number of panels is even
_INSTRUCTIONS = ("AMX", "AVX512-BF16", "AVX-512")  # of the first of ENGINES
_FOR_BFLOAT16 = ENGINES[:2]  # the other engines multiply float32
_KINDS = {"sgd": 1, "adamw": 2, "adagrad": 3}
_STATUS_NO_MEMORY = 1

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def choose_backend(
    kernels: str,
    device: torch.device,
    row_dtype: torch.dtype,
    products: torch.dtype,
    tile: int | None,
    batch: int,
    dimension: int = 1,
) -> TorchBackend:
    """Return the backend for a device.

    kernels: one of BACKENDS or ENGINES; 'auto' falls back to PyTorch with a warning. products: float32 or
    bfloat16.
    tile: class weights per tile; None: chosen by batch and dimension only, so it is equal in every run.
    dimension: the embedding size.

    Raises OptionError, with the reason, if the requested kernels cannot be used.
    """
    rows = tile or tile_size(device, batch, dimension)
    wanted = kernels
    if kernels == "auto":
        wanted = {"cpu": "native", "cuda": "triton"}.get(device.type, "torch")
    if wanted == "torch" or row_dtype is torch.float64:
        return TorchBackend(products, rows)
    if wanted.startswith("native"):
        engine = wanted if wanted in ENGINES else None
        is_on_cpu = device.type == "cpu"
        reason = unavailable(products, engine) if is_on_cpu else f"the head computes on {device.type}"
        if reason is None:
            engine = fastest_engine(products, engine)
            return NativeBackend(products, rows, torch.get_num_threads(), engine)
    else:
        from plsc.heads.kernels import triton_backend

        reason = triton_backend.unavailable(device, dimension)
        if reason is None:
            return triton_backend.TritonBackend(products, rows)
    if kernels != "auto":
        raise OptionError(f"the {kernels} kernels of the head cannot be used: {reason}")
    _warn_fallback(wanted, reason)
    return TorchBackend(products, rows)


@functools.cache
def _warn_fallback(kernels: str, reason: str) -> None:
    """Warn once that the head falls back to PyTorch."""
    warnings.warn(f"the head runs in plain PyTorch, without its {kernels} kernels: {reason}", stacklevel=4)


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


# The structures of native.h.


class _Rows(ctypes.Structure):
    _fields_ = [
        *_fields(_pointer, "weight bias position number"),
        *_fields(_long, "count dimension centers first_row"),
        *_fields(_int, "is_bf16 is_coded cosine"),
    ]


class _Queries(ctypes.Structure):
    _fields_ = [
        *_fields(_pointer, "unit target threshold"),
        *_fields(_long, "count"),
        *_fields(_float, "scale hard_factor"),
    ]


class _Gradient(ctypes.Structure):
    _fields_ = [
        *_fields(_pointer, "log_total weight target_row target_coefficient shift kept"),
        *_fields(_float, "factor"),
    ]


class _Rule(ctypes.Structure):
    _fields_ = [
        *_fields(_int, "kind nesterov"),
        *_fields(ctypes.c_double, "lr momentum weight_decay beta1 beta2 eps"),
        *_fields(ctypes.c_uint32, "key"),
        *_fields(_int * 2, "state_is_bf16"),
        *_fields(_pointer * 2, "state"),
        *_fields(_pointer, "steps"),
    ]


class _Run(ctypes.Structure):
    _fields_ = _fields(_int, "engine threads")


@functools.cache
def unavailable(products: torch.dtype = torch.float32, engine: str | None = None) -> str | None:
    """Return why the C kernels cannot be used with products of this dtype; None if they can.

    engine: one of ENGINES; None: any.
    """
    if not _LIBRARY.exists():
        return f"{_LIBRARY.name} is not built: install the package on a machine with a C compiler"
    try:
        library = _library()
        abi = library.plsc_abi()
    except (OSError, AttributeError) as error:
        return f"{_LIBRARY} cannot be loaded: {error}"
    if abi != _ABI:
        return f"{_LIBRARY} has ABI version {abi}, expected {_ABI}: reinstall the package"
    if fastest_engine(products, engine) is None:
        return f"this CPU, operating system or build does not support {engine or 'AVX2, AVX-512 or NEON'}"
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_LIBRARY))
    library.plsc_forward.argtypes = [_pointer] * 3 + [_int] + [_pointer] * 4
    library.plsc_update.argtypes = [_pointer] * 5 + [_long] * 2 + [_pointer] * 2
    return library


@functools.cache
def fastest_engine(products: torch.dtype, engine: str | None = None) -> str | None:
    """Return the fastest of ENGINES for products of this dtype, or None; engine: accept only this one."""
    for name in ENGINES if engine is None else (engine,):
        fits = products is torch.bfloat16 or name not in _FOR_BFLOAT16
        if fits and _library().plsc_supports(ENGINES.index(name)):
            return name
    return None


@dataclass(frozen=True)
class NativeBackend(TorchBackend):
    """The softmax in C, for float32, bfloat16 or int8 class weights in CPU memory.

    tile: class weights per tile for callers that iterate over tiles; forward and update use their own blocks.
    threads: number of threads per call. The order of the forward pass's sums depends only on the number of
    threads, so equal numbers give equal bits; gradients of class weights and updates do not depend on it.
    engine: one of ENGINES; None: the fastest.
    """

    name = "native"
    threads: int = 1
    engine: str | None = None

    def describe(self) -> str:
        """Return the name of the engine, and why the next faster one is missing."""
        engine = str(fastest_engine(self.products, self.engine))
        faster = ENGINES.index(engine) - 1
        fastest = 0 if self.products is torch.bfloat16 else len(_FOR_BFLOAT16)
        if not fastest <= faster < len(_INSTRUCTIONS) or _library().plsc_supports(faster):
            return engine
        if _library().plsc_has_instructions(faster):
            return (
                f"{engine} (the compiler lacked {_INSTRUCTIONS[faster]}: install plsc again with a newer one)"
            )
        return f"{engine} (this processor or system lacks {_INSTRUCTIONS[faster]})"

    def forward(
        self,
        rows: Rows,
        queries: Queries,
        *,
        fixed_shift: float | None,
        want_weighted: bool = True,
        keep: bool = False,
    ) -> Sums:
        """See `TorchBackend.forward`. Raises ValueError for a wrong dtype, shape, layout or device."""
        unit = queries.unit
        batch = len(unit)
        c_rows, c_queries = _rows(rows), _queries(queries, rows)
        shift = unit.new_full((batch,), -torch.inf if fixed_shift is None else fixed_shift)
        total = torch.empty_like(shift)
        weighted = torch.empty_like(unit) if want_weighted else None
        kept = None
        if keep and fixed_shift is not None:
            kept = unit.new_empty(_kept_shape(batch, rows), dtype=torch.bfloat16)
        is_fixed = fixed_shift is not None
        _call("plsc_forward", c_rows, c_queries, self._run(), is_fixed, shift, total, weighted, kept)
        return Sums(shift, total, weighted, kept)

    def _run(self) -> _Run:
        return _Run(ENGINES.index(fastest_engine(self.products, self.engine)), self.threads)

    def _kept_terms(self, kept: Tensor, batch: int, tile: slice) -> Tensor:
        return kept[:, tile].transpose(1, 2).flatten(0, 1)[:batch].contiguous()

    def gradients(self, context: ForwardContext, tile: slice) -> tuple[Tensor, Tensor | None]:
        """See `TorchBackend.gradients`."""
        unit = context.queries.unit
        out = unit.new_empty(tile.stop - tile.start, unit.shape[1])
        return out, self._update(context, tile, _Rule(), out)

    def update(self, contexts: list[ForwardContext], rows: Rows, rule: Rule, states: States) -> Tensor | None:
        """See `TorchBackend.update`; for one context a single C call."""
        if len(contexts) > 1:
            return super().update(contexts, rows, rule, states)
        c_rule = _rule(rule, states, rows)
        bias = self._update(contexts[0], slice(0, len(rows)), c_rule, None)
        # C writes unseen by autograd, which must refuse a backward pass through the old values.
        torch.autograd.graph.increment_version(rows.weight)
        return bias

    def _update(self, context: ForwardContext, tile: slice, rule: _Rule, out: Tensor | None) -> Tensor | None:
        rows, unit = context.rows, context.queries.unit
        bias = None if rows.bias is None else unit.new_empty(tile.stop - tile.start)
        parts = (_rows(rows), _queries(context.queries, rows), _gradient(context))
        _call("plsc_update", *parts, rule, self._run(), tile.start, tile.stop, out, bias)
        return bias


def _call(function: str, *arguments: ctypes.Structure | Tensor | int | None) -> None:
    """Call a function of native.h; raise MemoryError or RuntimeError if its status is not 0."""
    passed = [
        ctypes.byref(argument)
        if isinstance(argument, ctypes.Structure)
        else argument.data_ptr()
        if isinstance(argument, Tensor)
        else argument
        for argument in arguments
    ]
    status = getattr(_library(), function)(*passed)
    if status:
        kind = MemoryError if status == _STATUS_NO_MEMORY else RuntimeError
        raise kind(f"the native kernels of the head failed with status {status}")


def _rows(rows: Rows) -> _Rows:
    weight, selected = rows.weight, rows.selected
    is_bf16 = weight.dtype is torch.bfloat16
    row_dtype = weight.dtype if weight.dtype in (torch.bfloat16, torch.int8) else torch.float32
    number = _checked("selected", selected, torch.int64, (len(rows),))
    return _Rows(
        weight=_checked("class weights", weight, row_dtype, tuple(weight.shape)),
        bias=_checked("biases", rows.bias, torch.float32, (len(weight),)),
        position=None if rows.is_compact else number,
        number=number,
        count=len(rows),
        dimension=rows.dimension,
        centers=rows.centers,
        first_row=rows.first_row,
        is_bf16=is_bf16,
        is_coded=weight.dtype is torch.int8,
        cosine=rows.cosine,
    )


def _queries(queries: Queries, rows: Rows) -> _Queries:
    batch, dimension = len(queries.unit), rows.dimension
    return _Queries(
        unit=_checked("embeddings", queries.unit, torch.float32, (batch, dimension)),
        target=_checked("targets", queries.target, torch.int64, (batch,)),
        threshold=_checked("thresholds", queries.threshold, torch.float32, (batch,)),
        count=batch,
        scale=queries.scale,
        hard_factor=0.0 if queries.hard_factor is None else float(queries.hard_factor),
    )


def _gradient(context: ForwardContext) -> _Gradient:
    batch = len(context.queries.unit)

    def numbers(name: str, dtype: torch.dtype = torch.float32) -> int | None:
        return _checked(name, getattr(context, name), dtype, (batch,))

    return _Gradient(
        log_total=numbers("log_total"),
        weight=numbers("weight"),
        target_row=numbers("target_row", torch.int64),
        target_coefficient=numbers("target_coefficient"),
        shift=numbers("shift"),
        kept=_checked("kept terms", context.kept, torch.bfloat16, _kept_shape(batch, context.rows)),
        factor=context.factor,
    )


def _kept_shape(batch: int, rows: Rows) -> tuple[int, int, int]:
    return 2 * -(-batch // (2 * _PANEL)), len(rows), _PANEL


def _rule(rule: Rule, states: States, rows: Rows) -> _Rule:
    count = len(rows.weight)
    shape = (count,) if rule.kind == "adagrad" else (count, rows.dimension)
    c_rule = _Rule(
        kind=_KINDS[rule.kind],
        nesterov=rule.nesterov,
        lr=rule.lr,
        momentum=rule.momentum,
        weight_decay=rule.weight_decay,
        beta1=rule.beta1,
        beta2=rule.beta2,
        eps=rule.eps,
        key=rule.key & 0xFFFFFFFF,
        steps=_checked("steps", states.get("steps"), torch.int32, (count,)),
    )
    for i, state in enumerate(kernel_states(rule, states)):
        c_rule.state[i] = _checked("states", state, state.dtype, shape)
        c_rule.state_is_bf16[i] = state.dtype is torch.bfloat16
    return c_rule


def _checked(name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
    """Return the address of a tensor; ValueError unless it is a contiguous CPU tensor of dtype and shape."""
    if tensor is None:
        return None
    is_plain = tensor.dtype is dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
    if not is_plain or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} are {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on "
            f"{tensor.device}; expected contiguous {dtype} {list(shape)} on the CPU"
        )
    return tensor.data_ptr()
