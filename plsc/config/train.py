"""Options of how a network is trained: loop, checkpoints, optimizer, device, precision, memory and speed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plsc.config.data_and_model import SHARDED
from plsc.config.option import (
    Check,
    Need,
    arguments_of,
    at_least,
    between,
    check_fields,
    declare,
    described_fields,
    is_finite_number,
    more_than,
    names_code,
    need,
    not_empty,
    of_run,
    one_of,
    read_fields,
    shown_value,
    with_arguments,
)
from plsc.errors import OptionError, did_you_mean, suggest
from plsc.names import CALLBACKS, LOGGERS, OPERATORS, OPTIMIZERS, SCHEDULES, check_pattern


def listed_names(value: str | Iterable[str]) -> list[str]:
    """Return the names in `train.loggers` or `train.callbacks`, without repetitions."""
    parts = value.split(",") if isinstance(value, str) else value
    return list(dict.fromkeys(filter(None, (part.strip() for part in parts))))


def _any_of(known: Collection[str]) -> Check:
    def check(value: str | tuple[str, ...]) -> str | None:
        wrong = [name for name in listed_names(value) if name not in known]
        return f"any of {', '.join(known)}{did_you_mean(wrong[0], known)}" if wrong else None

    return check


def _limit(value: int | float) -> str | None:
    is_valid = value >= 1 if isinstance(value, int) else 0 < value <= 1
    return None if is_valid else "an integer of at least 1, or a fraction greater than 0.0 and at most 1.0"


@dataclass(frozen=True)
class TrainOptions:
    """Training loop and evaluation."""

    batch_size: int = of_run(
        128, "training images per rank and step", "set_train_batch_size(batch_size)", between(1, 2**24)
    )
    global_batch_size: int | None = of_run(
        None,
        "training images per step over all ranks, instead of batch_size",
        "set_global_batch_size(batch_size)",
        between(1, 2**24),
    )
    micro_batches: int = of_run(
        1, "micro-batches per batch of a rank (gradient accumulation)", "set_micro_batches(num)", at_least(1)
    )
    test_batch_size: int = declare(
        120,
        "images per rank and step in test, predict and evaluation",
        "set_test_batch_size(batch_size)",
        at_least(1),
    )
    epochs: int = of_run(120, "number of epochs", "set_train_epochs(num)", at_least(1))
    steps: int | None = of_run(
        None, "number of steps, instead of epochs", "set_train_steps(num)", at_least(1)
    )
    calc_acc: bool = of_run(False, "log the training accuracy, top-1 and top-5", "set_calc_acc(calc)")
    log_period: int = of_run(200, "steps between log lines", "set_log_period(period)", at_least(1))
    loggers: str | tuple[str, ...] = declare(
        "jsonl",
        f"where metrics are written: {', '.join(LOGGERS)}; separated by commas, or a list",
        "set_loggers(loggers)",
        _any_of(LOGGERS),
    )
    callbacks: str | tuple[str, ...] = declare(
        (),
        f"callbacks: {', '.join(f'{name} ({does})' for name, does in CALLBACKS.items())}; "
        "separated by commas, or a list",
        "set_callbacks(callbacks)",
        _any_of(CALLBACKS),
    )
    with_test: bool = of_run(
        True, "evaluate val_targets and val_dir during training", "set_with_test(with_test)"
    )
    test_period: int = of_run(
        0,
        "steps between additional evaluations; 0: none",
        "set_test_period(period)",
        at_least(0),
        needs=need("train.with_test", True),
    )
    seed: int = of_run(
        0, "random seed of weights, order, flips and dropout", "set_seed(seed)", between(0, 2**31 - 1)
    )
    deterministic: bool = of_run(False, "use deterministic algorithms only", "set_deterministic(flag)")
    limit_train_batches: int | float = of_run(
        1.0,
        "batches per epoch: an integer is their number, a fraction their share; 1.0: all",
        "set_limit_train_batches(limit)",
        _limit,
    )
    limit_val_batches: int | float = of_run(
        1.0,
        "as limit_train_batches, for each evaluation during training",
        "set_limit_val_batches(limit)",
        _limit,
    )
    limit_test_batches: int | float = declare(
        1.0, "as limit_train_batches, for test", "set_limit_test_batches(limit)", _limit
    )
    fast_dev_run: bool | int = declare(
        False,
        "run one batch (True) or this many of training, of each evaluation or of test, and save nothing",
        "set_fast_dev_run(flag)",
        at_least(0),
    )


_ONE_SLASH = re.compile(r"(s3a?|gs|gcs|hdfs|webhdfs|abfss?|az|memory|file):/(?!/)")


def _last_checkpoints(number: int) -> str | None:
    return None if number == -1 or number >= 1 else "at least 1, or -1 to keep all"


def _user_name(text: str) -> str | None:
    if not text.strip() or "," in text:  # a password may follow the comma: do not print it
        raise OptionError("checkpoint.hdfs_user is not a plain user name; expected it without a password")
    return None


def _place(text: str) -> str | None:
    if not text.strip():
        return "a non-empty path or URL"
    return "a URL with two slashes, such as s3://bucket/run" if _ONE_SLASH.match(text) else None


def _url(text: str) -> str | None:
    return None if "://" in text else "an fsspec URL such as hdfs://server/folder"


@dataclass(frozen=True)
class CheckpointOptions:
    """Saving and loading of checkpoints."""

    save_dir: str = declare(
        "output",
        "folder or fsspec URL, such as s3://bucket/run, of checkpoints, metrics and plots",
        "set_model_save_dir(directory)",
        _place,
    )
    load_dir: str | None = declare(
        None,
        "checkpoint to resume, test or predict with: a folder, a URL, or 'last' or 'best' in save_dir; "
        "'last' trains from scratch if there is none",
        "set_checkpoint_dir(directory)",
        _place,
    )
    upload_dir: str | None = declare(
        None, "fsspec URL to which each checkpoint is uploaded, too", "set_upload_dir(url)", _url
    )
    download_dir: str | None = declare(
        None,
        "fsspec URL of a checkpoint to load, or of a run (newest checkpoint); downloaded to load_dir, or to "
        "the cache folder",
        "set_download_dir(url)",
        _url,
    )
    hdfs_user: str | None = declare(
        None,
        "HDFS user name; None: HADOOP_USER_NAME or the system's user name",
        "set_hdfs_user(name)",
        _user_name,
    )
    new_version: bool = declare(False, "save to a new folder version_N in save_dir", "set_new_version(flag)")
    every_n_epochs: int = declare(
        1,
        "epochs between checkpoints; the last epoch is always saved; 0: no others",
        "set_save_every_n_epochs(num)",
        at_least(0),
    )
    every_n_steps: int = declare(
        0, "steps between additional checkpoints; 0: none", "set_save_every_n_steps(num)", at_least(0)
    )
    keep_last: int = declare(
        5, "newest checkpoints to keep; -1: all", "set_max_last_checkpoint_num(num)", _last_checkpoints
    )
    save_top_k: int = declare(
        1, "best checkpoints to keep in addition; -1: all", "set_save_top_k(num)", at_least(-1)
    )
    monitor: str | None = declare(
        None,
        "metric of the best checkpoint: 'loss', 'lfw accuracy', 'val top1', ...; None: accuracy of "
        "the first pair file, else top-1 on val_dir, else loss",
        "set_monitor(metric)",
        not_empty,
    )


def check_optimizer(name: str) -> str | None:
    """Return None for a known optimizer or a reference to a factory, else what was expected."""
    if names_code(name) or name.lower() in OPTIMIZERS:
        return None
    return f"'package.module:factory' or a name; {suggest(name.lower(), OPTIMIZERS)}"


def check_named_arguments(arguments: dict[str, Any]) -> str | None:
    """Return None for valid arguments of a named optimizer, else what was expected.

    Arguments that other options set are not valid.
    """
    if reserved := [name for name in arguments if name in RESERVED]:
        return f"arguments other than {reserved}: see optim.lr and optim.weight_decay"
    return check_arguments(arguments)


def check_arguments(arguments: dict[str, Any]) -> str | None:
    """Return None for plain values, which a checkpoint can store, by argument; else what was expected."""
    for name, value in arguments.items():
        if not isinstance(name, str) or not name.isidentifier():
            return f"argument names, not {name!r}"
        items = value if isinstance(value, (list, tuple)) else [value]
        if not all(map(_is_plain, items)):
            return f"plain values (numbers, strings, booleans or None), not {name}={shown_value(value)}"
    return None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, str)) or is_finite_number(value)


RESERVED = ("params", "lr", "initial_lr", "weight_decay", "maximize", "differentiable", "capturable")
"""Arguments of torch's optimizers that cannot be passed."""


@dataclass(frozen=True)
class ParameterGroup:
    """Training settings of the parameters that match a pattern (see `plsc.names.find_parameters`).

    lr_factor: factor of the learning rate. weight_decay: None: that of the run. frozen: do not train the
    parameters. arguments: arguments of the optimizer for this group, such as momentum.
    """

    pattern: str
    lr_factor: float = declare(
        1.0, "factor: learning rate of the group = this factor x learning rate of the run", check=more_than(0)
    )
    weight_decay: float | None = declare(None, "weight decay (L2)", check=at_least(0))
    frozen: bool = declare(False, "do not train these parameters")
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that differ from the defaults, and the arguments; plain values."""
        values = {name: getattr(self, name) for name in ("lr_factor", "weight_decay", "frozen")}
        changed = {name: value for name, value in values.items() if value != getattr(ParameterGroup, name)}
        return changed | self.arguments

    def as_dict(self) -> dict[str, Any]:
        """Return its entry in `optim.groups`."""
        return {"pattern": self.pattern, **self.settings}


def read_parameter_groups(values: Sequence[Mapping[str, Any]]) -> list[ParameterGroup]:
    """Return the groups listed in `optim.groups`. Raises OptionError for an invalid entry."""
    return [_read(value) for value in values]


def _read(value: Mapping[str, Any]) -> ParameterGroup:
    pattern: Any = value.get("pattern")
    what = f"parameter group of the pattern {shown_value(pattern)}"
    settings, arguments = read_fields(ParameterGroup, value, what)
    arguments.pop("pattern", None)
    if (expected := check_pattern(pattern) or check_named_arguments(arguments)) is not None:
        raise OptionError(f"{what}: expected {expected}")
    return ParameterGroup(pattern, arguments=arguments, **settings)


DEFAULT_RATE, REFERENCE_BATCH = 0.1, 1024
"""Default learning rate at this global batch size; it scales linearly with the batch (Goyal et al. 2017)."""

WARMUP_STEPS, WARMUP_SHARE = 1000, 0.1
"""Default warm-up: this share of the run's steps, at most WARMUP_STEPS."""

WARMUP_STEPS_OF_UNKNOWN_LENGTH = 100

CLIP_NORM, CLIPPED_STEP = 20.0, 0.4
"""Default maximum of the gradient norm, and of the gradient norm times the learning rate."""


def _increasing_steps(steps: tuple[int, ...]) -> str | None:
    rising = all(a < b for a, b in itertools.pairwise(steps))
    return None if rising and all(s > 0 for s in steps) else "increasing positive step numbers"


@dataclass(frozen=True)
class ScheduleArguments:
    """The arguments of the schedules: see `ACCEPTED` for those that each accepts."""

    steps: int | None = declare(None, "last step of the fall; None: that of the run", check=at_least(1))
    end_factor: float = declare(0.0, "final learning rate, relative to lr", check=between(0, 1))
    power: float = declare(1.0, "power of the polynomial", check=more_than(0))
    boundaries: tuple[int, ...] = declare(
        (100000, 160000, 220000), "steps at which step changes the learning rate", check=_increasing_steps
    )
    factor: float = declare(0.1, "factor of step at each of the boundaries", check=between(1e-6, 1))


ACCEPTED = {
    "step": ("boundaries", "factor"),
    "polynomial": ("steps", "end_factor", "power"),
    "cosine": ("steps", "end_factor"),
}
"""The arguments of each schedule; the others have none."""


def _warmup(value: int | str) -> str | None:
    good = re.fullmatch(r"[1-9]\d*ep", value) if isinstance(value, str) else value >= 0
    return None if good else "a number of at least 0, or epochs such as '2ep'"


def _schedule(name: str) -> str | None:
    if names_code(name) or name in SCHEDULES:
        return None
    return f"'package.module:function' or a name; {suggest(name, SCHEDULES)}"


def _groups(values: tuple[dict[str, Any], ...]) -> None:
    read_parameter_groups(values)


def _patterns(values: tuple[str, ...]) -> str | None:
    return next((wrong for wrong in map(check_pattern, values) if wrong), None)


_SGD = Need(
    "optim.optimizer",
    "the optimizer of network or class weights is sgd",
    lambda config: (
        config.optim.optimizer.lower() == "sgd" or (SHARDED.holds(config) and config.head.optimizer == "sgd")
    ),
)
_NOT_ALL_OWN = Need(
    "optim.optimizer",
    "the optimizer has a name, or the class weights are sharded",
    lambda config: not names_code(config.optim.optimizer) or SHARDED.holds(config),
)


@dataclass(frozen=True)
class OptimOptions:
    """Optimizer and learning rate schedule."""

    # None: `with_rate` in plsc/train/build.py decides.
    lr: float | None = of_run(
        None,
        f"learning rate, used as it is; None: {DEFAULT_RATE:g} x global batch / {REFERENCE_BATCH}",
        "set_lr(lr)",
        more_than(0),
        needs=_NOT_ALL_OWN,
    )
    optimizer: str = of_run(
        "sgd",
        f"optimizer of the network: {', '.join(OPTIMIZERS)}, or 'package.module:factory'",
        "set_optimizer(optimizer)",
        check_optimizer,
    )
    optimizer_arguments: dict[str, Any] | None = of_run(  # noqa: RUF009
        None,
        "other arguments of the optimizer, such as {betas: [0.9, 0.99]}; nesterov of sgd also applies to "
        "class weights",
        "set_optimizer_arguments(arguments)",
        check_arguments,
    )
    momentum: float = of_run(
        0.9,
        "momentum of SGD",
        "set_momentum(momentum)",
        between(0, 0.9999),
        needs=_SGD,
    )
    weight_decay: float = of_run(
        5e-4,
        "weight decay (L2) of all parameters",
        "set_weight_decay(decay)",
        at_least(0),
        needs=_NOT_ALL_OWN,
    )
    groups: tuple[dict[str, Any], ...] = of_run(
        (),
        "parameter groups: a list of mappings with pattern, lr_factor, weight_decay, frozen and optimizer "
        "arguments; add_parameter_group adds one",
        "set_parameter_groups(groups)",
        _groups,
    )
    freeze: tuple[str, ...] = of_run(
        (), "patterns of parameters to freeze, such as [stem, stages.0]", "set_freeze(patterns)", _patterns
    )
    schedule: str | dict[str, Any] = of_run(  # noqa: RUF009
        "cosine",
        "learning rate schedule: cosine, polynomial, step, constant, or "
        "'package.module:function'; or a mapping with name and arguments: "
        f"{described_fields(ScheduleArguments)}",
        "set_lr_schedule(schedule, **arguments)",
        with_arguments(_schedule, ScheduleArguments, ACCEPTED),
    )
    warmup_steps: int | str | None = of_run(
        None,
        "steps of linear warm-up, such as 500, or epochs, such as 2ep; None: "
        f"{WARMUP_SHARE:.0%} of the run, at most {WARMUP_STEPS}; {WARMUP_STEPS_OF_UNKNOWN_LENGTH} if the "
        "length is unknown; 0 with a custom schedule",
        "set_warmup_steps(num)",
        _warmup,
    )
    clip_norm: float | None = of_run(
        None,
        f"maximum norm of the gradients; None: the smaller of {CLIP_NORM:g} and {CLIPPED_STEP} / lr; 0: no "
        "clipping",
        "set_clip_norm(norm)",
        at_least(0),
    )
    ema_decay: float = of_run(
        0.0,
        "decay per step, such as 0.999, of a moving average of the network's weights for evaluation; 0: off",
        "set_ema_decay(decay)",
        between(0, 0.999999),
    )


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
