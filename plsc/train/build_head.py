"""Options in, the head and the optimizer of its rows out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plsc.config import Config
from plsc.errors import OptionError
from plsc.heads import (
    MARGINS,
    ROW_OPTIMIZERS,
    Execution,
    Head,
    RowOptimizer,
    Sampling,
    ShardedHead,
    build_head,
    build_margin,
)
from plsc.heads.joint import JointHead, JointRows
from plsc.heads.margins import Margin
from plsc.parallel.world import World
from plsc.train.precision import head_products

MARGIN_OPTIONS = {
    "head.scale": "scale",
    "head.margin": "margin",
    "head.combined_margins": "margins",
    "head.easy_margin": "easy_margin",
    "head.straight_through": "straight_through",
    "head.margin_momentum": "momentum",
    "head.adaface_h": "h",
    "head.magface_norms": "norm_range",
    "head.magface_margins": "margin_range",
    "head.magface_lambda": "regularisation",
}
ONLY_SHARDED = (
    "head.sample_ratio",
    "head.hard_share",
    "head.optimizer",
    "head.row_dtype",
    "head.state_dtype",
    "head.offload",
    "head.products",
    "head.keep_mb",
    "head.kernels",
    "head.tile",
)


@dataclass(frozen=True)
class TrainingSet:
    """A data set that was opened.

    options: the run's, with those of this data set and its head in place; class_num: its classes;
    num_samples: its images; per_step: how many of them a step has, over all ranks; seed: of its order and of
    its head.
    """

    name: str
    options: Config
    class_num: int
    num_samples: int
    per_step: int
    seed: int


def margin_of(options: Config) -> Margin:
    """Return the margin of the loss type.

    Raises OptionError for an option that somebody set and the loss has not.
    """
    head = options.head
    name = head.loss_type.removeprefix("dist_")
    if not head.loss_type.startswith("dist_"):
        for path in ONLY_SHARDED:
            if path in options.explicit:
                raise OptionError(
                    f"{path} is {options.get(path)}, but {head.loss_type} has all class rows on every rank; "
                    f"use dist_{head.loss_type}, or leave it out"
                )
    has = inspect.signature(MARGINS[name].__init__).parameters
    given: dict[str, Any] = {}
    for path, argument in MARGIN_OPTIONS.items():
        is_known = (
            path in options.adopted or path == "head.scale"
        )  # whose default is not the margin's
        is_set = path in options.explicit or (is_known and argument in has)
        if is_set:
            given[argument] = options.get(path)
    try:
        return build_margin(name, **given)
    except OptionError as error:
        raise OptionError(f"head.loss_type is {head.loss_type}: {error}") from error


def with_margin(options: Config) -> Config:
    """Return the configuration with the loss's own margin where none was set or adopted."""
    has = inspect.signature(
        MARGINS[options.head.loss_type.removeprefix("dist_")].__init__
    ).parameters
    return options.changed(
        {
            path: has[MARGIN_OPTIONS[path]].default
            for path in ("head.margin", "head.easy_margin")
            if MARGIN_OPTIONS[path] in has and path not in options.explicit | options.adopted
        }
    )


def build_heads(
    options: Config, class_num: int, sets: Sequence[TrainingSet], world: World
) -> tuple[Head | JointHead, RowOptimizer | JointRows | None]:
    """Return the head on its device, or one of the heads of several data sets, and its row optimizer."""
    if not sets:
        return _build_one(options, class_num, world, options.train.seed)
    heads, rows = {}, {}
    for one in sets:
        heads[one.name], optimizer = _build_one(one.options, one.class_num, world, one.seed)
        if optimizer is not None:
            rows[one.name] = optimizer
    return JointHead(heads, world.head_group), JointRows(rows) if rows else None


def _build_one(
    options: Config, class_num: int, world: World, seed: int
) -> tuple[Head, RowOptimizer | None]:
    head, dtype = options.head, getattr(torch, options.runtime.dtype)
    is_sharded = head.loss_type.startswith("dist_")
    if dtype is not torch.float64:
        dtype = getattr(torch, head.row_dtype)
    built = build_head(
        head.loss_type,
        class_num,
        options.model.emb_size,
        margin=margin_of(options),
        centers=head.sub_centers,
        sampling=Sampling(head.sample_ratio, head.hard_share) if is_sharded else None,
        execution=Execution(
            head_products(options), int(head.keep_mb * 2**20), head.tile, head.kernels
        ),
        row_dtype=dtype,
        initial_norm=head.initial_norm,
        offload=head.offload,
        on_nonfinite="pass",  # the loop sees it in the loss, and names the images
        seed=seed,
        group=world.head_group,
    ).to(world.device)
    return built, _row_optimizer(options, built) if isinstance(built, ShardedHead) else None


def _row_optimizer(options: Config, head: ShardedHead) -> RowOptimizer:
    """Return the optimizer of the sharded rows; `build_updates` gives it its learning rate."""
    optim = options.optim
    decay = options.head.weight_decay
    settings: dict[str, Any] = {"weight_decay": optim.weight_decay if decay is None else decay}
    if options.head.optimizer == "sgd":
        settings |= {"momentum": optim.momentum, "nesterov": optim.nesterov}
    return ROW_OPTIMIZERS[options.head.optimizer](
        head, state_dtype=options.head.state_dtype, **settings
    )
