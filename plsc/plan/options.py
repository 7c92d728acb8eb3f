"""The options of `plsc plan`, once: name, type, default, meaning and check."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

from plsc.config import find_option
from plsc.config.option import Check, between, declare, one_of, specs_of
from plsc.errors import OptionError

_MOST = 10**15  # of anything that is counted: beyond any run, and still a size that torch can represent
MODES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short names of `precision`."""


def _whole(low: int) -> Check:
    """The number, which may be a float such as 1e8, is an integer of `low` or more."""
    expected = f"an integer, {low} or more, up to {_MOST:.0e}"
    return lambda value: None if value == int(value) and low <= value <= _MOST else expected


def _batch(value: float | tuple[float, ...]) -> str | None:
    if not isinstance(value, tuple):
        return _whole(1)(value)
    is_sound = sum(value) > 0 and not any(map(_whole(0), value))
    return None if is_sound else "sizes of the ranks, not all 0"


def _as(path: str, default: Any = MISSING, **changes: Any) -> Any:
    """Declare what a run has, too, as the option at `path`; the flag has both names."""
    spec = find_option(path)
    details = {"meaning": spec.meaning, "setter": "", "check": spec.check, "option": path}
    default = spec.default if default is MISSING else default
    return field(default=default, metadata={**details, **changes})


@dataclass
class PlanOptions:
    """What is planned: the head if `classes` is given, the backbone if `model` is; else OptionError."""

    classes: float | None = _as(
        "head.class_num", None, meaning="number of classes of the head, over all ranks; 1e8 is fine",
        check=_whole(1),
    )  # fmt: skip
    ranks: int = declare(1, "number of ranks", check=between(1, 10**6))
    embedding: int = _as("model.emb_size", check=between(1, _MOST))
    batch: float | tuple[float, ...] = _as("train.batch_size", meaning="batch size per rank", check=_batch)
    # Of the head:
    ratio: float = _as("head.sample_ratio")
    rows: str = _as("head.row_dtype")
    optimizer: str = _as("head.optimizer")
    state: str = _as("head.state_dtype")
    centers: int = _as("head.sub_centers")
    offload: bool = _as("head.offload")
    keep_bytes: float = declare(
        0, "bytes in which the first pass may keep terms for the second (head.keep_mb is in MiB)",
        check=_whole(0),
    )  # fmt: skip
    embedding_dtype: str = declare(
        "float32", "type of the network's output: float32 or bfloat16",
        check=one_of("float32", "bfloat16"),
    )  # fmt: skip
    # Of the backbone:
    model: str | None = _as("model.name", None)
    image: int | tuple[int, ...] = _as(
        "model.image_shape", check=None,
        meaning="image size: channels, height, width, or one side of an RGB image",
    )  # fmt: skip
    precision: str = _as("precision.mode", check=one_of(*MODES.values(), *MODES))
    checkpoint: str = _as("memory.checkpoint_stages")
    checkpoint_every: int = _as("memory.checkpoint_every")
    micro_batches: int = _as("train.micro_batches")
    backbone_optimizer: str = _as("optim.optimizer")
    backbone_shards: int = declare(
        1, "ranks over which parameters, gradients and states of the backbone are divided (FSDP)",
        check=between(1, 10**6),
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, spec in specs_of("", PlanOptions).items():
            setattr(self, name, spec.checked(getattr(self, name)))
        if self.classes is None and self.model is None:
            raise OptionError("nothing to plan; give classes for the head, model for the backbone, or both")
        for needed, what, names in (
            ("classes", "head", _OF_HEAD),
            ("model", "backbone", _OF_BACKBONE),
        ):
            given = [name for name in names if getattr(self, name) != getattr(PlanOptions, name)]
            if given and getattr(self, needed) is None:
                raise OptionError(f"{given[0]} is about the {what}, which is planned if {needed} is given")

    @property
    def batches(self) -> list[int]:
        """The batch size of each rank."""
        sizes = self.batch if isinstance(self.batch, tuple) else (self.batch,) * self.ranks
        if len(sizes) != self.ranks:
            raise OptionError(f"batch is {list(sizes)}; expected one size per rank (ranks: {self.ranks:,})")
        return [int(size) for size in sizes]


_NAMES = list(PlanOptions.__dataclass_fields__)
_OF_HEAD = _NAMES[_NAMES.index("ratio") : _NAMES.index("model")]
_OF_BACKBONE = _NAMES[_NAMES.index("image") :]
