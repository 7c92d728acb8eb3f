"""Kernels for the softmax over the class weights: C for CPUs, Triton for CUDA GPUs.

Each backend derives from `plsc.heads.softmax.TorchBackend` and computes the same with fewer memory accesses.
If a backend cannot be used, its `unavailable()` returns the reason, and the head runs in plain PyTorch.
"""

from __future__ import annotations

import functools
import warnings

import torch

from plsc.errors import OptionError
from plsc.heads.softmax import ENGINES, TorchBackend, tile_size


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
        from plsc.heads.kernels import native

        engine = wanted if wanted in ENGINES else None
        is_on_cpu = device.type == "cpu"
        reason = native.unavailable(products, engine) if is_on_cpu else f"the head computes on {device.type}"
        if reason is None:
            engine = native.fastest_engine(products, engine)
            return native.NativeBackend(products, rows, torch.get_num_threads(), engine)
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
