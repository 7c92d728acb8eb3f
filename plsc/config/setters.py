"""The setters of Entry, made from the option table; setters.pyi has them for editors and type checkers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from plsc.config.option import OptionSpec
from plsc.config.options import Options, all_options
from plsc.errors import OptionError, record_failure, without_our_frames


class Setters:
    """Setters that check a value and put it into `options`; OptionError says what was expected."""

    __slots__ = ("options",)

    options: Options


def _setter(spec: OptionSpec) -> Callable[..., None]:
    """Return a method that takes a value, ``**`` items of a mapping, or both.

    ``**arguments`` are those of the value; items by another name are the option of that name in the group.
    """
    value, _, mapping = spec.argument.replace(" ", "").partition("**")
    value = value.rstrip(",")
    kinds = {"self": inspect.Parameter.POSITIONAL_OR_KEYWORD}
    kinds |= {value: inspect.Parameter.POSITIONAL_OR_KEYWORD} if value else {}
    kinds |= {"arguments": inspect.Parameter.VAR_KEYWORD} if mapping else {}
    signature = inspect.Signature([inspect.Parameter(name, kind) for name, kind in kinds.items()])

    def set_option(*positional: Any, **named: Any) -> None:
        given = signature.bind(*positional, **named).arguments
        rest = given.get("arguments") or None
        values = {spec.path: given[value] if value else rest}
        if rest and mapping == "arguments":
            values = {spec.path: {"name": given[value], **rest}}
        elif value and mapping not in ("", "arguments"):
            values[f"{spec.group}.{mapping}"] = rest
        try:
            given["self"].options.set_together(values)
        except OptionError as error:
            record_failure(error)
            raise without_our_frames(error)  # noqa: B904 - its own causes stay

    set_option.__name__ = spec.setter
    set_option.__qualname__ = f"Setters.{spec.setter}"
    set_option.__doc__ = f"Set ``{spec.path}``: {spec.meaning}. Default: {spec.default!r}."
    set_option.__signature__ = signature  # type: ignore[attr-defined]
    return set_option


for _spec in reversed(list(all_options())):  # the first option of a setter describes it
    if _spec.setter:
        setattr(Setters, _spec.setter, _setter(_spec))
