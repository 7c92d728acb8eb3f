"""The options of `plsc plan`: name, type, default, meaning and check."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

from plsc.config import find_option
from plsc.config.option import Check, between, declare, one_of, specs_of
from plsc.errors import OptionError

_MOST = 10**15  # upper limit of counts: more than any run needs, and small enough for torch
MODES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short names of `precision`."""


def _integer(low: int) -> Check:
    """Return a check for an integer from `low` on, also as a float such as 1e8."""
    expected = f"an integer from {low} to {_MOST:.0e}"
    return lambda value: None if value == int(value) and low <= value <= _MOST else expected


def _batch(value: float | tuple[float, ...]) -> str | None:
    if not isinstance(value, tuple):
        return _integer(1)(value)
    is_valid = sum(value) > 0 and not any(map(_integer(0), value))
    return None if is_valid else "one batch size per rank, not all 0"


def _run_option(path: str, default: Any = MISSING, **changes: Any) -> Any:
    """Declare an option that a training run also has, at `path`; the flag accepts both names."""
    spec = find_option(path)
    details = {"meaning": spec.meaning, "setter": "", "check": spec.check, "option": path}
    default = spec.default if default is MISSING else default
    return field(default=default, metadata={**details, **changes})


@dataclass
class PlanOptions:
    """The options of a plan: of the head if `classes` is given, of the backbone if `model` is given."""

    classes: float | None = _run_option(
        "head.class_num", None, meaning="total number of classes, such as 1e8",
        check=_integer(1),
    )  # fmt: skip
    ranks: int = declare(1, "number of ranks", check=between(1, 10**6))
    embedding: int = _run_option("model.emb_size", check=between(1, _MOST))
    batch: float | tuple[float, ...] = _run_option(
        "train.batch_size", meaning="batch size per rank", check=_batch
    )
    # Of the head:
    ratio: float = _run_option("head.sample_ratio")
    rows: str = _run_option("head.row_dtype")
    optimizer: str = _run_option("head.optimizer")
    state: str = _run_option("head.state_dtype")
    centers: int = _run_option("head.sub_centers")
    offload: bool = _run_option("head.offload")
    keep_bytes: float = declare(
        0, "memory in bytes for exponentials kept from forward to update (head.keep_mb is in MiB)",
        check=_integer(0),
    )  # fmt: skip
    embedding_dtype: str = declare(
        "float32", "dtype of the embeddings: float32 or bfloat16",
        check=one_of("float32", "bfloat16"),
    )  # fmt: skip
    # Of the backbone:
    model: str | None = _run_option("model.name", None)
    image: int | tuple[int, ...] = _run_option(
        "model.image_shape", check=None,
        meaning="image shape: channels, height, width; or one number, the side of a square RGB image",
    )  # fmt: skip
    precision: str = _run_option("precision.mode", check=one_of(*MODES.values(), *MODES))
    checkpoint: str = _run_option("memory.checkpoint_stages")
    micro_batches: int = _run_option("train.micro_batches")
    backbone_optimizer: str = _run_option("optim.optimizer")
    backbone_shards: int = declare(
        1, "number of ranks over which the backbone is sharded (FSDP)",
        check=between(1, 10**6),
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, spec in specs_of("", PlanOptions).items():
            setattr(self, name, spec.checked(getattr(self, name)))
        if self.classes is None and self.model is None:
            raise OptionError(
                "nothing to plan; set classes (--classes) to plan the head, model (--model) to plan the "
                "backbone, or both"
            )
        for needed, what, names in (("classes", "head", _OF_HEAD), ("model", "backbone", _OF_BACKBONE)):
            given = [name for name in names if getattr(self, name) != getattr(PlanOptions, name)]
            if given and getattr(self, needed) is None:
                raise OptionError(f"{given[0]} is an option of the {what}; also set {needed}")

    @property
    def batches(self) -> list[int]:
        """The batch size per rank."""
        sizes = self.batch if isinstance(self.batch, tuple) else (self.batch,) * self.ranks
        if len(sizes) != self.ranks:
            raise OptionError(f"batch is {list(sizes)}; expected one size per rank (ranks: {self.ranks:,})")
        return [int(size) for size in sizes]


_NAMES = list(PlanOptions.__dataclass_fields__)
_OF_HEAD = _NAMES[_NAMES.index("ratio") : _NAMES.index("model")]
_OF_BACKBONE = _NAMES[_NAMES.index("image") :]
