"""The options of device and processes."""

from __future__ import annotations

from dataclasses import dataclass

from plsc.option import between, declare, more_than, of_model, one_of


@dataclass(frozen=True)
class RuntimeOptions:
    """Device and processes."""

    device: str = declare(
        "auto", "auto, cpu or cuda", "set_device(device)", one_of("auto", "cpu", "cuda")
    )
    backend: str = declare(
        "auto",
        "auto (NCCL on CUDA, gloo elsewhere), gloo or nccl",
        "set_backend(backend)",
        one_of("auto", "gloo", "nccl"),
    )
    timeout: float = declare(
        1800.0, "seconds that a rank waits for the others", "set_timeout(seconds)", more_than(0)
    )
    dtype: str = of_model(
        "float32",
        "float32, or float64 for checks, of weights and computation",
        "set_dtype(dtype)",
        one_of("float32", "float64"),
    )
    cpu_threads: int = declare(
        0, "CPU threads per rank; 0 leaves it to torch (torchrun sets 1)", "set_cpu_threads(num)",
        between(0, 4096),
    )  # fmt: skip
