"""The passes over the class rows on x86-64 processors, in C (the .c files beside this one).

A pass visits each row once: the rows of a block are read, normalised, multiplied with the batch, and
what the logits become is multiplied again while all of it is in the cache; the update also applies the
optimizer's rule and writes rows and states back. float32 products need AVX-512 (F, BW, DQ, VL), bfloat16
products AMX-BF16 or AVX512-BF16. Installing the package builds the library; in a checkout
``python setup.py build_ext --inplace`` does.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plsc.heads.passes import Queries, RowGradient, Rows, Sums, TorchPasses
from plsc.heads.rules import MOMENTUM, Rule, States

_ABI = 1  # PLSC_ABI of native.h
_LIBRARY = Path(__file__).with_name("libnative.so")
_PANEL = 16  # samples in a panel; there is an even number of panels
_FP32, _BF16_VECTOR, _BF16_TILES = 0, 1, 2
_ENGINES = {torch.float32: (_FP32,), torch.bfloat16: (_BF16_TILES, _BF16_VECTOR)}
_KINDS = {"sgd": 1, "adamw": 2, "adagrad": 3}
_STATES = {"sgd": (MOMENTUM,), "adamw": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum_of_squares",)}
_STATUS_NO_MEMORY, _STATUS_NO_ENGINE = 1, 2

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_double = ctypes.c_double


class _Rows(ctypes.Structure):
    _fields_ = [
        ("weight", _pointer),
        ("bias", _pointer),
        ("position", _pointer),
        ("number", _pointer),
        ("count", _long),
        ("dimension", _long),
        ("centers", _long),
        ("first_row", _long),
        ("is_bf16", _int),
        ("cosine", _int),
    ]


class _Queries(ctypes.Structure):
    _fields_ = [
        ("unit", _pointer),
        ("target", _pointer),
        ("threshold", _pointer),
        ("count", _long),
        ("scale", _float),
        ("hard_factor", _float),
    ]


class _Gradient(ctypes.Structure):
    _fields_ = [
        ("log_total", _pointer),
        ("weight", _pointer),
        ("target_row", _pointer),
        ("target_coefficient", _pointer),
        ("shift", _pointer),
        ("kept", _pointer),
        ("factor", _float),
    ]


class _Rule(ctypes.Structure):
    _fields_ = [
        ("kind", _int),
        ("nesterov", _int),
        ("lr", _double),
        ("momentum", _double),
        ("weight_decay", _double),
        ("beta1", _double),
        ("beta2", _double),
        ("eps", _double),
        ("key", ctypes.c_uint32),
        ("state_is_bf16", _int * 2),
        ("state", _pointer * 2),
        ("steps", _pointer),
    ]


class _Run(ctypes.Structure):
    _fields_ = [("engine", _int), ("threads", _int)]


@functools.cache
def unavailable() -> str | None:
    """Return None where the kernels can be used, else the reason in words."""
    loaded = _load()
    if isinstance(loaded, str):
        return loaded
    if not loaded.plsc_supports(_FP32):
        return "this processor (or its operating system) has no AVX-512"
    return None


def supports(products: torch.dtype) -> bool:
    """Return whether this processor multiplies in this type: float32 or bfloat16."""
    return unavailable() is None and _engine(products) is not None


@dataclass(frozen=True)
class NativePasses:
    """The passes of `TorchPasses` in C, on rows in this machine's memory, float32 or bfloat16.

    products: the type of the factors, float32 or bfloat16 (sums are float32). tile: rows in a tile, for
    those who go over the rows by tiles; a pass chooses its own. threads: how many work on a pass, for the
    length of the call. The sums of the first pass are added up in an order that depends on that number
    alone, so the same number gives the same bits; row gradients and updates do not depend on it.
    """

    products: torch.dtype = torch.float32
    tile: int = 4096
    threads: int = 1
    name: str = "native"

    def forward(
        self,
        rows: Rows,
        queries: Queries,
        *,
        fixed_shift: float | None,
        want_mixed: bool = True,
        keep: bool = False,
    ) -> Sums:
        """See `TorchPasses.forward`. Raises TypeError or ValueError for tensors that do not fit."""
        unit = queries.unit
        batch = len(unit)
        c_rows, c_queries, held = _arguments(rows, queries)
        shift = unit.new_full((batch,), -torch.inf if fixed_shift is None else fixed_shift)
        total = torch.empty_like(shift)
        mixed = torch.empty_like(unit) if want_mixed else None
        kept = None
        if keep and fixed_shift is not None:
            kept = unit.new_empty(_kept_shape(batch, rows), dtype=torch.bfloat16)
        status = _library().plsc_forward(
            ctypes.byref(c_rows),
            ctypes.byref(c_queries),
            ctypes.byref(self._run()),
            int(fixed_shift is not None),
            _address(shift),
            _address(total),
            _address(mixed),
            _address(kept),
        )
        _check(status, held)
        return Sums(shift, total, mixed, kept)

    def gradients(
        self, rows: Rows, queries: Queries, gradient: RowGradient, tile: slice
    ) -> tuple[Tensor, Tensor | None]:
        """See `TorchPasses.gradients`."""
        out = queries.unit.new_empty(tile.stop - tile.start, rows.weight.shape[1])
        bias = self._update(rows, queries, gradient, tile, _Rule(), out)
        return out, bias

    def fused_update(
        self, rows: Rows, queries: Queries, gradient: RowGradient, rule: Rule, states: States
    ) -> Tensor | None:
        """Change rows and states in one visit; return the gradients of the biases [n] if there are any.

        Raises NotImplementedError, before anything is changed, for rules and states it has no code for.
        """
        c_rule = _rule(rule, states, rows.weight)
        bias = self._update(rows, queries, gradient, slice(0, len(rows)), c_rule, None)
        torch.autograd.graph.increment_version(rows.weight)
        return bias

    def best(self, rows: Rows, queries: Queries) -> tuple[Tensor, Tensor]:
        """See `TorchPasses.best`, which computes it here too."""
        return TorchPasses(self.products, self.tile).best(rows, queries)

    def closeness(self, rows: Rows, queries: Queries) -> Tensor:
        """See `TorchPasses.closeness`, which computes it here too."""
        return TorchPasses(self.products, self.tile).closeness(rows, queries)

    def _update(
        self,
        rows: Rows,
        queries: Queries,
        gradient: RowGradient,
        tile: slice,
        rule: _Rule,
        out: Tensor | None,
    ) -> Tensor | None:
        c_rows, c_queries, held = _arguments(rows, queries)
        are_whole = tile.start % rows.centers == 0 and tile.stop % rows.centers == 0
        if not (0 <= tile.start <= tile.stop <= len(rows) and are_whole):
            raise ValueError(
                f"rows {tile.start}..{tile.stop} are no whole classes of 0..{len(rows)}"
            )
        c_gradient, also_held = _gradient(gradient, rows, len(queries.unit))
        bias = None
        if rows.bias is not None:
            bias = queries.unit.new_empty(tile.stop - tile.start)
        status = _library().plsc_update(
            ctypes.byref(c_rows),
            ctypes.byref(c_queries),
            ctypes.byref(c_gradient),
            ctypes.byref(rule),
            ctypes.byref(self._run()),
            _long(tile.start),
            _long(tile.stop),
            _address(out),
            _address(bias),
        )
        _check(status, held, also_held)
        return bias

    def _run(self) -> _Run:
        if self.threads < 1:
            raise ValueError(f"threads are {self.threads}; expected at least 1")
        engine = _engine(self.products)
        if engine is None:
            raise ValueError(f"this processor has no instructions for {self.products} products")
        return _Run(engine, self.threads)


@functools.cache
def _engine(products: torch.dtype) -> int | None:
    """Return the fastest engine for products of this type, None without one."""
    for engine in _ENGINES.get(products, ()):
        if _library().plsc_supports(engine):
            return engine
    return None


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or why there is none."""
    if not _LIBRARY.exists():
        return (
            f"{_LIBRARY.name} has not been built: install the package where there is a C compiler"
        )
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        abi = library.plsc_abi()
    except (OSError, AttributeError) as error:
        return f"{_LIBRARY} cannot be loaded: {error}"
    if abi != _ABI:
        return f"{_LIBRARY} is of another version ({abi}, not {_ABI}): install the package again"
    library.plsc_forward.argtypes = [_pointer] * 3 + [_int] + [_pointer] * 4
    library.plsc_update.argtypes = [_pointer] * 5 + [_long] * 2 + [_pointer] * 2
    return library


def _library() -> ctypes.CDLL:
    loaded = _load()
    if isinstance(loaded, str):
        raise RuntimeError(loaded)
    return loaded


def _arguments(rows: Rows, queries: Queries) -> tuple[_Rows, _Queries, list[Tensor | None]]:
    """Return rows and queries for C, and the tensors that must live as long as the call."""
    weight, unit, batch = rows.weight, queries.unit, len(queries.unit)
    count, dimension, k = len(rows), weight.shape[1], rows.centers
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"rows are {weight.dtype}; expected float32 or bfloat16")
    _expect("rows", weight, weight.dtype, (len(weight), dimension))
    _expect("embeddings", unit, torch.float32, (batch, dimension))
    _expect("targets", queries.target, torch.int64, (batch,))
    if dimension < 1 or k < 1 or count % k or count >= 2**31:
        raise ValueError(f"cannot work on {count} rows of size {dimension} with {k} to a class")
    selected = rows.selected
    if selected is not None:
        _expect("selected", selected, torch.int64, (count,))
        if rows.is_compact and len(weight) != count:
            raise ValueError(f"{len(weight)} compact rows for {count} selected ones")
        highest = count if rows.is_compact else len(weight)
        if (
            count
            and not rows.is_compact
            and not 0 <= int(selected[0]) <= int(selected[-1]) < highest
        ):
            raise ValueError(f"selected rows are not all in 0..{highest - 1}")
    bias = _floats(rows.bias, len(weight))
    threshold = _floats(queries.threshold, batch)
    hard_factor = 0.0 if queries.hard_factor is None else float(queries.hard_factor)
    return (
        _Rows(
            weight=_address(weight),
            bias=_address(bias),
            position=None if rows.is_compact else _address(selected),
            number=_address(selected),
            count=count,
            dimension=dimension,
            centers=k,
            first_row=rows.first_row,
            is_bf16=weight.dtype is torch.bfloat16,
            cosine=rows.cosine,
        ),
        _Queries(
            unit=_address(unit),
            target=_address(queries.target),
            threshold=_address(threshold),
            count=batch,
            scale=queries.scale,
            hard_factor=hard_factor,
        ),
        [weight, unit, bias, threshold, selected],
    )


def _gradient(
    gradient: RowGradient, rows: Rows, batch: int
) -> tuple[_Gradient, list[Tensor | None]]:
    _expect("target rows", gradient.target_row, torch.int64, (batch,))
    numbers = [
        _floats(gradient.log_total, batch),
        _floats(gradient.weight, batch),
        _floats(gradient.target_coefficient, batch),
        _floats(gradient.shift, batch),
    ]
    kept = gradient.kept
    if kept is not None:
        _expect("kept terms", kept, torch.bfloat16, _kept_shape(batch, rows))
        if gradient.shift is None:
            raise ValueError("kept terms came without their shift")
    log_total, weight, coefficient, shift = map(_address, numbers)
    c_gradient = _Gradient(
        log_total=log_total,
        weight=weight,
        target_row=_address(gradient.target_row),
        target_coefficient=coefficient,
        shift=shift,
        kept=_address(kept),
        factor=gradient.factor,
    )
    return c_gradient, [*numbers, gradient.target_row, kept]


def _kept_shape(batch: int, rows: Rows) -> tuple[int, int, int]:
    return 2 * -(-batch // (2 * _PANEL)), len(rows), _PANEL


def _rule(rule: Rule, states: States, weight: Tensor) -> _Rule:
    """Return a rule for C. Raises NotImplementedError for kinds and state types it has no code for."""
    if rule.kind not in _KINDS:
        raise NotImplementedError(f"no kernel for the rule {rule.kind!r}")
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
    )
    if rule.kind == "sgd" and not rule.momentum:
        return c_rule
    shape = (len(weight),) if rule.kind == "adagrad" else tuple(weight.shape)
    for i, name in enumerate(_STATES[rule.kind]):
        state = states[name]
        if state.dtype not in (torch.float32, torch.bfloat16) or state.device != weight.device:
            raise NotImplementedError(f"no kernel for {name} in {state.dtype} on {state.device}")
        _expect(name, state, state.dtype, shape)
        c_rule.state[i] = state.data_ptr()
        c_rule.state_is_bf16[i] = state.dtype is torch.bfloat16
    if rule.kind == "adamw":
        _expect("steps", states["steps"], torch.int32, (len(weight),))
        c_rule.steps = states["steps"].data_ptr()
    return c_rule


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless C may read the tensor as a plain array of this shape."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} are {tensor.dtype}; expected {dtype}")
    if tensor.device.type != "cpu" or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} are {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"expected contiguous {list(shape)} on the CPU"
        )


def _floats(tensor: Tensor | None, count: int) -> Tensor | None:
    """Return a few numbers as contiguous float32."""
    if tensor is None:
        return None
    tensor = tensor.detach().to(torch.float32).contiguous()
    _expect("numbers", tensor, torch.float32, (count,))
    return tensor


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(status: int, *held: list[Tensor | None]) -> None:
    """Raise what a status of native.h means. `held` keeps the call's tensors alive until here."""
    if status == _STATUS_NO_MEMORY:
        raise MemoryError("no memory for the kernels of the head")
    if status:
        raise RuntimeError(f"the kernels of the head failed with status {status}")
