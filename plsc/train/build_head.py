"""Options in, the head and the optimizer of its rows out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
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
from plsc.train.training_set import TrainingSet

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
    """Return the head, or one of the heads of several data sets, and the optimizer of the sharded rows."""
    if not sets:
        head = build_head_of(options, class_num, world)
        return head, build_row_optimizer(options, head) if isinstance(head, ShardedHead) else None
    heads, rows = {}, {}
    for one in sets:
        built = build_head_of(one.options, one.class_num, world, one.seed)
        heads[one.name] = built
        if isinstance(built, ShardedHead):
            rows[one.name] = build_row_optimizer(one.options, built)
    return JointHead(heads, world.head_group), JointRows(rows) if rows else None


def build_head_of(options: Config, class_num: int, world: World, seed: int | None = None) -> Head:
    """Return the head on its device; seed: of its rows, by default the run's."""
    head, dtype = options.head, getattr(torch, options.runtime.dtype)
    margin = margin_of(options)
    is_sharded = head.loss_type.startswith("dist_")
    if dtype is not torch.float64:
        dtype = getattr(torch, head.row_dtype)
    built = build_head(
        head.loss_type,
        class_num,
        options.model.emb_size,
        margin=margin,
        centers=head.sub_centers,
        sampling=Sampling(head.sample_ratio, head.hard_share) if is_sharded else None,
        execution=Execution(
            head_products(options), int(head.keep_mb * 2**20), head.tile, head.kernels
        ),
        row_dtype=dtype,
        initial_norm=head.initial_norm,
        offload=head.offload,
        on_nonfinite="pass",  # the loop sees it in the loss, and names the images
        seed=options.train.seed if seed is None else seed,
        group=world.head_group,
    )
    return built.to(world.device)


def build_row_optimizer(options: Config, head: ShardedHead) -> RowOptimizer:
    """Return the optimizer of the sharded rows; `build_updates` gives it its learning rate."""
    optim = options.optim
    decay = options.head.weight_decay
    settings: dict[str, Any] = {"weight_decay": optim.weight_decay if decay is None else decay}
    if options.head.optimizer == "sgd":
        settings |= {"momentum": optim.momentum, "nesterov": optim.nesterov}
    return ROW_OPTIMIZERS[options.head.optimizer](
        head, state_dtype=options.head.state_dtype, **settings
    )
