"""Declaration of options, and validation of their values."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from plsc.errors import CheckpointError, OptionError, did_you_mean, shown, suggest

Size = typing.NewType("Size", int)
"""A number of bytes; as text also with a unit, a power of 1024: 512M, 4G."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)

Check = Callable[[Any], "str | None"]
"""Returns None for a valid value, else a description of valid ones."""


@dataclass(frozen=True)
class Need:
    """A condition without which an option has no effect.

    path: the option that decides, for the message. text: in words, after "only if". holds: tells for a
    configuration. is_strict: a run in which it does not hold is refused; otherwise a note says so.
    """

    path: str
    text: str
    holds: Callable[[Any], bool]
    is_strict: bool = False


def need(path: str, *values: Any, is_strict: bool = False) -> Need:
    """Return the need that another option has one of these values."""
    text = f"{path} is {' or '.join(map(str, values))}"
    return Need(path, text, lambda config: config.get(path) in values, is_strict)


def declare(
    default: Any,
    meaning: str,
    setter: str = "",
    check: Check | None = None,
    decides: str = "never",
    needs: Need | tuple[Need, ...] = (),
) -> Any:
    """Declare an option; `setter` is ``method(argument)`` of Entry, if there is one.

    decides: when the value in a checkpoint is used if the script sets none: ``never``, ``model`` (whenever
    the checkpoint's network is used) or ``run`` (when its run is resumed). See `OptionSpec.harmless`. needs:
    conditions without which it has no effect; the description, a note and an error tell of them.
    """
    needs = (needs,) if isinstance(needs, Need) else needs
    details = {"meaning": meaning, "setter": setter, "check": check, "decides": decides, "needs": needs}
    return field(default=default, metadata=details)


of_model = functools.partial(declare, decides="model")
of_run = functools.partial(declare, decides="run")


def at_least(low: float) -> Check:
    """Accept values of `low` or more."""
    return lambda value: None if value >= low else f"a number of at least {low}"


def more_than(low: float) -> Check:
    """Accept values greater than `low`."""
    return lambda value: None if value > low else f"a number greater than {low}"


def between(low: float, high: float) -> Check:
    """Accept values in [low, high]."""
    expected = f"a number between {low} and {high}"
    return lambda value: None if low <= value <= high else expected


def one_of(*names: str) -> Check:
    """Accept one of the names."""
    listed = ", ".join(names)
    return lambda value: None if value in names else f"one of {listed}{did_you_mean(str(value), names)}"


def not_empty(text: str) -> str | None:
    """Accept strings that are not blank."""
    return None if text.strip() else "a non-empty string"


@dataclass(frozen=True)
class OptionSpec:
    """One row of the option table."""

    group: str
    name: str
    kind: Any
    default: Any
    meaning: str
    setter: str
    argument: str
    check: Check | None
    decides: str = "never"
    needs: tuple[Need, ...] = ()

    @property
    def path(self) -> str:
        """``group.name``."""
        return f"{self.group}.{self.name}".removeprefix(".")

    def checked(self, value: Any) -> Any:
        """Return the value converted to the option's type. Raises OptionError for an invalid value."""
        converted = convert(value, self.kind)
        expected = None
        if converted is WRONG:
            expected = describe_kind(self.kind)
        elif self.check and converted is not None:
            expected = self.check(converted)
        if expected is not None:
            meaning = re.split("[:;] ", self.meaning, maxsplit=1)[0]
            raise OptionError(f"{self.path} is {shown_value(value)}; expected {expected} ({meaning})")
        return converted

    def saved(self, value: Any) -> Any:
        """Return a value from a checkpoint, converted to the option's type. Raises CheckpointError."""
        try:
            return self.checked(value)
        except OptionError as error:
            raise CheckpointError(
                f"an option in the checkpoint is invalid: {error}; choose another checkpoint"
            ) from error

    def harmless(self, value: Any) -> Any:
        """Return a value that a checkpoint may set: numbers, booleans and known names.

        Raises CheckpointError for any other string. A checkpoint must not choose code (``module:name``),
        paths or regular expressions, as it may come from an untrusted source.
        """
        if _is_harmless(value):
            return value
        named = f", to {importable(value)!r}" if isinstance(value, str) else ""
        raise CheckpointError(
            f"{self.path} is {shown_value(value)} in the checkpoint, from which only numbers and known names "
            f"are taken; to use this value, set {self.path} here{named}"
        )


_PATTERN = re.compile(r"(type:)?[\w.*?\[\]!-]{1,200}")  # matches names of modules and operators


def _is_harmless(value: Any, key: str = "") -> bool:
    """Return whether a value and all its items are numbers, booleans, names or patterns of names."""
    if isinstance(value, dict):
        return all(_is_harmless(item, str(name)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_harmless(item, "pattern") for item in value)
    if isinstance(value, str) and key == "pattern":
        return _PATTERN.fullmatch(value) is not None
    is_name = key in ("", "name", "products", "kernels")  # strings that are one of a few names
    return not isinstance(value, str) or (is_name and not names_code(value))


def names_code(name: object) -> bool:
    """Return whether the value of an option is the name of code to import, ``package.module:name``."""
    return isinstance(name, str) and ":" in name[1:]


def importable(reference: str) -> str:
    """Return the ``module:name`` to advise: code in the training script has to be moved to a module first."""
    return reference.replace("__main__:", "MODULE:", 1)


def describe_kind(kind: Any) -> str:
    """Return a type in words, such as 'an integer or None'."""
    if isinstance(kind, types.UnionType):
        return " or ".join(describe_kind(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return f"a list of {_ITEMS[typing.get_origin(item) or item]}"
    return _KINDS[typing.get_origin(kind) or kind]


_KINDS = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    dict: "a mapping",
    list: "strings",
    Size: "a number of bytes, such as 512M or 4G",
    types.NoneType: "None",
}
_ITEMS = {int: "integers", float: "numbers", str: "strings", dict: "mappings"}
WRONG = object()
"""Returned by `convert` for a value of the wrong type."""


def convert(value: Any, kind: Any) -> Any:
    """Return the value converted to `kind` if the conversion is lossless, else WRONG."""
    if isinstance(kind, types.UnionType):
        parts = (convert(value, part) for part in typing.get_args(kind))
        return next((part for part in parts if part is not WRONG), WRONG)
    if typing.get_origin(kind) is tuple:
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
            return WRONG
        items = tuple(convert(item, typing.get_args(kind)[0]) for item in value)
        return WRONG if any(item is WRONG for item in items) else items
    if typing.get_origin(kind) is dict:
        return (
            {str(key): _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else WRONG
        )
    if kind is Size:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        return convert(int(float(match[1]) * _UNITS[match[2].upper()]) if match else value, int)
    if kind is bool or kind is types.NoneType:
        return value if isinstance(value, kind) else WRONG
    if kind is int:
        number = None if isinstance(value, bool) or not hasattr(value, "__index__") else value.__index__()
        return WRONG if number is None or not -(2**63) <= number < 2**63 else number
    if kind is float:
        return float(value) if is_finite_number(value) else WRONG
    text = value.__fspath__() if hasattr(value, "__fspath__") else value
    is_valid = isinstance(text, str) and "\0" not in text  # no file or module name contains \0
    return os.path.expanduser(text) if is_valid else WRONG  # noqa: PTH111 - may be no path


def _plain(value: Any) -> Any:
    """Return an item of a mapping as JSON and YAML give it back: lists for tuples, strings for paths."""
    return list(value) if isinstance(value, (tuple, set)) else getattr(value, "__fspath__", lambda: value)()


def is_finite_number(value: Any) -> bool:
    """Return whether a value is a finite number that fits a float, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that is too large for a float
        return False


def shown_value(value: Any) -> str:
    """Return the repr of a value for an error message, shortened to one line."""
    return f"{shown(repr(value)):.160}"


def specs_of(group: str, factory: type) -> dict[str, OptionSpec]:
    """Return the options that a dataclass declares, by path."""
    kinds = typing.get_type_hints(factory)
    found = {}
    for item in dataclasses.fields(factory):
        if not item.metadata:
            continue
        setter, _, argument = item.metadata["setter"].rstrip(")").partition("(")
        needs = item.metadata.get("needs", ())
        conditions = " and ".join(one.text for one in needs)
        meaning = item.metadata["meaning"] + (f"; only if {conditions}" if needs else "")
        spec = OptionSpec(
            group, item.name, kinds[item.name], item.default, meaning, setter, argument,
            item.metadata["check"], item.metadata.get("decides", "never"), needs,
        )  # fmt: skip
        found[spec.path] = spec
    return found


def check_fields(declared: Any) -> None:
    """Convert the fields of a frozen dataclass of declared options; OptionError for an invalid value."""
    for name, spec in specs_of("", type(declared)).items():
        object.__setattr__(declared, name, spec.checked(getattr(declared, name)))


def read_fields(factory: type, value: Mapping[str, Any], what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a mapping into validated fields of a dataclass and the remaining items.

    what: describes the mapping in errors, such as 'dataset faces'. Raises OptionError for an invalid value.
    """
    specs = specs_of("", factory)
    try:
        fields = {name: one.checked(value.get(name, one.default)) for name, one in specs.items()}
    except OptionError as error:
        raise OptionError(f"{what}: {error}") from error
    return fields, {name: one for name, one in value.items() if name not in specs}


T = TypeVar("T")


def read_arguments(
    factory: type[T], value: Mapping[str, Any] | None, what: str, accepted: Sequence[str] | None = None
) -> T:
    """Return a dataclass of declared fields made from a mapping; OptionError for an unknown or invalid item.

    what: names the mapping in errors, such as 'data.order'. accepted: the fields that may be set, by
    default all.
    """
    fields, _ = read_fields(factory, value or {}, what)
    known = list(fields) if accepted is None else accepted
    for name in value or ():
        if name not in known:
            hint = suggest(str(name), known) if known else "it has none"
            raise OptionError(f"{what} has no argument {name!r}; {hint}")
    return factory(**fields)


def arguments_of(factory: type, what: str) -> Check:
    """Accept mappings that `read_arguments` accepts; its OptionError is raised for others."""

    def check(value: Mapping[str, Any]) -> None:
        read_arguments(factory, value, what)

    return check


def name_and_arguments(value: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split a value such as ``cosine``, or ``{name: cosine, end_factor: 0.1}``."""
    given = {"name": value} if isinstance(value, str) else dict(value)
    return str(given.pop("name", "")), given


def with_arguments(check: Check, factory: type, accepted: Mapping[str, Sequence[str]]) -> Check:
    """Accept names that `check` accepts, and mappings with name and `accepted` arguments of `factory`."""

    def check_both(value: str | Mapping[str, Any]) -> str | None:
        name, arguments = name_and_arguments(value)
        if not arguments and not isinstance(value, str):
            return "a name, or a mapping with name and arguments"
        if (expected := check(name)) is None:
            read_arguments(factory, arguments, name, accepted.get(name, ()))
        return expected

    return check_both


def described_fields(factory: type) -> str:
    """Return the declared fields of a dataclass with their meanings, for the description of a mapping."""
    return "; ".join(f"{name} ({one.meaning})" for name, one in specs_of("", factory).items())
