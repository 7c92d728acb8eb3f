"""Options of what is trained: the network and its classification head, and the data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plsc.config.option import (
    WRONG,
    Need,
    Size,
    arguments_of,
    at_least,
    between,
    convert,
    declare,
    described_fields,
    more_than,
    names_code,
    need,
    not_empty,
    of_model,
    of_run,
    one_of,
    with_arguments,
)
from plsc.errors import suggest
from plsc.names import DEFAULT_NECK, LOSS_TYPES, MARGINS, NETWORKS, NO_MARGIN


def _image_shape(shape: tuple[int, ...]) -> str | None:
    good = len(shape) == 3 and shape[0] in (1, 3) and min(shape) >= 1
    return None if good else "(channels, height, width) with 1 or 3 channels, such as (3, 112, 112)"


def check_network(name: str) -> str | None:
    """Return None for a known network, one of a library or a custom one, else what was expected."""
    if name in NETWORKS or names_code(name) or name.startswith(("torchvision/", "timm/")):
        return None
    others = "'torchvision/NAME', 'timm/NAME', your own 'package.module:Class'"
    return f"{others}, or a name; {suggest(name, NETWORKS)}"


_NECK = re.compile(r"(norm-)?(dropout-)?linear(-norm)?")


def check_neck(parts: str) -> str | None:
    """Return None for a valid neck, else a description of valid ones."""
    if _NECK.fullmatch(parts):
        return None
    return (
        "'linear', optionally with 'norm-', 'dropout-' or 'norm-dropout-' before it and '-norm' after it, "
        "such as 'dropout-linear'"
    )


@dataclass(frozen=True)
class ModelOptions:
    """Backbone network."""

    name: str = of_model(
        "ResNet50",
        f"network: {', '.join(NETWORKS)}, 'torchvision/NAME', 'timm/NAME', or 'package.module:Class' (a "
        "subclass of BaseModel)",
        "set_model_name(model_name)",
        check_network,
    )
    emb_size: int = of_model(512, "size of the embedding", "set_emb_size(size)", at_least(1))
    image_shape: tuple[int, int, int] = of_model(
        (3, 112, 112),
        "channels, height and width of the input; on the command line 3,112,112",
        "set_image_shape(shape)",
        _image_shape,
    )
    dropout: float = of_model(
        0.4, "dropout probability before the embedding layer", "set_dropout(ratio)", between(0, 0.99)
    )
    neck: str = of_model(
        DEFAULT_NECK,
        "layers between features and embedding, joined by '-': norm (batch norm), dropout, linear",
        "set_neck(parts)",
        check_neck,
    )
    sync_batch_norm: bool = of_run(
        False, "use batch-norm statistics of the global batch", "set_sync_batch_norm(sync)"
    )
    pretrained: str | None = declare(
        None,
        "initial weights: a checkpoint, a .safetensors file, or a state dict of torch.save",
        "set_pretrained(path)",
        not_empty,
    )


def _scale(value: float | str) -> str | None:
    is_number = not isinstance(value, str) and value > 0
    return None if is_number or value == "auto" else "a number greater than 0, or 'auto'"


def _loss_arguments(values: dict[str, Any]) -> str | None:
    own = next((name for name in ("margin", "scale") if name in values), None)
    return f"other arguments than {own}, which is head.{own}" if own else None


def _class_margins(values: dict[str, Any]) -> str | None:
    if values.keys() == {"file"} and isinstance(values["file"], str):
        return None
    is_formula = "a" in values and values.keys() <= {"a", "b"}
    is_formula = is_formula and all(
        isinstance(one, (int, float)) and abs(one) < 1e6 for one in values.values()
    )
    return None if is_formula and values["a"] >= 0 else "a number a of at least 0 and perhaps b, or file"


def sample_ratios(value: float | dict[str, Any]) -> dict[int, float]:
    """Return the sample ratios by the step from which each is used; of a number, from step 0."""
    return {int(step): ratio for step, ratio in value.items()} if isinstance(value, dict) else {0: value}


def _ratio(value: float | dict[str, Any]) -> str | None:
    try:
        ratios = sample_ratios(value)
        is_valid = min(ratios) == 0 and all(0 < ratio <= 1 for ratio in ratios.values())
    except (TypeError, ValueError):  # not numbers, or none
        is_valid = False
    expected = "a number greater than 0 and at most 1, or such numbers by their first step, from 0 on: "
    return None if is_valid else expected + "{0: 1.0, 2000: 0.1}"


SHARDED = Need(
    "head.loss_type",
    "class weights are sharded (a loss dist_...)",
    lambda config: config.head.loss_type.startswith("dist_"),
    is_strict=True,
)
_SAMPLED = Need(
    "head.sample_ratio",
    "head.sample_ratio is below 1",
    lambda config: min(sample_ratios(config.head.sample_ratio).values()) < 1,
    is_strict=True,
)
_ALWAYS_SAMPLED = Need(
    "head.sample_ratio",
    "head.sample_ratio is always below 1",
    lambda config: max(sample_ratios(config.head.sample_ratio).values()) < 1,
    is_strict=True,
)
_LOCAL = Need(
    "checkpoint.save_dir",
    "checkpoints are not uploaded: they lack the class weights (plsc checkpoint copy adds them)",
    lambda config: config.checkpoint.upload_dir is None and "://" not in config.checkpoint.save_dir,
    is_strict=True,
)
_WITH_MARGIN = Need(
    "head.loss_type",
    "the loss has a margin",
    lambda config: config.head.loss_type.removeprefix("dist_") not in NO_MARGIN,
)


@dataclass(frozen=True)
class ExecutionArguments:
    """How the head computes; changes results only by rounding."""

    products: str = declare(
        "auto", "of float32 or bfloat16; auto: by precision.mode", check=one_of("auto", "float32", "bfloat16")
    )
    keep_mb: float = declare(0.0, "MiB per rank to cache softmax terms", check=between(0, 2**40))
    kernels: str = declare(
        "auto", "torch, native (C) or triton", check=one_of("auto", "torch", "native", "triton")
    )


@dataclass(frozen=True)
class HeadOptions:
    """The classification head."""

    loss_type: str = of_run(
        "dist_arcface",
        f"loss: {', '.join(MARGINS)}; with the prefix dist_, class weights are sharded, else replicated",
        "set_loss_type(loss_type, **loss_arguments)",
        one_of(*LOSS_TYPES),
    )
    loss_arguments: dict[str, Any] | None = of_run(  # noqa: RUF009
        None,
        "other arguments of the loss than margin and scale, such as {h: 0.3} of adaface; see docs/options.md",
        "set_loss_type(**loss_arguments)",
        _loss_arguments,
    )
    # None: `settle` in plsc/train/run.py decides.
    margin: float | None = of_run(
        None,
        "margin: an angle in radians; cosface: a cosine; sphereface: a factor of the angle; None: the "
        "paper's value, 0.5 for arcface",
        "set_margin(margin)",
        at_least(0),
    )
    class_margins: dict[str, Any] | None = of_run(  # noqa: RUF009
        None,
        "margins per class instead of head.margin, of any loss with that argument: {a: 0.5, b: 0.05} for "
        "a n^(-1/4) + b, n images of the class (LDAM); or {file: m.npy}, one margin per class",
        "set_class_margins(**class_margins)",
        _class_margins,
    )
    # None: `count_classes` in plsc/train/data.py decides.
    class_num: int | None = of_run(
        None, "number of classes; None: largest label + 1", "set_class_num(num)", at_least(1)
    )
    margin_warmup_steps: int = of_run(
        0,
        "steps of linear increase of the margin",
        "set_margin_warmup_steps(num)",
        at_least(0),
        needs=_WITH_MARGIN,
    )
    # auto: `Margin.set_class_num` in plsc/heads/margins.py decides.
    scale: float | str = of_run(
        "auto",
        "factor of the cosines; auto: sqrt(2) ln(C - 1) for C classes (AdaCos), 64 from 10,000 classes on",
        "set_scale(scale)",
        _scale,
    )
    sub_centers: int = of_run(
        1, "weight vectors per class (sub-centre ArcFace)", "set_sub_centers(num)", between(1, 64)
    )
    sample_ratio: float | dict[str, Any] = of_run(  # noqa: RUF009
        1.0,
        "share of each rank's classes per step, including those of the batch (PartialFC); or shares by their "
        "first step, such as {0: 1.0, 2000: 0.1}",
        "set_sample_ratio(sample_ratio)",
        _ratio,
        needs=SHARDED,
    )
    hard_share: float = of_run(
        0.0,
        "largest share of the sampled classes that are hard negatives (known to be near those of the batch)",
        "set_hard_share(share)",
        between(0, 0.99),
        needs=(SHARDED, _SAMPLED),
    )
    optimizer: str = of_run(
        "sgd",
        "optimizer of class weights: sgd (with optim.momentum), adamw, or adagrad (row-wise)",
        "set_head_optimizer(name)",
        one_of("sgd", "adamw", "adagrad"),
        needs=SHARDED,
    )
    lr_factor: float = of_run(
        1.0,
        "learning rate of class weights, relative to the backbone's",
        "set_head_lr_factor(factor)",
        more_than(0),
    )
    weight_decay: float | None = of_run(
        None,
        "weight decay (L2) of class weights; None: optim.weight_decay",
        "set_head_weight_decay(decay)",
        at_least(0),
    )
    row_dtype: str = of_run(
        "float32",
        "dtype of class weights: float32; with stochastic rounding bfloat16, or int8 with a scale per class",
        "set_row_dtype(dtype)",
        one_of("float32", "bfloat16", "int8"),
        needs=SHARDED,
    )
    state_dtype: str = of_run(
        "float32",
        "dtype of the optimizer state of class weights: float32 or bfloat16",
        "set_row_state_dtype(dtype)",
        one_of("float32", "bfloat16"),
        needs=SHARDED,
    )
    offload: bool = of_run(
        False,
        "keep class weights and their optimizer state in CPU memory",
        "set_head_offload(offload)",
        needs=SHARDED,
    )
    weights_file: str | None = declare(
        None,
        "folder on a local disk: keep class weights and their optimizer state in a file per rank, of which a "
        "step reads and writes only what it uses",
        "set_weights_file(folder)",
        not_empty,
        needs=(
            SHARDED,
            _ALWAYS_SAMPLED,
            need("head.row_dtype", "int8", is_strict=True),
            need("head.hard_share", 0, is_strict=True),
            need("head.sub_centers", 1, is_strict=True),
            _LOCAL,
        ),
    )
    execution: dict[str, Any] | None = of_run(  # noqa: RUF009
        None,
        f"how the head computes: {described_fields(ExecutionArguments)}",
        "set_head_execution(**execution)",
        arguments_of(ExecutionArguments, "head.execution"),
        needs=SHARDED,
    )


@dataclass(frozen=True)
class OrderArguments:
    """Arguments of the orders of samples."""

    balance: float = declare(
        0.5,
        "balanced: share of a class of n images in an epoch, in proportion to n^balance; 0: equal; 1: as in "
        "the data",
        check=between(0, 1),
    )
    images_per_class: int = declare(4, "classes: images of each class in a global batch", check=at_least(1))
    block_samples: int = declare(1024, "block: neighbouring samples per block", check=at_least(1))
    pool_samples: int = declare(65536, "block: samples that are shuffled together", check=at_least(1))


ORDER_ARGUMENTS = {
    "balanced": ("balance",),
    "classes": ("images_per_class",),
    "block": ("block_samples", "pool_samples"),
}
"""The arguments of each order of samples."""


@dataclass(frozen=True)
class FormatArguments:
    """How a dataset is read, where its format leaves it open; None: detected."""

    image_column: str | None = declare(
        None, "column (tar: file suffix) of the images; None: detected by name", check=not_empty
    )
    label_column: str | None = declare(
        None, "column (tar: file suffix) of the labels; None: detected by name", check=not_empty
    )
    label_map: str | None = declare(
        None,
        "file of class names and ids: .json, or lines of name, tab, id; None: sorted names",
        check=not_empty,
    )
    image_folder: str | None = declare(
        None,
        "folder or URL of the paths in a list; None: that of the file",
        check=not_empty,
    )
    allowed: str | tuple[str, ...] = declare((), "prefixes of URLs that lists may name: s3://bucket/")


def cache_place(text: str) -> tuple[str, int] | None:
    """Return ``memory`` or a folder, and bytes, of a `data.cache` such as ``memory:4G``; else None."""
    place, _, size = text.rpartition(":")
    count = convert(size, Size)
    return (place, count) if place.strip() and count is not WRONG and count > 0 else None


@dataclass(frozen=True)
class DataOptions:
    """Training data and its loading."""

    dataset_dir: str = declare(
        "./train_data",
        "training data: a path or fsspec URL (formats: docs/data.md)",
        "set_dataset_dir(directory, **format_arguments)",
        not_empty,
    )
    format_arguments: dict[str, Any] | None = declare(
        None,
        f"how the dataset is read: {described_fields(FormatArguments)}",
        "set_dataset_dir(**format_arguments)",
        arguments_of(FormatArguments, "data.format_arguments"),
    )
    train_image_num: int | None = of_run(
        None, "images per epoch of a reader, if known", "set_train_image_num(num)", at_least(1)
    )
    val_targets: str | None = declare(
        None,
        "pair files in the dataset folder, without .bin, or text lists such as pairs.txt, separated by "
        "commas; None: 'lfw' if lfw.bin exists",
        "set_val_targets(targets)",
    )
    val_dir: str | None = declare(
        None,
        "dataset of held-out images of the same classes, to measure top-1 and top-5 accuracy",
        "set_val_dir(directory)",
        not_empty,
    )
    num_workers: int = declare(
        2,
        "threads per rank (processes for a Dataset or transform of yours) that load images; 0: load between "
        "steps",
        "set_num_workers(num)",
        between(0, 1024),
    )
    order: str | dict[str, Any] = of_run(  # noqa: RUF009
        "global",
        "order of the samples: global (all shuffled), block (blocks of neighbours shuffled), "
        "sequential, balanced (small classes "
        "more often), or classes (images_per_class images of each class in a batch); or a mapping with name "
        f"and arguments: {described_fields(OrderArguments)}",
        "set_order(order, **arguments)",
        with_arguments(
            one_of("global", "block", "sequential", "balanced", "classes"),
            OrderArguments,
            ORDER_ARGUMENTS,
        ),
    )
    cache: str = declare(
        "none",
        "where samples are kept after the first epoch, and how many bytes per rank: none, memory:4G, or a "
        "folder, such as /scratch:40G",
        "set_cache(where)",
        lambda text: None if text == "none" or cache_place(text) else "none, memory:SIZE or FOLDER:SIZE",
    )
    last_batch: str = of_run(
        "pad",
        "incomplete last batch of an epoch: pad (with the epoch's first samples), keep or drop",
        "set_last_batch(policy)",
        one_of("pad", "keep", "drop"),
    )
    bad_images: str = of_run(
        "stop",
        "what to do with an unusable sample: stop, or skip it",
        "set_bad_images(policy)",
        one_of("stop", "skip"),
    )
    flip: bool = of_model(
        True,
        "flip training images with probability 0.5; in evaluation, add the flipped image's embedding",
        "set_flip(flip)",
    )
    landmarks: str | None = declare(
        None,
        "file in the dataset folder with five landmarks per image, to align faces "
        "(docs/evaluate.md#align-faces)",
        "set_landmarks(path)",
        not_empty,
    )

    @property
    def allowed(self) -> str | Sequence[str]:
        """Prefixes of URLs that lists may name."""
        return (self.format_arguments or {}).get("allowed", ())
