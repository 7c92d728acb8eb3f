"""Options in, the parts of a run out: every name and combination is checked here, before any data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from plsc.config import Options
from plsc.data.loader import SourceLoader
from plsc.data.order import BatchPlan
from plsc.data.reader import ReaderLoader
from plsc.data.sources import ImageFolderSource, check_labels, open_source
from plsc.data.sources.base import Source
from plsc.data.sources.torch_dataset import TorchDatasetSource
from plsc.errors import OptionError
from plsc.heads import Head, RowOptimizer, ShardedHead
from plsc.models import BaseModel, build_model, check_model
from plsc.models.sync_batch_norm import synchronise_batch_norm
from plsc.optim.schedule import step_schedule
from plsc.parallel.gradients import sum_gradients
from plsc.parallel.world import World
from plsc.train.build_head import build_head_of, build_row_optimizer, margin_of
from plsc.train.evaluation import Target, TestReader, load_targets
from plsc.train.state import Best, Position

Loader = SourceLoader | ReaderLoader


@dataclass
class UserParts:
    """What a script brings of its own, instead of the parts that options name."""

    model: BaseModel | None = None
    train_reader: Any = None
    test_reader: TestReader | None = None
    predict_reader: Any = None


@dataclass
class Run:
    """The parts of a training run.

    network: the backbone; forward: the same, with its gradients summed over the ranks. optimizer: of the
    backbone, and of the class rows where every rank has all; rows: that of sharded rows, else None.
    """

    options: Options
    world: World
    network: BaseModel
    forward: nn.Module
    head: Head
    optimizer: torch.optim.Optimizer
    rows: RowOptimizer | None
    rate: Callable[[int], float]
    loader: Loader
    targets: list[Target]
    save_dir: Path
    num_samples: int | None
    notes: str = ""  # what the user should know before training begins
    position: Position = field(default_factory=Position)
    best: Best = field(default_factory=Best)

    @property
    def total_steps(self) -> int | None:
        """How many steps the run makes in all; None when a reader does not tell its length."""
        per_epoch = self.loader.steps_per_epoch
        options = self.options.train
        if per_epoch is None:
            return options.steps
        return min(options.epochs * per_epoch, options.steps or options.epochs * per_epoch)


def build_run(options: Options, world: World, user: UserParts) -> Run:
    """Build everything that training needs. Raises OptionError or DataError."""
    check_combinations(options, world.size)
    if options.train.deterministic:
        torch.use_deterministic_algorithms(True)
    network = build_network(options, world, user.model)
    targets = load_targets(options, user.test_reader) if options.train.with_test else []
    global_batch = global_batch_size(options, world.size)
    feed = _build_feed(options, world, user.train_reader, global_batch)
    head = build_head_of(options, feed.class_num, world)
    rows = build_row_optimizer(options, head) if isinstance(head, ShardedHead) else None
    groups = [{"params": [p for p in network.parameters() if p.requires_grad]}]
    if rows is None:
        groups.append({"params": list(head.parameters())})
    optimizer = torch.optim.SGD(
        groups,
        lr=options.optim.lr,
        momentum=options.optim.momentum,
        weight_decay=options.optim.weight_decay,
    )
    _check_batch_norm(network, global_batch, feed.num_samples, options, world.size)
    return Run(
        options=options,
        world=world,
        network=network,
        forward=sum_gradients(network, world),
        head=head,
        optimizer=optimizer,
        rows=rows,
        rate=_build_schedule(options, global_batch, feed.loader.steps_per_epoch),
        loader=feed.loader,
        targets=targets,
        save_dir=Path(options.checkpoint.save_dir),
        num_samples=feed.num_samples,
        notes=feed.notes,
    )


def check_combinations(options: Options, ranks: int) -> None:
    """Raise OptionError for options that contradict each other."""
    margin_of(options)
    total = options.train.global_batch_size
    if total is None:
        return
    product = options.train.batch_size * ranks
    if "train.batch_size" in options.explicit and total != product:
        raise OptionError(
            f"train.global_batch_size is {total}, but train.batch_size {options.train.batch_size} on "
            f"{ranks} ranks makes {product}; set one of the two"
        )
    if total < ranks:
        raise OptionError(
            f"train.global_batch_size is {total}; expected at least {ranks}, the ranks"
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
    if options.model.sync_batch_norm:
        synchronise_batch_norm(model, world.backbone_group)
    return model


def is_generator_reader(reader: Any) -> bool:
    """Whether this is a function that returns a generator, and not an indexed dataset."""
    return callable(reader) and not hasattr(reader, "__getitem__")


def open_training_source(options: Options, reader: Any) -> Source:
    """Return the source of a dataset object, or of the dataset folder when there is none."""
    if reader is not None:
        if not (hasattr(reader, "__getitem__") and hasattr(reader, "__len__")):
            raise OptionError(
                f"the reader is a {type(reader).__name__}; expected a function that returns a "
                "generator, or a map-style torch Dataset"
            )
        return TorchDatasetSource(reader)
    return open_source(Path(options.data.dataset_dir))


@dataclass
class _Feed:
    """The loader, the number of samples if it is known, of classes, and what is odd about them."""

    loader: Loader
    num_samples: int | None
    class_num: int
    notes: str = ""


def _build_feed(options: Options, world: World, reader: Any, global_batch: int) -> _Feed:
    data, seed = options.data, options.train.seed
    if reader is not None and is_generator_reader(reader):
        if options.head.class_num is None:
            raise OptionError("a generator reader cannot tell its classes; call set_class_num")
        loader = ReaderLoader(
            reader,
            global_batch=global_batch,
            rank=world.rank,
            ranks=world.size,
            image_shape=options.model.image_shape,
            class_num=options.head.class_num,
            seed=seed,
            last_batch=data.last_batch,
            num_samples=data.train_image_num,
        )
        return _Feed(loader, data.train_image_num, options.head.class_num)
    source = open_training_source(options, reader)
    save_dir = Path(options.checkpoint.save_dir).resolve()
    if isinstance(source, ImageFolderSource) and save_dir.is_relative_to(source.root.resolve()):
        raise OptionError(
            f"checkpoint.save_dir {options.checkpoint.save_dir} is inside {data.dataset_dir}, where "
            "every folder is a class; choose another"
        )
    if data.train_image_num not in (None, len(source)):
        raise OptionError(
            f"data.train_image_num is {data.train_image_num}, but the dataset has {len(source)} "
            "images; leave it out, or mend the dataset"
        )
    class_num = options.head.class_num or int(source.labels().max()) + 1
    if class_num < 2:
        raise OptionError(
            f"all {len(source)} images are of one class; a classifier needs two or more: is "
            f"{options.data.dataset_dir} the right folder, not one above it?"
        )
    check_labels(source, class_num)
    plan = BatchPlan(len(source), global_batch, world.size, seed, data.last_batch)
    source_loader = SourceLoader(
        source,
        plan,
        world.rank,
        options.model.image_shape,
        seed=seed,
        flip=data.flip,
        num_workers=data.num_workers,
        on_bad_image=data.bad_images,
        pin_memory=world.device.type == "cuda",
    )
    return _Feed(source_loader, len(source), class_num, _note_empty_classes(source, class_num))


def _note_empty_classes(source: Source, class_num: int) -> str:
    """Return a line about classes without an image, or nothing: labels that count from 1, perhaps."""
    has_image = np.zeros(class_num, dtype=bool)
    has_image[source.labels()] = True
    empty = np.flatnonzero(~has_image)
    if not len(empty):
        return ""
    return (
        f"note: {len(empty)} of {class_num} classes have no image, the first is {empty[0]}; labels "
        "count from 0"
    )


def _build_schedule(
    options: Options, global_batch: int, steps_per_epoch: int | None
) -> Callable[[int], float]:
    optim = options.optim
    if optim.warmup_epochs and steps_per_epoch is None:
        raise OptionError(
            "optim.warmup_epochs needs the length of an epoch, which a generator reader does not "
            "tell; call set_train_image_num"
        )
    return step_schedule(
        optim.lr,
        global_batch,
        optim.step_boundaries,
        optim.lr_decay_factor,
        optim.warmup_epochs * (steps_per_epoch or 0),
    )


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
