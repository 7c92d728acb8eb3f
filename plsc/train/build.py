"""Options in, the parts of a run out: every name and combination is checked here, before any data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plsc.config import Options
from plsc.data.transform import Transform
from plsc.errors import OptionError
from plsc.heads import Head, RowOptimizer
from plsc.heads.joint import JointHead, JointRows, each_head
from plsc.models import BaseModel, build_model, check_model
from plsc.models.dropout import SampleNumbers, draw_by_sample
from plsc.models.sync_batch_norm import synchronise_batch_norm
from plsc.optim.autocast import apply_lists
from plsc.optim.factory import build_optimizer
from plsc.optim.precision import LossScaler
from plsc.optim.schedule import Schedule, cosine_schedule, polynomial_schedule, step_schedule
from plsc.parallel.gradients import sum_gradients
from plsc.parallel.world import World
from plsc.storage.urls import shown
from plsc.train.acceleration import check_speed, compiled, lay_out
from plsc.train.build_head import build_heads, margin_of
from plsc.train.evaluation import Target, TestReader, load_targets
from plsc.train.feed import Loader, build_feed, join_notes
from plsc.train.precision import (
    build_scaler,
    check_precision,
    look_up_lists,
    mode_note,
    training_mode,
)
from plsc.train.several import build_joint_feed
from plsc.train.state import Position
from plsc.train.training_set import TrainingSet


@dataclass
class UserParts:
    """What a script brings of its own, instead of the parts that options name."""

    model: BaseModel | None = None
    train_reader: Any = None
    test_reader: TestReader | None = None
    predict_reader: Any = None
    train_transform: Transform | None = None


@dataclass
class Run:
    """The parts of a training run.

    network: the backbone; forward: the same, with its gradients summed over the ranks. optimizer: of the
    backbone, and of the class rows where every rank has all; rows: that of sharded rows, else None. scaler:
    of the loss, None where the mode needs none.
    """

    options: Options
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
    position: Position = field(default_factory=Position)
    lineage: list[dict[str, Any]] = field(default_factory=list)  # changes of the classes before
    resumed_from: Path | None = None

    @property
    def total_steps(self) -> int | None:
        """How many steps the run makes in all; None when a reader does not tell its length."""
        return _count_steps(self.options, self.loader.steps_per_epoch)


def _count_steps(options: Options, steps_per_epoch: int | None) -> int | None:
    """Return how many steps a run makes in all, None if that is not known before."""
    if steps_per_epoch is None:
        return options.train.steps
    total = options.train.epochs * steps_per_epoch
    return min(total, options.train.steps or total)


def build_run(options: Options, world: World, user: UserParts) -> Run:
    """Build everything that training needs. Raises OptionError or DataError."""
    check_combinations(options, world.size)
    if options.train.deterministic:
        torch.use_deterministic_algorithms(True)
    network = build_network(options, world, user.model)
    samples = draw_by_sample(network)
    targets = load_targets(options, user.test_reader) if options.train.with_test else []
    global_batch = global_batch_size(options, world.size)
    make_feed = build_joint_feed if options.data.datasets else build_feed
    feed = make_feed(options, world, user.train_reader, user.train_transform, global_batch)
    head, rows = build_heads(options, feed.class_num, feed.sets, world)
    groups = [{"params": [p for p in network.parameters() if p.requires_grad]}]
    dense = [p for _, _, one, own in each_head(head, rows) if own is None for p in one.parameters()]
    if dense:
        groups.append({"params": dense})
    optimizer = build_optimizer(options.optim, groups)
    _check_batch_norm(network, global_batch, feed.num_samples, options, world.size)
    return Run(
        options=options,
        world=world,
        network=network,
        forward=sum_gradients(
            compiled(network, options, world, global_batch), world, options.speed.bucket_mb
        ),
        head=head,
        optimizer=optimizer,
        rows=rows,
        scaler=build_scaler(options, world.device),
        rate=_build_schedule(options, global_batch, feed.loader.steps_per_epoch),
        loader=feed.loader,
        targets=targets,
        save_dir=Path(options.checkpoint.save_dir),
        num_samples=feed.num_samples,
        notes=join_notes(feed.notes, mode_note(options, world.device)),
        first_sample=feed.first_sample,
        is_data_of_ranks=feed.is_of_ranks,
        samples=samples,
        sets=feed.sets,
    )


def check_combinations(options: Options, ranks: int) -> None:
    """Raise OptionError for options that contradict each other."""
    margin_of(options)
    check_precision(options)
    check_speed(options, ranks)
    if "train.epoch_steps" in options.explicit and not options.data.datasets:
        raise OptionError(
            "train.epoch_steps is for several data sets (add_dataset); an epoch over one is a pass over it"
        )
    _check_pretrained(options)
    total = options.train.global_batch_size
    if total is None:
        return
    product = options.train.batch_size * ranks
    is_kept = "train.global_batch_size" in options.adopted  # from a run on other ranks, perhaps
    if "train.batch_size" in options.explicit and total != product and not is_kept:
        raise OptionError(
            f"train.global_batch_size is {total}, but train.batch_size {options.train.batch_size} on "
            f"{ranks} ranks makes {product}; set one of the two"
        )
    if total < ranks:
        raise OptionError(
            f"train.global_batch_size is {total}; expected at least {ranks}, the ranks"
        )


def _check_pretrained(options: Options) -> None:
    """Refuse weights to start from beside a checkpoint to resume; "last" may find none, so it may stay."""
    place, url = options.checkpoint.load_dir, options.checkpoint.download_dir
    source = url if place in (None, "last") else place
    if "model.pretrained" in options.explicit and source is not None:
        raise OptionError(
            f"model.pretrained is {shown(str(options.model.pretrained))}, but the run resumes "
            f"{shown(source)}, which gives its weights; set one of the two"
        )


def global_batch_size(options: Options, ranks: int) -> int:
    """Return the number of samples of a step over all ranks."""
    return options.train.global_batch_size or options.train.batch_size * ranks


def build_network(options: Options, world: World, custom: BaseModel | None) -> BaseModel:
    """Return the backbone on its device, checked with a dry run; its weights follow the seed."""
    torch.manual_seed(options.train.seed)
    model = custom
    if model is None:
        model = build_model(
            options.model.name,
            options.model.emb_size,
            options.model.image_shape,
            dropout=options.model.dropout,
        )
    check_model(model, options.model.image_shape, options.model.emb_size)
    model = model.to(world.device, getattr(torch, options.runtime.dtype))
    lists = look_up_lists(model, options)  # before layers are replaced by others of the same names
    if options.model.sync_batch_norm:
        synchronise_batch_norm(model, world.backbone_group)
    mode = training_mode(options, world.device)
    if mode != "float32":
        apply_lists(model, lists, getattr(torch, mode), world.device)
    lay_out(model, options, world.device)
    return model


def _build_schedule(options: Options, global_batch: int, steps_per_epoch: int | None) -> Schedule:
    optim = options.optim
    total_steps = _count_steps(options, steps_per_epoch)
    if optim.warmup_epochs and steps_per_epoch is None:
        raise OptionError(
            "optim.warmup_epochs needs the length of an epoch, which a generator reader does not "
            "tell; call set_train_image_num"
        )
    warmup = optim.warmup_epochs * (steps_per_epoch or 0)
    if optim.schedule == "step":
        return step_schedule(
            optim.lr, global_batch, optim.step_boundaries, optim.lr_decay_factor, warmup
        )
    last = optim.decay_steps or total_steps
    if last is None:
        raise OptionError(
            f"optim.schedule {optim.schedule!r} needs the number of steps, which a generator reader does "
            "not tell; call set_decay_steps, set_train_steps or set_train_image_num"
        )
    end = optim.end_lr_factor
    if optim.schedule == "cosine":
        return cosine_schedule(optim.lr, global_batch, last, end, warmup)
    return polynomial_schedule(optim.lr, global_batch, last, optim.decay_power, end, warmup)


def _check_batch_norm(
    network: nn.Module,
    global_batch: int,
    num_samples: int | None,
    options: Options,
    ranks: int,
) -> None:
    """Refuse batches so small that batch norm has one value, or none, to normalise."""
    if options.model.sync_batch_norm and ranks > 1:
        return
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules()):
        return
    smallest = global_batch
    if options.data.last_batch == "keep" and num_samples is not None:
        smallest = num_samples % global_batch or global_batch
    parts = ranks * options.train.micro_batches
    split = " in micro-batches" if parts > ranks else ""
    if smallest // parts < 2:
        raise OptionError(
            f"a batch of {smallest} images over {ranks} ranks{split} leaves a rank with fewer than 2, from "
            "which batch norm cannot take statistics; use a larger batch, fewer ranks, "
            "set_last_batch('pad') or 'drop', or set_sync_batch_norm(True)"
        )
