"""The arguments of `plsc plan`, which are those of `plsc.plan.plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Argument:
    """An argument of `plan`, as a flag of the command line. option: the same one of a run, another name."""

    name: str
    kind: Any
    default: Any
    meaning: str
    option: str | None = None


_HEAD = (
    Argument(
        "classes",
        float,
        None,
        "number of classes, all ranks together, for the head; 1e8 is fine",
        "head.class_num",
    ),
    Argument("ranks", int, 1, "number of ranks"),
    Argument("embedding", int, 512, "embedding size", "model.emb_size"),
    Argument("batch", int, 128, "samples a rank", "train.batch_size"),
    Argument(
        "ratio",
        float,
        1.0,
        "share of a rank's classes that take part in a step, in (0, 1]",
        "head.sample_ratio",
    ),
    Argument(
        "rows", str, "float32", "type of the class rows: float32 or bfloat16", "head.row_dtype"
    ),
    Argument(
        "optimizer",
        str,
        "sgd",
        "of the class rows: sgd (with momentum), adamw or adagrad",
        "head.optimizer",
    ),
    Argument(
        "state",
        str,
        "float32",
        "type of its state: float32, bfloat16, or int8 (sgd only)",
        "head.state_dtype",
    ),
    Argument("centers", int, 1, "rows a class (sub-centres)", "head.sub_centers"),
    Argument("offload", bool, False, "rows and states stay in CPU memory", "head.offload"),
    Argument(
        "keep_bytes",
        float,
        0,
        "bytes in which the first pass may leave terms for the second (head.keep_mb is in MiB)",
    ),
    Argument("embedding_dtype", str, "float32", "type the network gives: float32 or bfloat16"),
)
_BACKBONE = (
    Argument("model", str, None, "name of the backbone, which is counted, too", "model.name"),
    Argument(
        "image",
        int | tuple[int, ...],
        (3, 112, 112),
        "image size: channels, height, width, or one side of an RGB image",
        "model.image_shape",
    ),
    Argument(
        "precision",
        str,
        "float32",
        "of the backbone: float32, bfloat16 or float16",
        "precision.mode",
    ),
    Argument(
        "checkpoint",
        str,
        "none",
        "parts of the backbone that are computed again in the backward pass: none, all, or patterns",
        "memory.checkpoint_stages",
    ),
    Argument("checkpoint_every", int, 1, "of those, each nth alone", "memory.checkpoint_every"),
    Argument(
        "micro_batches",
        int,
        1,
        "parts of a rank's batch that are computed one after another",
        "train.micro_batches",
    ),
    Argument("backbone_optimizer", str, "sgd", "optimizer of the backbone", "optim.optimizer"),
    Argument(
        "backbone_shards",
        int,
        1,
        "ranks over which parameters, gradients and states of the backbone are divided (FSDP)",
    ),
)
ARGUMENTS = (*_HEAD, *_BACKBONE)
