"""Options of device, ranks, precision, memory and speed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from plsc.config.option import (
    arguments_of,
    at_least,
    between,
    check_fields,
    declare,
    described_fields,
    more_than,
    need,
    of_run,
    one_of,
)
from plsc.errors import OptionError
from plsc.names import OPERATORS


def _meeting_place(url: str) -> str | None:
    good = re.fullmatch(r"env://|tcp://[^/]+:\d+|file:///.+", url)
    return None if good else "env://, tcp://host:port, or file:///path"


@dataclass(frozen=True)
class RuntimeOptions:
    """Device and communication."""

    device: str = declare(
        "auto", "device: auto, cpu or cuda", "set_device(device)", one_of("auto", "cpu", "cuda")
    )
    backend: str = declare(
        "auto",
        "communication backend: auto (nccl on CUDA, else gloo), gloo, nccl or mpi",
        "set_backend(backend)",
        one_of("auto", "gloo", "nccl", "mpi"),
    )
    init_method: str = declare(
        "env://",
        "rendezvous: env:// (environment variables), tcp://host:port of rank 0, or file:///path",
        "set_init_method(url)",
        _meeting_place,
    )
    rank: int | None = declare(
        None, "rank of this process; None: RANK of the environment", "set_rank(rank)", at_least(0)
    )
    world_size: int | None = declare(
        None, "number of ranks; None: WORLD_SIZE of the environment", "set_world_size(ranks)", at_least(1)
    )
    timeout: float = declare(
        1800.0, "seconds that a rank waits for other ranks", "set_timeout(seconds)", more_than(0)
    )
    cpu_threads: int = declare(
        0,
        "CPU threads per rank; 0: PyTorch's default (torchrun: 1, plsc launch: cores / ranks)",
        "set_cpu_threads(num)",
        between(0, 4096),
    )


def _operators(values: tuple[str, ...]) -> str | None:
    return None if OPERATORS.keys() >= set(values) else f"names of operators: {', '.join(OPERATORS)}"


def _shrinks(value: float) -> str | None:
    return None if 0 < value < 1 else "a number greater than 0 and less than 1"


@dataclass(frozen=True)
class ScalingArguments:
    """The numbers of loss scaling, with the names of `Entry.set_mixed_precision`."""

    init_loss_scaling: float = declare(1.0, "initial loss scale", check=between(1, 2.0**24))
    incr_every_n_steps: int = declare(
        2000, "consecutive finite steps before the scale increases", check=at_least(1)
    )
    decr_every_n_nan_or_inf: int = declare(
        2, "consecutive steps with nan or inf before the scale decreases", check=at_least(1)
    )
    incr_ratio: float = declare(2.0, "factor by which the scale increases, up to 2^24", check=more_than(1))
    decr_ratio: float = declare(0.5, "factor by which the scale decreases, down to 1", check=_shrinks)
    use_dynamic_loss_scaling: bool = declare(True, "adapt the scale; False: constant")


@dataclass(frozen=True)
class AutoMixedPrecisionLists:
    """Operators that always compute in 16 bits, and those that always compute in float32.

    docs/performance.md lists their names. Raises OptionError for other names, and for a name in both lists.
    """

    custom_white_list: tuple[str, ...] | None = declare(None, "those in 16 bits", check=_operators)
    custom_black_list: tuple[str, ...] | None = declare(None, "those in float32", check=_operators)

    def __post_init__(self) -> None:
        check_fields(self)
        if both := {*(self.custom_white_list or ())} & {*(self.custom_black_list or ())}:
            raise OptionError(
                f"{', '.join(sorted(both))}: in both the white list (16 bits) and the black list (float32); "
                "remove each name from one of them"
            )


@dataclass(frozen=True)
class PrecisionOptions:
    """Mixed precision, and the loss scaling that float16 needs."""

    mode: str = of_run(
        "float32",
        "dtype of the backbone's computation: float32, bfloat16 or float16 (with loss scaling; on CPUs "
        "bfloat16)",
        "set_precision(mode)",
        one_of("float32", "float16", "bfloat16"),
    )
    scaling_arguments: dict[str, Any] | None = of_run(  # noqa: RUF009
        None,
        f"how the loss is scaled: {described_fields(ScalingArguments)}",
        "set_loss_scaling(**scaling_arguments)",
        arguments_of(ScalingArguments, "precision.scaling_arguments"),
        needs=need("precision.mode", "float16"),
    )
    lists: dict[str, Any] | None = of_run(  # noqa: RUF009
        None,
        f"operators, see docs/performance.md: {described_fields(AutoMixedPrecisionLists)}",
        "set_precision_lists(**lists)",
        arguments_of(AutoMixedPrecisionLists, "precision.lists"),
        needs=need("precision.mode", "float16", "bfloat16"),
    )


@dataclass(frozen=True)
class MemoryOptions:
    """Recomputation: less memory, more computation."""

    recompute: str = declare(
        "none",
        "recomputation (activation checkpointing): none, or all (every block)",
        "set_recompute(blocks)",
        one_of("none", "all"),
    )


@dataclass(frozen=True)
class SpeedOptions:
    """Speed of a step; these options change results only by rounding."""

    compile: bool = of_run(False, "compile the backbone with torch.compile", "set_compile(flag)")
