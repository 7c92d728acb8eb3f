"""The options of how a run is carried out: device, ranks, precision, memory and speed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from plsc.config.option import (
    at_least,
    between,
    declare,
    more_than,
    of_model,
    of_run,
    one_of,
    specs_of,
)
from plsc.errors import OptionError


def _meeting_place(url: str) -> str | None:
    good = re.fullmatch(r"env://|tcp://[^/]+:\d+|file:///.+", url)
    return None if good else "env://, tcp://host:port, or file:///path"


@dataclass(frozen=True)
class RuntimeOptions:
    """Device and processes."""

    device: str = declare("auto", "auto, cpu or cuda", "set_device(device)", one_of("auto", "cpu", "cuda"))
    backend: str = declare(
        "auto",
        "auto (NCCL on CUDA, gloo elsewhere), gloo, nccl or mpi",
        "set_backend(backend)",
        one_of("auto", "gloo", "nccl", "mpi"),
    )
    init_method: str = declare(
        "env://",
        "where the ranks meet: env:// (a launcher's environment variables), tcp://host:port of rank 0, or "
        "file:///path on a file system that all of them see",
        "set_init_method(url)",
        _meeting_place,
    )
    rank: int | None = declare(
        None, "number of this rank, from 0; None: RANK of the environment", "set_rank(rank)", at_least(0)
    )
    world_size: int | None = declare(
        None, "number of ranks; None: WORLD_SIZE of the environment", "set_world_size(ranks)", at_least(1)
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
        0,
        "CPU threads per rank; 0 leaves it to torch (torchrun sets 1, plsc launch cores / ranks)",
        "set_cpu_threads(num)",
        between(0, 4096),
    )


@dataclass(frozen=True)
class ParallelOptions:
    """The backbone on the ranks. The head's class rows are always split over all of them."""

    backbone: str = of_run(
        "replicated",
        "replicated (each rank has the whole backbone) or sharded (each has a share of its parameters, "
        "gradients and optimizer state, and more is sent)",
        "set_backbone_parallel(way)",
        one_of("replicated", "sharded"),
    )
    shard_size: int = of_run(
        0,
        "ranks that share one copy of a sharded backbone, such as those of a machine; 0: all ranks",
        "set_backbone_shard_size(ranks)",
        at_least(0),
    )
    shard_units: str = declare(
        "auto",
        "modules of a sharded backbone that are put together one at a time: auto, or names separated by "
        "commas in which * stands for one component, such as 'stages.*.*,neck'",
        "set_backbone_shard_units(patterns)",
    )


HIGHEST_SCALE = 2.0**24
"""Where a loss scale stops growing.

float16 ends at 2^-24 below 1: this scale lifts all gradients down to 2^-48 into its range, and float32, in
which they are summed over batch and ranks and divided again, still has 2^80 to spare above 65504 * 2^24.
"""


def _names(values: tuple[str, ...]) -> str | None:
    return None if all(value.strip() for value in values) else "names that are not empty"


def _shrinks(value: float) -> str | None:
    return None if 0 < value < 1 else "more than 0 and less than 1"


@dataclass(frozen=True)
class PrecisionOptions:
    """Mixed precision, and the scaling of the loss that float16 needs."""

    mode: str = of_run(
        "float32",
        "what the backbone is trained in: float32, float16 (with loss scaling; on a CPU it is bfloat16) or "
        "bfloat16; weights, their updates and the loss stay float32",
        "set_precision(mode)",
        one_of("float32", "float16", "bfloat16"),
    )
    init_loss_scaling: float = of_run(
        1.0, "of float16: what the loss is multiplied with at first",
        "set_init_loss_scaling(scale)", between(1, HIGHEST_SCALE),
    )  # fmt: skip
    incr_every_n_steps: int = of_run(
        2000, "so many finite steps in a row raise the loss scale", "set_incr_every_n_steps(steps)",
        at_least(1),
    )  # fmt: skip
    decr_every_n_nan_or_inf: int = of_run(
        2, "so many steps in a row with a nan or inf lower the loss scale",
        "set_decr_every_n_nan_or_inf(steps)", at_least(1),
    )  # fmt: skip
    incr_ratio: float = of_run(
        2.0,
        "what the loss scale is raised by, up to 2^24",
        "set_incr_ratio(ratio)",
        more_than(1),
    )
    decr_ratio: float = of_run(
        0.5,
        "what the loss scale is lowered by, down to 1",
        "set_decr_ratio(ratio)",
        _shrinks,
    )
    use_dynamic_loss_scaling: bool = of_run(
        True,
        "raise and lower the loss scale; without, it stays, and steps with a nan or inf are skipped",
        "set_dynamic_loss_scaling(flag)",
    )
    loss_scaling: str = of_run(
        "auto", "auto: in float16; always: in any mode, to see how a run takes skipped steps",
        "set_loss_scaling(when)", one_of("auto", "always"),
    )  # fmt: skip
    white_list: tuple[str, ...] = of_run(
        (), "operators, and modules by name or class (with * and ?), that are forced to 16 bits",
        "set_precision_white_list(names)", _names,
    )  # fmt: skip
    black_list: tuple[str, ...] = of_run(
        (), "operators, and modules by name or class (with * and ?), that stay float32",
        "set_precision_black_list(names)", _names,
    )  # fmt: skip
    evaluation: str = of_run(
        "float32", "what test, predict and evaluations while training run in: float32, or training "
        "(the mode of training)",
        "set_evaluation_precision(mode)", one_of("float32", "training"),
    )  # fmt: skip


class AutoMixedPrecisionLists:
    """Names of what runs in 16 bits, and of what stays float32, whatever mixed precision would do.

    custom_white_list: forced to 16 bits; custom_black_list: kept in float32. A name is that of an operator
    (docs/precision.md has the table), or a pattern with ``*`` and ``?`` over the names of the network's
    modules, such as ``neck.*``, and over their classes, such as ``BatchNorm2d``. What no module is called
    is an error once the network is built.

    Raises OptionError for what is no list of names, and for a name in both.
    """

    def __init__(
        self,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
    ) -> None:
        self.white_list = _sorted("white_list", custom_white_list)
        self.black_list = _sorted("black_list", custom_black_list)
        check_apart(self.white_list, self.black_list)

    def __repr__(self) -> str:
        return f"AutoMixedPrecisionLists({list(self.white_list)}, {list(self.black_list)})"


def check_apart(white: Iterable[str], black: Iterable[str]) -> None:
    """Raise OptionError for a name that is in both lists."""
    both = sorted(set(white) & set(black))
    if both:
        raise OptionError(
            f"{', '.join(both)} cannot be both forced to 16 bits (white list) and kept float32 (black list)"
        )


def _sorted(option: str, names: Iterable[str] | None) -> tuple[str, ...]:
    spec = specs_of("precision", PrecisionOptions)[f"precision.{option}"]
    return tuple(sorted(set(spec.checked(names or ()))))


def _parts(text: str) -> str | None:
    good = any(part.strip() for part in text.split(","))
    return None if good else "none, all, or patterns of module names, divided by commas"


@dataclass(frozen=True)
class MemoryOptions:
    """Less memory for more computation."""

    checkpoint_stages: str = declare(
        "none",
        "parts of the network whose inner results are computed again in the backward pass, not kept "
        "(activation checkpointing): none, all (its blocks), or patterns of module names such as "
        "'stages.0,stages.1.*'",
        "set_checkpoint_stages(names)",
        _parts,
    )
    checkpoint_every: int = declare(
        1, "of those parts, in the network's order, each nth alone", "set_checkpoint_every(num)",
        at_least(1),
    )  # fmt: skip


@dataclass(frozen=True)
class SpeedOptions:
    """Speed of a step; none of it changes what is computed, but for rounding."""

    channels_last: str = of_run(
        "auto",
        "keep images channels last in memory: on, off, or auto (on in 16 bits and on CPUs)",
        "set_channels_last(mode)",
        one_of("auto", "on", "off"),
    )
    compile: bool = of_run(
        False,
        "compile the backbone's training step by torch.compile: minutes at the first start, a cache keeps it",
        "set_compile(flag)",
    )
    fold_batch_norm: bool = declare(
        False,
        "evaluate and predict with batch norms folded into the convolutions before them",
        "set_fold_batch_norm(flag)",
    )
    overlap_copies: bool = declare(
        True, "on a GPU, copy a batch there while the step before still runs", "set_overlap_copies(flag)"
    )  # fmt: skip
    late_losses: bool = of_run(
        True,
        "on a GPU, look at a step's loss one step later instead of waiting for it; without, a bad loss stops "
        "the run before the update that it belongs to, as on a CPU",
        "set_late_losses(flag)",
    )
    bucket_mb: float = of_run(
        25.0,
        "MiB of gradients that are summed over the ranks at once, while the backward pass continues",
        "set_bucket_mb(mebibytes)",
        more_than(0),
    )
