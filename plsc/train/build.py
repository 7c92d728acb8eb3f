"""Options in, the parts of a run out: every name and combination is checked here, before any data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plsc.config import Config
from plsc.config.model import read_initializations
from plsc.data.class_names import ClassNames
from plsc.data.transform import Transform
from plsc.errors import OptionError
from plsc.heads import Head, RowOptimizer
from plsc.heads.joint import JointHead, JointRows
from plsc.models import BaseModel, build_model, check_model
from plsc.models.base_model import constructor_arguments, unwrap
from plsc.models.checkpointing import checkpoint_activations
from plsc.models.dropout import SampleNumbers, draw_by_sample
from plsc.models.parameters import (
    freeze,
    initialise_by_rule,
    separate_buffers,
    thaw,
)
from plsc.models.sync_batch_norm import synchronise_batch_norm
from plsc.optim.loss_scaling import LossScaler
from plsc.optim.optimizers import Assignment, Factory, assign_parameters
from plsc.optim.schedule import Schedule
from plsc.parallel.backbone import is_sharded
from plsc.parallel.world import World
from plsc.train.acceleration import (
    check_speed,
    compiled,
    lay_out,
    shard_size,
    spread_backbone,
    will_be_sharded,
)
from plsc.train.build_head import TrainingSet, build_heads, margin_of
from plsc.train.build_optim import (
    ScheduleFunction,
    build_schedule,
    build_updates,
    check_optim,
    with_rate,
)
from plsc.train.class_numbers import OpenedCheckpoint
from plsc.train.evaluation import Target, TestReader, load_targets
from plsc.train.feed import Loader, build_feed, join_notes
from plsc.train.hints import batch_note, frozen_note, idle_note, threads_note
from plsc.train.precision import (
    build_scaler,
    check_precision,
    look_up_lists,
    mode_note,
    use_lists,
)
from plsc.train.several import build_joint_feed
from plsc.train.state import Position, collect_group_numbers


@dataclass
class UserParts:
    """What a script brings of its own, instead of the parts that options name."""

    model: BaseModel | None = None
    train_reader: Any = None
    test_reader: TestReader | None = None
    predict_reader: Any = None
    train_transform: Transform | None = None
    optimizer: Factory | None = None
    schedule: ScheduleFunction | None = None


@dataclass
class Run:
    """The parts of a training run.

    network: the backbone; forward: the same, with its gradients summed over the ranks. optimizer: of the
    backbone, and of the class rows where every rank has all; rows: that of sharded rows, else None. scaler:
    of the loss, None where the mode needs none.
    """

    options: Config
    world: World
    network: BaseModel
    forward: nn.Module
    head: Head | JointHead
    optimizer: torch.optim.Optimizer
    rows: RowOptimizer | JointRows | None
    scaler: LossScaler | None
    rate: Schedule
    loader: Loader
    targets: list[Target]
    save_dir: Path
    num_samples: int | None
    notes: str = ""  # what the user should know before training begins
    first_sample: int = 0  # of this rank's part of the dataset, where it reads no other
    is_data_of_ranks: bool = False  # whether the samples of a step depend on the number of ranks
    sets: list[TrainingSet] = field(
        default_factory=list
    )  # where there are several, with a head each
    samples: SampleNumbers = field(default_factory=SampleNumbers)
    settings: list[dict[str, float]] = field(
        default_factory=list
    )  # of the optimizer's groups, as they were made
    position: Position = field(default_factory=Position)
    class_names: dict[str, ClassNames] = field(default_factory=dict)  # by head; '' where it is one
    lineage: list[dict[str, Any]] = field(default_factory=list)  # changes of the classes before
    resumed_from: Path | None = None
    run_id: str = ""  # of the checkpoints that it saves

    @property
    def total_steps(self) -> int | None:
        """How many steps the run makes in all; None when a reader does not tell its length."""
        return _count_steps(self.options, self.loader.steps_per_epoch)


def _count_steps(options: Config, steps_per_epoch: int | None) -> int | None:
    """Return how many steps a run makes in all, None if that is not known before."""
    if steps_per_epoch is None:
        return options.train.steps
    total = options.train.epochs * steps_per_epoch
    return min(total, options.train.steps or total)


def build_run(
    options: Config, world: World, user: UserParts, checkpoint: OpenedCheckpoint | None = None
) -> Run:
    """Build everything that training needs. Raises OptionError, DataError or CheckpointError.

    checkpoint: the one that is to be restored; it numbers classes that have names.
    """
    check_combinations(options, world.size)
    if options.train.deterministic:
        torch.use_deterministic_algorithms(True)
        if world.device.type == "cuda":  # else torch refuses each product there
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    network, assignment, samples = _build_trained_network(options, world, user.model)
    memory = options.memory
    checkpoint_activations(network, memory.checkpoint_stages, memory.checkpoint_every)
    targets = load_targets(options, user.test_reader) if options.train.with_test else []
    global_batch = global_batch_size(options, world.size)
    make_feed = build_joint_feed if options.data.datasets else build_feed
    feed = make_feed(
        options, world, user.train_reader, user.train_transform, global_batch, checkpoint
    )
    steps_per_epoch = feed.loader.steps_per_epoch
    total_steps = _count_steps(options, steps_per_epoch)
    options = with_rate(options, global_batch, total_steps)
    head, rows = build_heads(options, feed.class_num, feed.sets, world)
    _check_batch_norm(network, global_batch, feed.num_samples, options, world.size)
    is_custom = user.model is not None or ":" in options.model.name
    trained = compiled(network, options, world, global_batch)
    forward, note = spread_backbone(network, trained, options, world)
    optimizer, base_rate = build_updates(
        options,
        dict(network.named_parameters()),
        assignment,
        head,
        rows,
        world.device,
        user.optimizer,
    )
    return Run(
        options=options,
        world=world,
        network=network,
        forward=forward,
        head=head,
        optimizer=optimizer,
        rows=rows,
        scaler=build_scaler(options, world.device),
        rate=build_schedule(
            options,
            base_rate,
            total_steps,
            steps_per_epoch,
            user.schedule,
        ),
        loader=feed.loader,
        targets=targets,
        save_dir=Path(options.checkpoint.save_dir),
        num_samples=feed.num_samples,
        notes=join_notes(
            note,
            feed.notes,
            mode_note(options, world.device),
            frozen_note(network),
            batch_note(global_batch, feed.num_samples),
            threads_note(options),
            idle_note(options, constructor_arguments(network) or {} if is_custom else None),
        ),
        first_sample=feed.first_sample,
        is_data_of_ranks=feed.is_of_ranks,
        samples=samples,
        settings=collect_group_numbers(optimizer),
        sets=feed.sets,
        class_names=feed.class_names,
    )


def _build_trained_network(
    options: Config, world: World, custom: BaseModel | None
) -> tuple[BaseModel, Assignment, SampleNumbers]:
    """Return the backbone as it is trained, what is to become of each of its parameters, and what tells its
    dropout layers the samples."""
    # What is split comes to its device in parts, see `spread_backbone`.
    is_split = will_be_sharded(options, world.size)
    place = torch.device("cpu") if is_split else world.device
    network = build_network(options, world, custom, place)
    _undo_earlier_run(network)
    lists = look_up_lists(network, options)
    rules = read_initializations(options.model.initialization)
    initialise_by_rule(network, rules, options.train.seed)
    # By names and types of the plain network: what follows replaces modules.
    assignment = assign_parameters(network, options.optim)
    if options.model.sync_batch_norm:
        synchronise_batch_norm(network, world.backbone_group, world.device)
    freeze(network, assignment.frozen)
    samples = draw_by_sample(network)
    use_lists(network, lists, options, world.device)
    return network, assignment, samples


def _undo_earlier_run(network: BaseModel) -> None:
    """Take back what a run before this one, with other options, left on a network of the user's."""
    unwrap(network)
    thaw(network)


def check_combinations(options: Config, ranks: int) -> None:
    """Raise OptionError for options that contradict each other."""
    margin_of(options)
    check_precision(options)
    check_speed(options, ranks)
    if "train.epoch_steps" in options.explicit and not options.data.datasets:
        raise OptionError(
            "train.epoch_steps is for several data sets (add_dataset); an epoch over one is a pass over it"
        )
    check_optim(options)
    _check_pretrained(options)
    if options.parallel.backbone == "sharded":
        shard_size(options, ranks)
    total = options.train.global_batch_size
    if total is None:
        return
    product = options.train.batch_size * ranks
    is_kept = "train.global_batch_size" in options.adopted  # from a run on other ranks, perhaps
    if "train.batch_size" in options.explicit and total != product and not is_kept:
        raise OptionError(
            f"train.global_batch_size is {total}, but train.batch_size {options.train.batch_size} on "
            f"{ranks} rank{'s' * (ranks > 1)} makes {product}; set one of the two"
        )
    if total < ranks:
        raise OptionError(
            f"train.global_batch_size is {total}; expected at least {ranks}, the ranks"
        )


def _check_pretrained(options: Config) -> None:
    """Refuse weights to start from beside a checkpoint to resume; "last" may find none, so it may stay."""
    place, url = options.checkpoint.load_dir, options.checkpoint.download_dir
    source = url if place in (None, "last") else place
    if "model.pretrained" in options.explicit and source is not None:
        raise OptionError(
            f"model.pretrained is {options.model.pretrained}, but the run resumes "
            f"{source}, which gives its weights; set one of the two"
        )


def global_batch_size(options: Config, ranks: int) -> int:
    """Return the number of samples of a step over all ranks."""
    return options.train.global_batch_size or options.train.batch_size * ranks


def build_network(
    options: Config, world: World, custom: BaseModel | None, place: torch.device | None = None
) -> BaseModel:
    """Return the backbone, one of the user's checked with a dry run; its weights follow the seed.

    place: where it is put; by default on the rank's device, where it will compute.
    """
    torch.manual_seed(options.train.seed)
    model = custom
    if model is not None and is_sharded(model):
        raise OptionError(
            f"this {type(model).__name__} was sharded over the ranks by an earlier run of this process; make "
            "a new one (set_model)"
        )
    if model is None:
        model = build_model(
            options.model.name,
            options.model.emb_size,
            options.model.image_shape,
            dropout=options.model.dropout,
            neck=options.model.neck,
            arguments=options.arguments,
        )
    if (
        custom is not None or ":" in options.model.name
    ):  # those of plsc fit, and adapted ones were run once
        check_model(model, options.model.image_shape, options.model.emb_size)
    separate_buffers(model)
    model = model.to(place or world.device, getattr(torch, options.runtime.dtype))
    lay_out(model, options, world.device)
    return model


def _check_batch_norm(
    network: BaseModel,
    global_batch: int,
    num_samples: int | None,
    options: Config,
    ranks: int,
) -> None:
    """Refuse batches so small that batch norm has one value, or none, to normalise."""
    if options.model.sync_batch_norm and ranks > 1:
        return
    norms = {m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    if not norms.difference(network.kept_in_evaluation):
        return
    smallest = global_batch
    if options.data.last_batch == "keep" and num_samples is not None:
        smallest = num_samples % global_batch or global_batch
    micro_batches = options.train.micro_batches
    if smallest // (ranks * micro_batches) >= 2:
        return
    is_short_end = smallest < global_batch
    remedies = [
        *(["set_last_batch('pad') or 'drop'"] if is_short_end else []),
        "a larger batch",
        *(["fewer micro-batches"] if micro_batches > 1 else []),
        *(["fewer ranks", "set_sync_batch_norm(True)"] if ranks > 1 else []),
    ]
    parts = [
        *([f"{ranks} ranks"] if ranks > 1 else []),
        *([f"{micro_batches} micro-batches"] if micro_batches > 1 else []),
    ]
    split = f" in {' and '.join(parts)}" if parts else ""
    raise OptionError(
        f"{'the last' if is_short_end else 'a'} batch of {smallest} image{'s' * (smallest != 1)}{split} "
        f"leaves fewer than 2 at once, from which batch norm cannot take statistics; use "
        f"{', or '.join(remedies)}"
    )
