"""The options of the classification head."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from plsc.option import at_least, between, more_than, of_run, one_of


def _margin_names() -> tuple[str, ...]:
    """Return the names of the margins in plsc/heads/margins.py, from its source: to import it takes torch."""
    source = Path(__file__).parents[1] / "heads" / "margins.py"
    found = re.findall(r'^    name = "(\w+)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
    return tuple(found)


_MARGINS = _margin_names()
LOSS_TYPES = tuple(f"dist_{name}" for name in _MARGINS) + _MARGINS


def _scale(value: float | str) -> str | None:
    is_number = not isinstance(value, str) and value > 0
    return None if is_number or value == "auto" else "a number more than 0, or 'auto'"


def _three_numbers(values: tuple[float, ...]) -> str | None:
    return None if len(values) == 3 else "three numbers: m1, m2, m3"


def _rising_pair(values: tuple[float, ...]) -> str | None:
    good = len(values) == 2 and 0 < values[0] < values[1]
    return None if good else "two positive numbers, the lower one first"


def _ratio(value: float) -> str | None:
    return None if 0 < value <= 1 else "a share of the classes in (0, 1]"


@dataclass(frozen=True)
class HeadOptions:
    """The classification head."""

    loss_type: str = of_run(
        "dist_arcface",
        f"dist_ and one of {', '.join(_MARGINS)}: class rows sharded over the ranks; without dist_, all rows "
        "on every rank",
        "set_loss_type(loss_type)",
        one_of(*LOSS_TYPES),
    )
    class_num: int | None = of_run(
        None,
        "number of classes; when not set, the largest label + 1",
        "set_class_num(num)",
        at_least(1),
    )
    margin: float = of_run(
        0.5,
        "margin of the loss: an angle in radians; of cosface, of the cosine; of sphereface, a factor of the "
        "angle; when not set, 0.5 for arcface and its paper's for each other one",
        "set_margin(margin)",
        at_least(0),
    )
    margin_warmup_steps: int = of_run(
        0,
        "steps over which the margin rises linearly to its full value; 0: the full margin from the start",
        "set_margin_warmup_steps(num)",
        at_least(0),
    )
    scale: float | str = of_run(
        "auto",
        "scale of the cosines; auto: sqrt(2) ln(C - 1) for C classes (AdaCos), 64 from 10,000 classes on",
        "set_scale(scale)",
        _scale,
    )
    combined_margins: tuple[float, ...] = of_run(
        (1.0, 0.3, 0.2),
        "of the loss combined: m1, m2, m3 in cos(m1 angle + m2) - m3",
        "set_combined_margins(margins)",
        _three_numbers,
    )
    easy_margin: bool = of_run(
        False, "no margin where the angle is over 90 degrees; when not set, off for arcface, on for magface",
        "set_easy_margin(easy)",
    )  # fmt: skip
    straight_through: bool = of_run(
        False, "of arcface: take the margin as a constant in the gradient, as some implementations do",
        "set_straight_through(flag)",
    )  # fmt: skip
    margin_momentum: float = of_run(
        0.99, "of adaface and curricularface: share of the old running statistics",
        "set_margin_momentum(momentum)", between(0, 1),
    )  # fmt: skip
    adaface_h: float = of_run(
        0.333, "of adaface: how much the embedding's norm counts", "set_adaface_h(h)", at_least(0)
    )
    magface_norms: tuple[float, ...] = of_run(
        (10.0, 110.0),
        "of magface: lowest and highest norm",
        "set_magface_norms(norms)",
        _rising_pair,
    )
    magface_margins: tuple[float, ...] = of_run(
        (0.45, 0.8),
        "of magface: margins at these norms",
        "set_magface_margins(margins)",
        _rising_pair,
    )
    magface_lambda: float = of_run(
        35.0, "of magface: weight of its regulariser", "set_magface_lambda(weight)", at_least(0)
    )
    initial_norm: float | None = of_run(
        None,
        "expected norm of the class weights of a class at the start; when not set, each element has the "
        "standard deviation 0.01",
        "set_initial_norm(norm)",
        more_than(0),
    )
    sub_centers: int = of_run(
        1, "rows a class (sub-centre ArcFace), the nearest counts", "set_sub_centers(num)",
        between(1, 64),
    )  # fmt: skip
    sample_ratio: float = of_run(
        1.0,
        "share of a rank's classes that take part in a step (PartialFC); those of the batch always do",
        "set_sample_ratio(ratio)",
        _ratio,
    )
    hard_share: float = of_run(
        0.0,
        "share of the sampled classes that are the nearest to the batch, instead of random ones",
        "set_hard_share(share)",
        between(0, 0.99),
    )
    optimizer: str = of_run(
        "sgd", "of the sharded class rows: sgd (with optim.momentum), adamw, adagrad (one number a row)",
        "set_head_optimizer(name)", one_of("sgd", "adamw", "adagrad"),
    )  # fmt: skip
    lr_factor: float = of_run(
        1.0, "the class rows' learning rate is the backbone's times this", "set_head_lr_factor(factor)",
        more_than(0),
    )  # fmt: skip
    weight_decay: float | None = of_run(
        None, "L2 decay of the class rows; when not set, optim.weight_decay",
        "set_head_weight_decay(decay)", at_least(0),
    )  # fmt: skip
    row_dtype: str = of_run(
        "float32", "type of the sharded class rows: float32, or bfloat16 (rounded stochastically)",
        "set_row_dtype(dtype)", one_of("float32", "bfloat16"),
    )  # fmt: skip
    state_dtype: str = of_run(
        "float32", "type of their optimizer state: float32, bfloat16, or int8 (momentum of sgd only)",
        "set_row_state_dtype(dtype)", one_of("float32", "bfloat16", "int8"),
    )  # fmt: skip
    offload: bool = of_run(
        False, "keep class rows and their state in CPU memory; those of a step travel to the GPU",
        "set_head_offload(offload)",
    )  # fmt: skip
    products: str = of_run(
        "auto", "type of the factors in the head's matrix products: float32, bfloat16, or auto (bfloat16 if "
        "precision.mode has 16 bits, else float32)",
        "set_head_products(dtype)", one_of("auto", "float32", "bfloat16"),
    )  # fmt: skip
    keep_mb: float = of_run(
        0.0,
        "MiB a rank in which the first pass over the rows may leave its terms for the second, in 16 bits; "
        "where they do not fit, they are computed again",
        "set_head_keep_mb(mebibytes)",
        between(0, 2**40),
    )
    kernels: str = of_run(
        "auto", "what computes the head: auto, torch, native (C, on CPUs) or triton (on GPUs)",
        "set_head_kernels(name)", one_of("auto", "torch", "native", "triton"),
    )  # fmt: skip
    tile: int | None = of_run(
        None, "class rows at a time; when not set, by the batch size", "set_head_tile(rows)",
        at_least(1),
    )  # fmt: skip
