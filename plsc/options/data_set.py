"""One of several data sets that are trained together: its name, where it is, and its head's own options."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plsc.errors import OptionError, suggest
from plsc.option import OptionSpec, more_than, not_empty, specs_of
from plsc.options.head import HeadOptions

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # part of the keys in a checkpoint, which dots divide
HEAD_OPTIONS = ("class_num", "loss_type", "margin", "scale", "sample_ratio")
"""Options of the group ``head`` that a data set may have of its own."""


@dataclass(frozen=True)
class DataSet:
    """A data set with a label space and a head of its own.

    path: as `data.dataset_dir`; weight: its share of each step's images, beside the weights of the others.
    The rest: options of its head; None: those of the run.
    """

    name: str
    path: str
    weight: float = 1.0
    class_num: int | None = None
    loss_type: str | None = None
    margin: float | None = None
    scale: float | str | None = None
    sample_ratio: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return what `data.datasets` holds of it: what is set, as plain values."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


def read_data_sets(
    values: Sequence[Mapping[str, Any]],
) -> list[DataSet]:
    """Return the data sets that `data.datasets` lists. Raises OptionError for one that is wrong."""
    found: list[DataSet] = []
    for value in values:
        one = _read(value)
        if any(one.name == other.name for other in found):
            raise OptionError(f"there are two data sets {one.name!r}; give each a name of its own")
        found.append(one)
    return found


def is_name(text: str) -> bool:
    """Whether a data set may have this name."""
    return _NAME.fullmatch(text) is not None


def _read(value: Mapping[str, Any]) -> DataSet:
    known = [item.name for item in dataclasses.fields(DataSet)]
    for key in value:
        if key not in known:
            raise OptionError(f"a data set has no {key!r}; {suggest(str(key), known)}")
    name, path = value.get("name"), value.get("path")
    if not isinstance(name, str) or not is_name(name):
        raise OptionError(
            f"the name of a data set is {name!r}; expected 1 to 64 letters, digits, _ and -"
        )
    try:
        read: dict[str, Any] = {
            "path": _PATH.checked(path),
            "weight": _WEIGHT.checked(value.get("weight", 1.0)),
        }
        for key in HEAD_OPTIONS:
            if value.get(key) is not None:
                read[key] = _HEAD[f"head.{key}"].checked(value[key])
    except OptionError as error:
        raise OptionError(f"data set {name}: {error}") from error
    return DataSet(name, **read)


def _spec(name: str, kind: type, meaning: str, check: Callable[[Any], str | None]) -> OptionSpec:
    return OptionSpec("data.datasets", name, kind, None, meaning, "add_dataset", name, check)


_PATH = _spec("path", str, "folder, file or URL, as set_dataset_dir takes it", not_empty)
_WEIGHT = _spec(
    "weight", float, "share of a step's images, by the side of the others", more_than(0)
)
_HEAD = specs_of("head", HeadOptions)
