"""Build the head of a run and the optimizer of its rows; load the head of a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint import Manifest, ShardedTensor, load_tensors
from plsc.checkpoint.load import missing_weights
from plsc.checkpoint.manifest import CLASS_WEIGHTS, Role
from plsc.checkpoint.weights_file import WeightsFile, rank_folder
from plsc.config import Config, Options
from plsc.config.head import ExecutionArguments, sample_ratios
from plsc.config.option import read_arguments
from plsc.errors import CheckpointError, OptionError, refusing
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
from plsc.heads.margins import Margin, margins_of_counts
from plsc.heads.weights import scale_bytes
from plsc.parallel.collectives import class_range
from plsc.parallel.world import World
from plsc.storage.regular import open_regular


def margin_arguments(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a margin's constructor."""
    return inspect.signature(MARGINS[name].__init__).parameters


def margin_of(options: Config) -> Margin:
    """Return the margin of the loss type. Raises OptionError for a set option that the loss does not use."""
    head = options.head
    name = head.loss_type.removeprefix("dist_")
    has = margin_arguments(name)
    if head.class_margins is not None and "margin" not in has:
        raise OptionError(f"head.class_margins is set, but {name} has no single margin; use another loss")
    if head.class_margins is not None and "head.margin" in options.explicit:
        raise OptionError("head.margin and head.class_margins are both set; remove one of them")
    given = dict(head.loss_arguments or {})
    if "head.scale" in options.explicit or "scale" in has:
        given["scale"] = head.scale  # its default here differs from that of the margin classes
    if head.margin is not None and ("head.margin" in options.explicit or "margin" in has):
        given["margin"] = head.margin
    try:
        return build_margin(name, **given)
    except OptionError as error:
        chosen = [
            path for path in ("head.loss_arguments", "head.margin", "head.scale") if path in options.explicit
        ]
        raise OptionError(
            f"{error} (set: {', '.join(['head.loss_type ' + head.loss_type, *chosen])})"
        ) from error


def sampling_of(options: Config) -> Sampling | None:
    """Return how classes are sampled in each step; None for a head that is not sharded."""
    head = options.head
    if not head.loss_type.startswith("dist_"):
        return None
    ratios = sample_ratios(head.sample_ratio)
    return Sampling(ratios, head.hard_share, in_pages=head.weights_file is not None)


def with_margin(options: Config) -> Config:
    """Return the configuration with the default margin of the loss if none is set."""
    margin = margin_arguments(options.head.loss_type.removeprefix("dist_")).get("margin")
    if options.head.margin is not None or margin is None:
        return options
    return options.changed({"head.margin": margin.default})


def _class_margins(wanted: Mapping[str, Any], counts: Tensor | None) -> Tensor:
    """Return the margins of `head.class_margins` [C]; counts: images per class [C], None if unknown."""
    if "file" in wanted:
        with (
            refusing(f"cannot read {wanted['file']}", "expected a .npy file with one margin per class"),
            open_regular(wanted["file"]) as file,
        ):
            return torch.from_numpy(np.lib.format.read_array(file, allow_pickle=False))
    if counts is None:
        raise OptionError(
            "head.class_margins has a, but the images per class of a generator reader are unknown; set file"
        )
    return margins_of_counts(counts, **wanted)


def build_trained_head(
    options: Config, class_num: int, world: World, counts: Tensor | None = None
) -> tuple[Head, RowOptimizer | None]:
    """Return the head on its device, and the optimizer of its class weights if they are sharded.

    counts: images per class, int64 [C], for `head.class_margins`; None if unknown.
    """
    head = options.head
    margin = margin_of(options)
    if head.class_margins is not None:
        margin.set_class_margins(_class_margins(head.class_margins, counts), counts)
    file = None
    if head.weights_file is not None:
        classes = range(*class_range(class_num, world.rank, world.size))
        folder = rank_folder(head.weights_file, world.rank)
        file = WeightsFile(folder, classes, options.model.emb_size, options.train.seed)
    built = build_head(
        head.loss_type,
        class_num,
        options.model.emb_size,
        margin=margin,
        centers=head.sub_centers,
        sampling=sampling_of(options),
        execution=execution_of(options),
        row_dtype=getattr(torch, head.row_dtype),
        offload=head.offload,
        file=file,
        on_nonfinite="pass",  # the training loop checks the loss, and names the images
        seed=options.train.seed,
        group=world.head_group,
    ).to(world.device)
    return built, _row_optimizer(options, built) if isinstance(built, ShardedHead) else None


def load_head(path: Path, manifest: Manifest, world: World) -> Head:
    """Return the head of a checkpoint for `Head.topk`, sharded over any number of ranks; a collective.

    It has the class weights, loss type, margin and scale of the checkpoint, but no optimizer. Raises
    CheckpointError if it is damaged, or if there are no class weights or several heads.
    """
    weight = manifest.tensors.get(Role(CLASS_WEIGHTS, "weight").key)
    if weight is None:
        raise missing_weights(path, manifest)
    if len(weight.shape) not in (2, 3):
        raise CheckpointError(f"{path}: its class weights are damaged")
    wanted = Options()
    wanted.set("head.class_margins", None)  # only for training; may name a file
    options = wanted.resolve({"head": manifest.options.get("head")})  # other options may name code
    class_num, *centers, emb_size = weight.shape
    head = build_head(
        f"dist_{options.head.loss_type.removeprefix('dist_')}",
        class_num,
        emb_size - scale_bytes(weight.dtype),
        margin=margin_of(options),
        centers=centers[0] if centers else 1,
        row_dtype=weight.dtype,
        group=world.head_group,
    ).to(world.device)
    tensors = {
        Role(CLASS_WEIGHTS, part): ShardedTensor(parameter.detach(), class_num, head.class_range[0])
        for part, parameter in head.named_parameters()
    }
    load_tensors(path, tensors, world)
    return head


def execution_of(options: Config) -> Execution:
    """Return how a sharded head computes."""
    own = read_arguments(ExecutionArguments, options.head.execution, "head.execution")
    by_mode = "float32" if options.precision.mode == "float32" else "bfloat16"
    products = by_mode if own.products == "auto" else own.products
    return Execution(products, int(own.keep_mb * 2**20), kernels=own.kernels)


def _row_optimizer(options: Config, head: ShardedHead) -> RowOptimizer:
    """Return the optimizer of sharded class weights; `build_updates` sets its learning rate."""
    optim = options.optim
    decay = options.head.weight_decay
    settings: dict[str, Any] = {"weight_decay": optim.weight_decay if decay is None else decay}
    if options.head.optimizer == "sgd":
        nesterov = optim.optimizer.lower() == "sgd" and (optim.optimizer_arguments or {}).get(
            "nesterov", False
        )
        settings |= {"momentum": optim.momentum, "nesterov": nesterov}
    return ROW_OPTIMIZERS[options.head.optimizer](head, state_dtype=options.head.state_dtype, **settings)
