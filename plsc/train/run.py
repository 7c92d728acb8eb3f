"""Build the parts of a run from its options; invalid combinations are rejected before data is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plsc.config import Config
from plsc.config.optim import DEFAULT_RATE, REFERENCE_BATCH
from plsc.config.option import name_and_arguments
from plsc.errors import OptionError
from plsc.heads import RowOptimizer, ShardedHead
from plsc.heads.kernels import choose_backend
from plsc.models import BaseModel, describe
from plsc.models.base_model import constructor_arguments
from plsc.models.dropout import SampleNumbers
from plsc.names import names_code
from plsc.optim.loss_scaling import LossScaler
from plsc.optim.schedule import Schedule
from plsc.parallel.world import World
from plsc.train.build import (
    build_schedule,
    build_trained_head,
    build_trained_network,
    build_updates,
    check_network_options,
    check_optim,
    distribute_backbone,
    margin_of,
    mode_note,
    training_mode,
    with_rate,
)
from plsc.train.callbacks import Callbacks, Context, Length, Position, UserParts
from plsc.train.data import OpenedCheckpoint, TrainingData, open_training_data
from plsc.train.settle import batch_note, frozen_note, idle_note, sparse_note, threads_note, warmup_note
from plsc.train.targets import HeldOutSet, Target, load_targets, open_held_out

MOST_ROWS = 12  # of the table of layers


@dataclass(eq=False, kw_only=True)
class Run(Context):
    """A training run: its parts, and what callbacks see of it.

    Attributes:
        trained_network: the backbone wrapped for training: it sums gradients over the ranks.
        optimizer: optimizer of the backbone, and of class weights that are not sharded.
        rows: optimizer of sharded class weights.
        scaler: loss scaler, None if the precision mode needs none.
        samples: the sample numbers of the current batch, for dropout layers.
        settings: initial attributes of the optimizer, and settings of its parameter groups.
        notes: log lines about the run, printed before training.
        is_custom: the network is the user's own.
        length: the length of its epochs.
        callbacks: called at the events of the run.
        buffers: shapes and types of the network's saved buffers at the start; None before.
        unsaved: hashes of the attributes of the optimizer that checkpoints lack, at the last check.
    """

    trained_network: nn.Module
    optimizer: torch.optim.Optimizer
    rows: RowOptimizer | None
    scaler: LossScaler | None
    rate: Schedule
    data: TrainingData
    targets: list[Target | HeldOutSet]
    samples: SampleNumbers
    settings: list[dict[str, Any]]
    notes: list[str]
    is_custom: bool
    length: Length
    callbacks: Callbacks
    buffers: dict[str, Any] | None = None
    unsaved: dict[str, bytes] = field(default_factory=dict)

    def call(self, event: str) -> None:
        """Call the callbacks at an event."""
        self.callbacks(event, self)


def build_run(
    options: Config, world: World, user: UserParts, checkpoint: OpenedCheckpoint | None = None
) -> Run:
    """Build everything that training needs. Raises OptionError, DataError or CheckpointError.

    checkpoint: the checkpoint to resume; classes with names get their numbers from it.
    """
    check_combinations(options, world.size)
    if options.speed.compile and any(callback.layers for callback in user.callbacks):
        raise OptionError(
            "a callback has layers, but outputs of layers are not available with speed.compile; "
            "remove one of the two"
        )
    if options.train.deterministic:
        torch.use_deterministic_algorithms(True)
        # Otherwise torch writes NaN into all memory that it allocates, 16 GB per step of a large head.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if world.device.type == "cuda":  # without it, torch rejects matrix products on CUDA
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The named or custom network; its parameters are assigned to groups, some are frozen.
    network, assignment, samples = build_trained_network(options, world, user.model, user.initializations)
    if world.device.type == "cuda" and network.example_input is None:
        # Images have few shapes: time cuDNN's algorithms for each, unless runs have to be equal.
        torch.backends.cudnn.benchmark = not options.train.deterministic
    targets: list[Target | HeldOutSet] = []
    limit = options.train.limit_val_batches
    if options.train.with_test:
        targets += load_targets(options, user.test_reader, limit, world.size)
    layers = describe(network, options.model.image_shape, MOST_ROWS) if world.is_main else ""
    global_batch = global_batch_size(options, world.size)
    # A source, the order of its samples, and a loader whose workers read, decode and augment them.
    data = open_training_data(
        options,
        world,
        user.train_reader,
        user.train_transform,
        global_batch,
        checkpoint,
        network.example_input,
    )
    if options.train.with_test:
        names = [target.name for target in targets]
        targets += open_held_out(options, data.class_num, data.class_names, names, limit, world)
    length = Length.of(data.loader.steps_per_epoch, checkpoint)
    total_steps = options.train.steps or length.until(options.train.epochs)
    options = with_rate(options, global_batch, total_steps)
    # For example a plsc.heads.ShardedHead and its RowSGD.
    counts = None if options.head.class_margins is None else data.count_images(world)
    head, rows = build_trained_head(options, data.class_num, world, counts)
    _check_batch_norm(network, global_batch, data.num_samples, options, world.size)
    # DDP with summed instead of averaged gradients; the network itself on a single rank.
    trained_network = distribute_backbone(network, options, world, global_batch)
    # A torch.optim optimizer for the backbone; the row optimizer gets its learning rate here too.
    parameters = dict(network.named_parameters())
    optimizer, base_rate = build_updates(
        options, parameters, assignment, head, rows, world.device, user.optimizer
    )
    rate = build_schedule(options, base_rate, total_steps, length.until, user.schedule)
    mode = training_mode(options, world.device)
    run = Run(
        options=options,
        world=world,
        network=network,
        trained_network=trained_network,
        head=head,
        optimizer=optimizer,
        rows=rows,
        position=Position(),
        total_steps=total_steps,
        evaluated=[f"{target.name} {metric}" for target in targets for metric in target.METRICS],
        scaler=LossScaler.of(options.precision) if mode == "float16" else None,
        rate=rate,
        data=data,
        targets=targets,
        samples=samples,
        settings=[dict(one) for one in (vars(optimizer), *optimizer.param_groups)],
        notes=list(filter(None, (layers, *data.notes))),
        is_custom=user.model is not None or names_code(options.model.name),
        length=length,
        callbacks=Callbacks(user.callbacks, network),
    )
    run.notes += filter(None, _likely_mistakes(run))
    return run


def check_combinations(options: Config, ranks: int) -> None:
    """Raise OptionError for options that contradict each other."""
    options.check_needs()
    margin_of(options)
    check_network_options(options, ranks)
    check_optim(options)
    _check_pretrained(options)
    total = options.train.global_batch_size
    if total is None:
        return
    product = options.train.batch_size * ranks
    is_kept = "train.global_batch_size" in options.adopted  # the run may resume on another number of ranks
    if "train.batch_size" in options.explicit and total != product and not is_kept:
        raise OptionError(
            f"train.global_batch_size is {total}, but train.batch_size {options.train.batch_size} on "
            f"{ranks} rank{'s' * (ranks > 1)} is a global batch of {product}; set one of the two"
        )
    if total < ranks:
        raise OptionError(
            f"train.global_batch_size is {total}; expected at least {ranks}, the number of ranks"
        )


def _check_pretrained(options: Config) -> None:
    """Raise OptionError if both pretrained weights and a checkpoint to resume are set.

    "last" is allowed, as it may find no checkpoint.
    """
    place, url = options.checkpoint.load_dir, options.checkpoint.download_dir
    source = url if place in (None, "last") else place
    if "model.pretrained" in options.explicit and source is not None:
        raise OptionError(
            f"model.pretrained is {options.model.pretrained}, but the run resumes {source}, which replaces "
            "all weights; set only one of them"
        )


def global_batch_size(options: Config, ranks: int) -> int:
    """Return the number of samples per step over all ranks."""
    return options.train.global_batch_size or options.train.batch_size * ranks


def _check_batch_norm(
    network: BaseModel, global_batch: int, num_samples: int | None, options: Config, ranks: int
) -> None:
    """Raise OptionError for batches that are too small for batch norm: fewer than 2 images."""
    if options.model.sync_batch_norm and ranks > 1:
        return
    norms = {m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    if not norms.difference(network.kept_in_evaluation):
        return
    smallest = global_batch
    if options.data.last_batch == "keep" and num_samples is not None:
        smallest = num_samples % global_batch or global_batch
    parts = ranks * options.train.micro_batches
    if smallest // parts < 2:
        raise OptionError(
            f"batch norm needs 2 or more images at once, but the smallest batch has {smallest}, in {parts} "
            "parts (ranks and micro-batches); increase train.batch_size, or set data.last_batch to pad"
        )


def describe_run(run: Run, checkpoint: OpenedCheckpoint | None) -> list[str]:
    """Return the log lines that are printed before training."""
    parameters = sum(p.numel() for p in run.network.parameters())
    samples = run.data.num_samples
    images = "images from a reader" if samples is None else f"{samples:,} images"
    network = type(run.network).__name__ if run.is_custom else run.options.model.name
    head, kernels = run.head, ""
    if isinstance(head, ShardedHead):
        how = head.execution
        assert isinstance(how.products, torch.dtype)
        backend = choose_backend(how.kernels, run.world.device, head.weight.dtype, how.products, None, 1)
        kernels = f", kernels {backend.describe()}"
    text = (
        f"training {network} ({parameters:,} parameters), loss {run.options.head.loss_type}, "
        f"{head.class_num:,} classes, {images}, "
        f"{run.world.size} rank{'s' * (run.world.size > 1)} on {run.world.device.type}, "
        f"{training_mode(run.options, run.world.device)}{kernels}"
    )
    resumed = [f"resuming from {checkpoint[0]} at step {run.position.step}"] if checkpoint else []
    return [text, *resumed, _rates(run), *run.notes]


def _likely_mistakes(run: Run) -> list[str]:
    """Return a line per option that is unlikely to be meant so; empty strings for the others."""
    options, network = run.options, run.network
    arguments = constructor_arguments(network) if run.is_custom else None
    return [
        mode_note(options, run.world.device),
        frozen_note(network),
        sparse_note(network) if not names_code(options.optim.optimizer) else "",
        batch_note(global_batch_size(options, run.world.size), run.data.num_samples),
        warmup_note(run.rate.warmup_steps, run.total_steps),
        threads_note(options),
        idle_note(options, (arguments or {}) if run.is_custom else None),
    ]


def _rates(run: Run) -> str:
    """Return a line with the learning rate and its origin, the schedule, warm-ups and automatic scales."""
    options = run.options
    if names_code(options.optim.optimizer):
        source = "from the optimizer factory"
    elif "optim.lr" in options.explicit:
        source = "optim.lr"
    elif "optim.lr" in options.adopted:
        source = "from the checkpoint"
    else:
        batch = global_batch_size(options, run.world.size)
        source = f"default: {DEFAULT_RATE:g} x global batch {batch} / {REFERENCE_BATCH}"
    parts = [
        f"learning rate {run.rate.base:.4g} ({source})",
        f"schedule {name_and_arguments(options.optim.schedule)[0]}",
        f"warm-up {run.rate.warmup_steps} step{'s' * (run.rate.warmup_steps != 1)}",
    ]
    if options.head.margin_warmup_steps:
        parts.append(f"margin warm-up {options.head.margin_warmup_steps} steps")
    if run.head.margin.is_auto_scale:
        parts.append(f"scale {run.head.margin.scale:.4g} (auto, {run.head.class_num:,} classes)")
    return ", ".join(parts)
