"""The options, once: name, type, default, meaning, check and setter of each.

Setters, command-line flags, config files, the docs page and the options in a checkpoint all derive
from this table. An option is named by its path, such as ``train.batch_size``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterator, MutableSet
from dataclasses import dataclass, field
from typing import Any

from plsc.errors import OptionError, suggest
from plsc.option import OptionSpec, at_least, between, declare, more_than, not_empty, one_of


def _image_shape(shape: tuple[int, ...]) -> str | None:
    good = len(shape) == 3 and shape[0] in (1, 3) and min(shape) >= 1
    return None if good else "(channels, height, width) with 1 or 3 channels, such as (3, 112, 112)"


def _increasing_steps(steps: tuple[int, ...]) -> str | None:
    rising = all(a < b for a, b in itertools.pairwise(steps))
    return None if rising and all(s > 0 for s in steps) else "increasing positive step numbers"


def _last_checkpoints(number: int) -> str | None:
    return None if number == -1 or number >= 1 else "at least 1, or -1 to keep all"


@dataclass
class ModelOptions:
    """The backbone."""

    name: str = declare(
        "ResNet50",
        "ResNet18, ResNet34, ResNet50, ResNet101, ResNet152, SmallResNet, or 'package.module:Class' "
        "for a BaseModel of your own",
        "set_model_name(name)",
        not_empty,
    )
    emb_size: int = declare(512, "size of the embedding", "set_emb_size(size)", at_least(1))
    image_shape: tuple[int, int, int] = declare(
        (3, 112, 112),
        "channels, height, width of the input; on the command line [3,112,112]",
        "set_image_shape(shape)",
        _image_shape,
    )
    dropout: float = declare(
        0.4, "dropout before the embedding layer", "set_dropout(ratio)", between(0, 0.99)
    )
    sync_batch_norm: bool = declare(
        False, "batch-norm statistics over the global batch", "set_sync_batch_norm(sync)"
    )


@dataclass
class HeadOptions:
    """The classification head."""

    loss_type: str = declare(
        "dist_arcface",
        "dist_arcface, dist_softmax (rows sharded over the ranks), arcface, softmax (rows on every rank)",
        "set_loss_type(loss_type)",
        one_of("dist_arcface", "dist_softmax", "arcface", "softmax"),
    )
    class_num: int | None = declare(
        None,
        "number of classes; when not set, the largest label + 1",
        "set_class_num(num)",
        at_least(1),
    )
    margin: float = declare(
        0.5, "ArcFace margin in radians", "set_margin(margin)", between(0, math.pi / 2)
    )
    scale: float = declare(64.0, "scale of the cosines", "set_scale(scale)", more_than(0))


@dataclass
class DataOptions:
    """What is read, and how."""

    dataset_dir: str = declare(
        "./train_data",
        "folder with label.txt and images/, or with one folder of images per class",
        "set_dataset_dir(directory)",
        not_empty,
    )
    train_image_num: int | None = declare(
        None,
        "images per epoch, for readers that cannot tell; when not set, counted",
        "set_train_image_num(num)",
        at_least(1),
    )
    val_targets: str | None = declare(
        None,
        "names of pair files (name.bin in the dataset folder), separated by commas; "
        "when not set, 'lfw' if lfw.bin is there",
        "set_val_targets(targets)",
    )
    num_workers: int = declare(
        2, "processes per rank that read images; 0 reads in the rank itself",
        "set_num_workers(num)", between(0, 1024),
    )  # fmt: skip
    last_batch: str = declare(
        "pad",
        "the last batch of an epoch: pad (repeats the epoch's first samples), keep (smaller) or drop",
        "set_last_batch(policy)",
        one_of("pad", "keep", "drop"),
    )
    bad_images: str = declare(
        "stop",
        "an image that cannot be read: stop the run, or skip (left out and counted)",
        "set_bad_images(policy)",
        one_of("stop", "skip"),
    )
    flip: bool = declare(
        True,
        "mirror half of the training images, and add the mirrored image's embedding in evaluation",
        "set_flip(flip)",
    )


@dataclass
class OptimOptions:
    """Optimizer and learning rate."""

    lr: float = declare(
        0.1, "learning rate for a global batch of 1024; scaled in proportion", "set_lr(lr)",
        more_than(0),
    )  # fmt: skip
    momentum: float = declare(0.9, "momentum of SGD", "set_momentum(momentum)", between(0, 0.9999))
    weight_decay: float = declare(
        5e-4, "L2 decay of all parameters", "set_weight_decay(decay)", at_least(0)
    )
    warmup_epochs: int = declare(
        0, "epochs over which the learning rate rises linearly from 0", "set_warmup_epochs(num)",
        at_least(0),
    )  # fmt: skip
    step_boundaries: tuple[int, ...] = declare(
        (100000, 160000, 220000),
        "steps at which the learning rate is multiplied by lr_decay_factor",
        "set_step_boundaries(boundaries)",
        _increasing_steps,
    )
    lr_decay_factor: float = declare(
        0.1, "factor of the learning rate at each boundary", "set_lr_decay_factor(factor)",
        between(0, 1),
    )  # fmt: skip


@dataclass
class TrainOptions:
    """The loop."""

    batch_size: int = declare(
        128, "training images per rank and step", "set_train_batch_size(batch_size)", at_least(1)
    )
    global_batch_size: int | None = declare(
        None,
        "training images per step over all ranks, instead of batch_size",
        "set_global_batch_size(batch_size)",
        at_least(1),
    )
    test_batch_size: int = declare(
        120, "images per rank in test and predict", "set_test_batch_size(batch_size)", at_least(1)
    )
    epochs: int = declare(120, "passes over the data", "set_train_epochs(num)", at_least(1))
    steps: int | None = declare(
        None, "stop after this many steps, if before the last epoch", "set_train_steps(num)",
        at_least(1),
    )  # fmt: skip
    calc_acc: bool = declare(
        False, "measure the accuracy of the batch at each logged step", "set_calc_acc(calc)"
    )
    log_period: int = declare(
        200, "steps between two log lines", "set_log_period(period)", at_least(1)
    )
    with_test: bool = declare(
        True, "evaluate val_targets while training", "set_with_test(with_test)"
    )
    test_period: int = declare(
        0, "steps between evaluations, besides each epoch's end; 0: none", "set_test_period(period)",
        at_least(0),
    )  # fmt: skip
    seed: int = declare(
        0, "the one seed of the run: weights, order, augmentation, dropout", "set_seed(seed)",
        between(0, 2**31 - 1),
    )  # fmt: skip
    deterministic: bool = declare(
        False, "refuse operations whose result may differ between runs", "set_deterministic(flag)"
    )
    stop_deadline: float = declare(
        60.0,
        "seconds after SIGINT or SIGTERM in which the state must be saved; then the process ends",
        "set_stop_deadline(seconds)",
        more_than(0),
    )


@dataclass
class CheckpointOptions:
    """Where the state goes, and where it comes from."""

    save_dir: str = declare(
        "output",
        "folder for checkpoints, metrics and plots",
        "set_model_save_dir(directory)",
        not_empty,
    )
    load_dir: str | None = declare(
        None, "checkpoint to resume, test or predict with", "set_checkpoint_dir(directory)"
    )
    keep_last: int = declare(
        5, "number of newest checkpoints to keep; -1 keeps all", "set_max_last_checkpoint_num(num)",
        _last_checkpoints,
    )  # fmt: skip


@dataclass
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
    dtype: str = declare(
        "float32",
        "float32, or float64 for checks, of weights and computation",
        "set_dtype(dtype)",
        one_of("float32", "float64"),
    )
    cpu_threads: int = declare(
        0, "CPU threads per rank; 0 leaves it to torch (torchrun sets 1)", "set_cpu_threads(num)",
        between(0, 4096),
    )  # fmt: skip


@dataclass
class Options:
    """All options of a run, in groups; `explicit` holds the paths that somebody set."""

    model: ModelOptions = field(default_factory=ModelOptions)
    head: HeadOptions = field(default_factory=HeadOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    explicit: MutableSet[str] = field(default_factory=set)

    def get(self, path: str) -> Any:
        """Return the value of the option at a path such as ``train.batch_size``."""
        spec = find_option(path)
        return getattr(getattr(self, spec.group), spec.name)

    def set(self, path: str, value: Any) -> None:
        """Check and set an option. Raises OptionError with what was expected, what came."""
        spec = find_option(path)
        setattr(getattr(self, spec.group), spec.name, spec.checked(value))
        self.explicit.add(path)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the options as plain nested values for JSON or YAML."""
        nested: dict[str, dict[str, Any]] = {}
        for spec in all_options():
            value = self.get(spec.path)
            plain = list(value) if isinstance(value, tuple) else value
            nested.setdefault(spec.group, {})[spec.name] = plain
        return nested

    def adopt(self, saved: dict[str, Any], keep: frozenset[str] = frozenset()) -> list[str]:
        """Take the options of a checkpoint where nobody set them here.

        `keep` names paths that are never taken. Unknown options (of a newer version) are passed over.
        Returns a line for each option that was set here to another value.
        """
        differences = []
        for spec in all_options():
            values = saved.get(spec.group)
            if spec.path in keep or not isinstance(values, dict) or spec.name not in values:
                continue
            value = spec.checked(values[spec.name])
            mine = self.get(spec.path)
            if spec.path not in self.explicit:
                setattr(getattr(self, spec.group), spec.name, value)
            elif mine != value:
                differences.append(f"{spec.path}: {mine} here, {value} in the checkpoint")
        return differences


def all_options() -> Iterator[OptionSpec]:
    """Yield the rows of the option table, group by group."""
    yield from _TABLE.values()


def find_option(path: str) -> OptionSpec:
    """Return the row of an option; OptionError with the nearest names if there is none."""
    spec = _TABLE.get(path)
    if spec is None:
        raise OptionError(f"there is no option {path!r}; {suggest(path, _TABLE)}")
    return spec


def _build_table() -> dict[str, OptionSpec]:
    table = {}
    for group, factory in typing.get_type_hints(Options).items():
        if group == "explicit":
            continue
        kinds = typing.get_type_hints(factory)
        for item in dataclasses.fields(factory):
            setter, _, argument = item.metadata["setter"].rstrip(")").partition("(")
            spec = OptionSpec(
                group=group,
                name=item.name,
                kind=kinds[item.name],
                default=item.default,
                meaning=item.metadata["meaning"],
                setter=setter,
                argument=argument,
                check=item.metadata["check"],
            )
            table[spec.path] = spec
    return table


_TABLE = _build_table()
