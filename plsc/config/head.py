"""Options of the classification head."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from plsc.config.option import at_least, between, more_than, of_run, one_of


def _margin_names() -> tuple[str, ...]:
    """Return the names in plsc/heads/margins.py, read from its source to avoid importing torch."""
    source = Path(__file__).parents[1] / "heads" / "margins.py"
    found = re.findall(r'^    name = "(\w+)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
    return tuple(found)


_MARGINS = _margin_names()
LOSS_TYPES = tuple(f"dist_{name}" for name in _MARGINS) + _MARGINS


def _scale(value: float | str) -> str | None:
    is_number = not isinstance(value, str) and value > 0
    return None if is_number or value == "auto" else "a number greater than 0, or 'auto'"


def _three_numbers(values: tuple[float, ...]) -> str | None:
    return None if len(values) == 3 else "three numbers: m1, m2, m3"


def _rising_pair(values: tuple[float, ...]) -> str | None:
    good = len(values) == 2 and 0 < values[0] < values[1]
    return None if good else "two increasing positive numbers"


def _ratio(value: float) -> str | None:
    return None if 0 < value <= 1 else "a number greater than 0 and at most 1"


@dataclass(frozen=True)
class HeadOptions:
    """The classification head."""

    loss_type: str = of_run(
        "dist_arcface",
        f"loss: {', '.join(_MARGINS)}; with the prefix dist_, class weights are sharded, else replicated",
        "set_loss_type(loss_type)",
        one_of(*LOSS_TYPES),
    )
    class_num: int | None = of_run(
        None, "number of classes; None: largest label + 1", "set_class_num(num)", at_least(1)
    )
    margin: float = of_run(
        0.5,
        "margin: an angle in radians; cosface: a cosine; sphereface: a factor of the angle; when not "
        "set: the paper's value",
        "set_margin(margin)",
        at_least(0),
    )
    margin_warmup_steps: int = of_run(
        0, "steps of linear increase of the margin", "set_margin_warmup_steps(num)", at_least(0)
    )
    scale: float | str = of_run(
        "auto",
        "factor of the cosines; auto: sqrt(2) ln(C - 1) for C classes (AdaCos), 64 from 10,000 classes on",
        "set_scale(scale)",
        _scale,
    )
    combined_margins: tuple[float, ...] = of_run(
        (1.0, 0.3, 0.2),
        "combined: m1, m2 and m3 in cos(m1 theta + m2) - m3",
        "set_combined_margins(margins)",
        _three_numbers,
    )
    easy_margin: bool = of_run(
        False,
        "apply the margin only to angles below 90 degrees; when not set: off for arcface, on for magface",
        "set_easy_margin(easy)",
    )
    straight_through: bool = of_run(
        False, "arcface: treat the margin as a constant in the backward pass", "set_straight_through(flag)"
    )
    margin_momentum: float = of_run(
        0.99,
        "adaface, curricularface: momentum of the running statistics",
        "set_margin_momentum(momentum)",
        between(0, 1),
    )
    adaface_h: float = of_run(
        0.333,
        "adaface: effect of the embedding's norm on the margin (h in the paper)",
        "set_adaface_h(h)",
        at_least(0),
    )
    magface_norms: tuple[float, ...] = of_run(
        (10.0, 110.0), "magface: lowest and highest embedding norm", "set_magface_norms(norms)", _rising_pair
    )
    magface_margins: tuple[float, ...] = of_run(
        (0.45, 0.8),
        "magface: margins at the lowest and the highest norm",
        "set_magface_margins(margins)",
        _rising_pair,
    )
    magface_lambda: float = of_run(
        35.0, "magface: weight of the norm regulariser", "set_magface_lambda(weight)", at_least(0)
    )
    initial_norm: float | None = of_run(
        None,
        "expected initial norm of a class weight vector; None: elements have standard deviation 0.01",
        "set_initial_norm(norm)",
        more_than(0),
    )
    sub_centers: int = of_run(
        1, "weight vectors per class (sub-centre ArcFace)", "set_sub_centers(num)", between(1, 64)
    )
    sample_ratio: float = of_run(
        1.0,
        "share of each rank's classes per step, including those of the batch (PartialFC)",
        "set_sample_ratio(sample_ratio)",
        _ratio,
    )
    hard_share: float = of_run(
        0.0,
        "share of the sampled classes that are hard negatives (closest to the batch)",
        "set_hard_share(share)",
        between(0, 0.99),
    )
    optimizer: str = of_run(
        "sgd",
        "optimizer of sharded class weights: sgd (with optim.momentum), adamw, or adagrad (row-wise)",
        "set_head_optimizer(name)",
        one_of("sgd", "adamw", "adagrad"),
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
        "dtype of sharded class weights: float32, or bfloat16 with stochastic rounding",
        "set_row_dtype(dtype)",
        one_of("float32", "bfloat16"),
    )
    state_dtype: str = of_run(
        "float32",
        "dtype of the optimizer state of class weights: float32, bfloat16, or int8 (sgd only)",
        "set_row_state_dtype(dtype)",
        one_of("float32", "bfloat16", "int8"),
    )
    offload: bool = of_run(
        False, "keep class weights and their optimizer state in CPU memory", "set_head_offload(offload)"
    )
    products: str = of_run(
        "auto",
        "dtype of the inputs of the head's matrix products: float32, bfloat16, or auto (bfloat16 if "
        "precision.mode has 16 bits)",
        "set_head_products(dtype)",
        one_of("auto", "float32", "bfloat16"),
    )
    keep_mb: float = of_run(
        0.0,
        "MiB per rank to cache softmax terms for the update, in 16 bits",
        "set_head_keep_mb(mebibytes)",
        between(0, 2**40),
    )
    kernels: str = of_run(
        "auto",
        "implementation of the head: auto, torch, native (C, for CPUs) or triton (for GPUs)",
        "set_head_kernels(name)",
        one_of("auto", "torch", "native", "triton"),
    )
    tile: int | None = of_run(
        None,
        "class weight vectors computed at a time; None: depends on the batch size",
        "set_head_tile(rows)",
        at_least(1),
    )
