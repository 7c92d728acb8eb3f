"""The options of mixed precision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plsc.errors import OptionError
from plsc.option import at_least, between, more_than, of_run, one_of

HIGHEST_SCALE = 2.0**24
"""Where a loss scale stops growing.

float16 ends at 2^-24 below 1: this scale lifts all gradients down to 2^-48 into its range, and float32, in
which they are summed over batch and ranks and divided again, still has 2^80 to spare above 65504 * 2^24.
"""


def _names(values: tuple[str, ...]) -> str | None:
    return None if all(value.strip() for value in values) else "names that are not empty"


def _shrinks(value: float) -> str | None:
    return None if 0 < value < 1 else "more than 0 and less than 1"


@dataclass(frozen=True)
class PrecisionOptions:
    """Mixed precision, and the scaling of the loss that float16 needs."""

    mode: str = of_run(
        "float32",
        "what the backbone is trained in: float32, float16 (with loss scaling; on a CPU it is bfloat16) or "
        "bfloat16; weights, their updates and the loss stay float32",
        "set_precision(mode)",
        one_of("float32", "float16", "bfloat16"),
    )
    init_loss_scaling: float = of_run(
        1.0, "of float16: what the loss is multiplied with at first",
        "set_init_loss_scaling(scale)", between(1, HIGHEST_SCALE),
    )  # fmt: skip
    incr_every_n_steps: int = of_run(
        2000, "so many finite steps in a row raise the loss scale", "set_incr_every_n_steps(steps)",
        at_least(1),
    )  # fmt: skip
    decr_every_n_nan_or_inf: int = of_run(
        2, "so many steps in a row with a nan or inf lower the loss scale",
        "set_decr_every_n_nan_or_inf(steps)", at_least(1),
    )  # fmt: skip
    incr_ratio: float = of_run(
        2.0,
        "what the loss scale is raised by, up to 2^24",
        "set_incr_ratio(ratio)",
        more_than(1),
    )
    decr_ratio: float = of_run(
        0.5,
        "what the loss scale is lowered by, down to 1",
        "set_decr_ratio(ratio)",
        _shrinks,
    )
    use_dynamic_loss_scaling: bool = of_run(
        True,
        "raise and lower the loss scale; without, it stays, and steps with a nan or inf are skipped",
        "set_dynamic_loss_scaling(flag)",
    )
    loss_scaling: str = of_run(
        "auto", "auto: in float16; always: in any mode, to see how a run takes skipped steps",
        "set_loss_scaling(when)", one_of("auto", "always"),
    )  # fmt: skip
    white_list: tuple[str, ...] = of_run(
        (), "operators, and modules by name or class (with * and ?), that are forced to 16 bits",
        "set_precision_white_list(names)", _names,
    )  # fmt: skip
    black_list: tuple[str, ...] = of_run(
        (), "operators, and modules by name or class (with * and ?), that stay float32",
        "set_precision_black_list(names)", _names,
    )  # fmt: skip
    evaluation: str = of_run(
        "float32", "what test, predict and evaluations while training run in: float32, or training "
        "(the mode of training)",
        "set_evaluation_precision(mode)", one_of("float32", "training"),
    )  # fmt: skip


class AutoMixedPrecisionLists:
    """Names of what runs in 16 bits, and of what stays float32, whatever mixed precision would do.

    custom_white_list: forced to 16 bits; custom_black_list: kept in float32. A name is that of an operator
    (docs/precision.md has the table), or a pattern with ``*`` and ``?`` over the names of the network's
    modules, such as ``neck.*``, and over their classes, such as ``BatchNorm2d``. What no module is called
    is an error once the network is built.

    Raises OptionError for what is no list of names, and for a name in both.
    """

    def __init__(
        self,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
    ) -> None:
        self.white_list = _read_names("custom_white_list", custom_white_list)
        self.black_list = _read_names("custom_black_list", custom_black_list)
        check_apart(self.white_list, self.black_list)

    def __repr__(self) -> str:
        return f"AutoMixedPrecisionLists({list(self.white_list)}, {list(self.black_list)})"


def check_apart(white: Iterable[str], black: Iterable[str]) -> None:
    """Raise OptionError for a name that is in both lists."""
    both = sorted(set(white) & set(black))
    if both:
        raise OptionError(
            f"{', '.join(both)} cannot be both forced to 16 bits (white list) and kept float32 (black list)"
        )


def _read_names(argument: str, names: Iterable[str] | None) -> tuple[str, ...]:
    is_listing = isinstance(names, Iterable) and not isinstance(names, (str, bytes))
    listed = tuple(names) if is_listing and names is not None else ()
    sound = all(isinstance(name, str) and name.strip() for name in listed)
    if not sound or not (is_listing or names is None):
        raise OptionError(
            f"{argument} is {names!r}; expected a list of names, such as ['BatchNorm2d', 'softmax']"
        )
    return tuple(sorted(set(listed)))
