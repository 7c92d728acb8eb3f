"""Build the heads of a run, one per dataset, with their optimizers; load the head of a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint import Manifest, ShardedTensor, load_tensors
from plsc.checkpoint.manifest import CLASS_WEIGHTS, Checker, Role
from plsc.checkpoint.weights_file import WeightsFile, rank_folder
from plsc.config import Config, Options, all_options, find_option
from plsc.config.data import HEAD_OPTIONS, DataSet, read_data_sets
from plsc.config.head import SHARDED, sample_ratios
from plsc.errors import CheckpointError, OptionError, refusing, suggest
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
from plsc.heads.joint import Heads
from plsc.heads.margins import Margin, margins_of_counts
from plsc.heads.weights import scale_bytes
from plsc.parallel.collectives import class_range
from plsc.parallel.world import World

ONLY_SHARDED = tuple(spec.path for spec in all_options() if SHARDED in spec.needs)


@dataclass(frozen=True)
class TrainingSet:
    """One of several datasets, after it was opened.

    options: options of the run with those of this dataset and its head. class_num: number of classes.
    num_samples: number of images. per_step: images per step over all ranks. seed: seed of its sample order
    and of its head.
    """

    name: str
    options: Config
    class_num: int
    num_samples: int
    per_step: int
    seed: int


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


def options_of(options: Config, dataset: DataSet) -> Config:
    """Return the options of a run, overridden by those of one of its datasets.

    A dataset with another loss than the run ignores the run's margin options except the scale. A head that
    is not sharded ignores options of sharded class weights.
    """
    loss_type = dataset.loss_type or options.head.loss_type
    name = loss_type.removeprefix("dist_")
    left_out = {"train.epoch_steps"}
    if name != options.head.loss_type.removeprefix("dist_"):
        left_out.update(("head.margin", "head.class_margins", "head.loss_arguments"))
        if "scale" not in margin_arguments(name):
            left_out.add("head.scale")
    if dataset.margin is not None:
        left_out.add("head.class_margins")
    if not loss_type.startswith("dist_"):
        left_out.update(ONLY_SHARDED)
    given = {f"head.{key}": getattr(dataset, key) for key in HEAD_OPTIONS}
    given = {path: value for path, value in given.items() if value is not None}
    values = {path: find_option(path).default for path in left_out}
    values |= {"data.datasets": (), "data.train_image_num": None, "data.dataset_dir": dataset.path}
    return replace(
        options.changed({**values, "head.class_num": None, **given}),
        origins={path: origin for path, origin in options.origins.items() if path not in left_out}
        | dict.fromkeys(given, f"dataset {dataset.name}"),
    )


def build_heads(
    options: Config, class_num: int, sets: Sequence[TrainingSet], world: World, counts: Mapping[str, Tensor]
) -> Heads:
    """Return the heads on their device, one per dataset of `sets`, and the optimizers of their rows.

    counts: images per class by head, for `head.class_margins`; empty if unknown.
    """
    named = {one.name: (one.options, one.class_num, one.seed) for one in sets}
    named = named or {"": (options, class_num, options.train.seed)}
    heads = {
        name: _build_one(name, own, classes, world, seed, counts.get(name))
        for name, (own, classes, seed) in named.items()
    }
    rows = {
        name: _row_optimizer(named[name][0], head)
        for name, head in heads.items()
        if isinstance(head, ShardedHead)
    }
    return Heads(heads, rows, world.head_group)


def _class_margins(wanted: Mapping[str, Any], counts: Tensor | None) -> Tensor:
    """Return the margins of `head.class_margins` [C]; counts: images per class [C], None if unknown."""
    if "file" in wanted:
        with (
            refusing(f"cannot read {wanted['file']}", "expected a .npy file with one margin per class"),
            Path(wanted["file"]).open("rb") as file,
        ):
            return torch.from_numpy(np.lib.format.read_array(file, allow_pickle=False))
    if counts is None:
        raise OptionError(
            "head.class_margins has a, but the images per class of a generator reader are unknown; set file"
        )
    return margins_of_counts(counts, **wanted)


def _build_one(
    name: str, options: Config, class_num: int, world: World, seed: int, counts: Tensor | None
) -> Head:
    head, dtype = options.head, getattr(torch, options.runtime.dtype)
    margin = margin_of(options)
    if head.class_margins is not None:
        margin.set_class_margins(_class_margins(head.class_margins, counts), counts)
    file = None
    if head.weights_file is not None:
        classes = range(*class_range(class_num, world.rank, world.size))
        folder = rank_folder(head.weights_file, name, world.rank)
        file = WeightsFile(folder, classes, options.model.emb_size, seed)
    if dtype is not torch.float64:
        dtype = getattr(torch, head.row_dtype)
    return build_head(
        head.loss_type,
        class_num,
        options.model.emb_size,
        margin=margin,
        centers=head.sub_centers,
        sampling=sampling_of(options),
        execution=Execution(head_products(options), int(head.keep_mb * 2**20), kernels=head.kernels),
        row_dtype=dtype,
        offload=head.offload,
        file=file,
        on_nonfinite="pass",  # the training loop checks the loss, and names the images
        seed=seed,
        group=world.head_group,
    ).to(world.device)


def choose_head(path: Path, manifest: Manifest, name: str | None) -> str:
    """Return the name of the head to use, `name` or that of the only one; '' if the only one has no name.

    Raises CheckpointError, which lists the heads, if there is no such head or no single one.
    """
    roles = [info.role for info in manifest.tensors.values()]
    known = sorted(role.of for role in roles if (role.kind, role.name) == (CLASS_WEIGHTS, "weight"))
    if name is None and len(known) == 1:
        return known[0]
    if name and name in known:
        return name
    if not known:
        problem = (
            "no class weights; choose the checkpoint of a training run, or, if they are in "
            "head.weights_file, the result of `plsc checkpoint copy`"
        )
    elif known == [""]:
        problem = "a single head, which has no name; remove head"
    elif name is None:
        problem = f"several heads; set head to one of: {', '.join(known)}"
    else:
        problem = f"no head {name!r}; {suggest(name, known)}"
    raise CheckpointError(f"{path} has {problem}")


def load_head(path: Path, manifest: Manifest, world: World, name: str = "") -> Head:
    """Return a head of a checkpoint for `Head.topk`, sharded over any number of ranks; a collective.

    It has the class weights, loss type, margin and scale of the checkpoint, but no optimizer. name: from
    `choose_head`. Raises CheckpointError if it is damaged.
    """
    check = Checker(str(path))
    weight = manifest.tensors.get(Role(CLASS_WEIGHTS, "weight", name).key)
    if weight is None or len(weight.shape) not in (2, 3):
        raise check.wrong("its class weights are damaged")
    wanted = Options()
    wanted.set("head.class_margins", None)  # only for training; may name a file
    options = wanted.resolve({"head": manifest.options.get("head")})  # other options may name code
    if name:
        data = check.mapping(manifest.options.get("data"), "the data options")
        saved = read_data_sets(find_option("data.datasets").saved(data.get("datasets")))
        options = next((options_of(options, one) for one in saved if one.name == name), options)
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
        Role(CLASS_WEIGHTS, part, name): ShardedTensor(parameter.detach(), class_num, head.class_range[0])
        for part, parameter in head.named_parameters()
    }
    load_tensors(path, tensors, world)
    return head


def head_products(options: Config) -> str:
    """Return the data type of the inputs of matrix products in sharded heads: 'float32' or 'bfloat16'."""
    products = options.head.products
    if products != "auto":
        return products
    return "float32" if options.precision.mode == "float32" else "bfloat16"


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
