"""The arguments of `plsc plan`, which are those of `plsc.plan.plan`, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plsc.errors import OptionError
from plsc.option import is_finite_number, shown_value

_MOST = (
    10**15
)  # of anything that is counted: beyond any run, and still a size that torch can represent
_MOST_RANKS = 10**6


@dataclass(frozen=True)
class Argument:
    """An argument of `plan`, as a flag of the command line. option: a run's option of the same meaning."""

    name: str
    kind: Any
    default: Any
    meaning: str
    option: str | None = None


_ImageShape = int | tuple[int, ...]
# fmt: off
ARGUMENTS = (
    Argument("classes", float, None, "number of classes of the head, over all ranks; 1e8 is fine",
             "head.class_num"),
    Argument("ranks", int, 1, "number of ranks"),
    Argument("embedding", int, 512, "embedding size", "model.emb_size"),
    Argument("batch", int, 128, "batch size per rank", "train.batch_size"),
    Argument("ratio", float, 1.0, "share of a rank's classes that take part in a step, in (0, 1]",
             "head.sample_ratio"),
    Argument("rows", str, "float32", "type of the class weights: float32 or bfloat16", "head.row_dtype"),
    Argument("optimizer", str, "sgd", "of the class weights: sgd (with momentum), adamw or adagrad",
             "head.optimizer"),
    Argument("state", str, "float32", "type of its state: float32, bfloat16, or int8 (sgd only)",
             "head.state_dtype"),
    Argument("centers", int, 1, "rows per class (sub-centres)", "head.sub_centers"),
    Argument("offload", bool, False, "class weights and states are kept in CPU memory", "head.offload"),
    Argument("keep_bytes", float, 0,
             "bytes in which the first pass may keep terms for the second (head.keep_mb is in MiB)"),
    Argument("embedding_dtype", str, "float32", "type of the network's output: float32 or bfloat16"),
    Argument("model", str, None, "name of the backbone; without it, the head alone is planned", "model.name"),
    Argument("image", _ImageShape, (3, 112, 112),
             "image size: channels, height, width, or one side of an RGB image", "model.image_shape"),
    Argument("precision", str, "float32", "of the backbone: float32, bfloat16 or float16", "precision.mode"),
    Argument("checkpoint", str, "none",
             "parts of the backbone that are computed again in the backward pass: none, all, or patterns",
             "memory.checkpoint_stages"),
    Argument("checkpoint_every", int, 1, "of those, each nth alone", "memory.checkpoint_every"),
    Argument("micro_batches", int, 1, "parts of a rank's batch that are computed one after another",
             "train.micro_batches"),
    Argument("backbone_optimizer", str, "sgd", "optimizer of the backbone", "optim.optimizer"),
    Argument("backbone_shards", int, 1,
             "ranks over which parameters, gradients and states of the backbone are divided (FSDP)"),
)
# fmt: on
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "a string"),
    bool: ((bool,), "True or False"),
    float: ((int, float), "a number"),
    _ImageShape: ((int, list, tuple), "three sizes, or one side of an RGB image"),
}


def check_kinds(given: Mapping[str, Any]) -> None:
    """Raise OptionError for an argument that is of another kind than `ARGUMENTS` says.

    Integers, and ranges, are checked where they are used.
    """
    for argument in ARGUMENTS:
        value = given.get(argument.name, argument.default)
        types, expected = _KINDS.get(argument.kind, ((object,), ""))
        is_unset = value is None and argument.default is None
        if not is_unset and not isinstance(value, types):
            raise OptionError(f"{argument.name} is {shown_value(value)}; expected {expected}")


def whole(name: str, value: float, low: int) -> int:
    """Return an integer that may be a float such as 1e8 as an int; OptionError if it is not one."""
    high = _MOST_RANKS if name == "ranks" else _MOST
    if not is_finite_number(value) or value != int(value) or not low <= value <= high:
        raise OptionError(
            f"{name} is {shown_value(value)}; expected an integer, {low} or more, up to {high:.0e}"
        )
    return int(value)


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    """Return the value if it is a known one; OptionError if not."""
    if value not in known:
        raise OptionError(f"{name} is {shown_value(value)}; expected one of {', '.join(known)}")
    return value


def batch_sizes(batch: int | Sequence[int], ranks: int) -> list[int]:
    """Return each rank's batch size, from one number for all or from one for each."""
    if not isinstance(batch, Sequence):
        return [whole("batch", batch, 1)] * ranks
    sizes = [whole("batch", size, 0) for size in batch]
    if len(sizes) != ranks or sum(sizes) == 0:
        raise OptionError(
            f"batch is {list(batch)}; expected one size per rank (ranks: {ranks:,}), not all 0"
        )
    return sizes
