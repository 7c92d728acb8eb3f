"""All options of a run, and the table that is made of them.

Setters, command-line flags, config files, the docs page and the options in a checkpoint all derive from
this table. Its rows are in the other files of this folder. An option is named by its path, such as
``train.batch_size``.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from plsc.config.data import DataOptions, DataSet, read_data_sets
from plsc.config.head import HeadOptions
from plsc.config.model import ModelOptions
from plsc.config.optim import OptimOptions
from plsc.config.option import OptionSpec, specs_of
from plsc.config.runtime import (
    MemoryOptions,
    ParallelOptions,
    PrecisionOptions,
    RuntimeOptions,
    SpeedOptions,
)
from plsc.config.train import CheckpointOptions, TrainOptions
from plsc.errors import OptionError


@dataclass(frozen=True)
class Config:
    """The options of a run, resolved: what was set, what a checkpoint decides, and defaults for the rest.

    `explicit` holds the paths that were set, `adopted` those that came from a checkpoint. differences: a line
    for each option that was set to another value than the checkpoint's. arguments: of the constructor of a
    network of the user's own, from a checkpoint.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    head: HeadOptions = field(default_factory=HeadOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    speed: SpeedOptions = field(default_factory=SpeedOptions)
    explicit: frozenset[str] = frozenset()
    adopted: frozenset[str] = frozenset()
    differences: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """Return the value of the option at a path such as ``train.batch_size``."""
        spec = find_option(path)
        return getattr(getattr(self, spec.group), spec.name)

    def changed(self, values: Mapping[str, Any]) -> Config:
        """Return a configuration with other values, by path; they count neither as set nor as adopted."""
        groups: dict[str, Any] = {}
        for path, value in values.items():
            spec = find_option(path)
            group = groups.get(spec.group, getattr(self, spec.group))
            groups[spec.group] = replace(group, **{spec.name: spec.checked(value)})
        return replace(self, **groups)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of `data.datasets`; none if there is one data set, of `data.dataset_dir`."""
        return read_data_sets(self.data.datasets)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the options as plain nested values for JSON or YAML."""
        nested: dict[str, dict[str, Any]] = {}
        for spec in all_options():
            value = self.get(spec.path)
            plain = list(value) if isinstance(value, tuple) else value
            nested.setdefault(spec.group, {})[spec.name] = plain
        return nested


class Options:
    """The options as they are being set: `values` holds what was set, by path. `resolve` ends that."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what `Config` has under that name, with the values set so far."""
        if name.startswith("__"):  # copying and pickling ask for some
            raise AttributeError(name)
        return getattr(self.resolve(), name)

    def resolve(self, saved: Mapping[str, Any] | None = None, use: Literal["model", "run"] = "run") -> Config:
        """Return the configuration: what was set, else what a checkpoint decides, else the defaults.

        saved: the options in its manifest; use: of its network, or of its run. Options that no checkpoint
        decides, and unknown ones (of a newer version), are left out.

        Raises CheckpointError for a value that is damaged, or that no checkpoint decides.
        """
        adopted, differences = {}, []
        for spec in all_options():
            group = (saved or {}).get(spec.group)
            if spec.decides not in ("model", use) or not isinstance(group, dict):
                continue
            if spec.name not in group:
                continue
            value = spec.saved(group[spec.name])
            mine = self.values.get(spec.path, spec)
            if mine is spec:
                adopted[spec.path] = spec.harmless(value)
            elif mine != value:
                differences.append(f"{spec.path}: {mine} here, {value} in the checkpoint")
        return replace(
            Config().changed({**adopted, **self.values}),
            explicit=frozenset(self.values),
            adopted=frozenset(adopted),
            differences=tuple(differences),
        )

    def set(self, path: str, value: Any) -> None:
        """Check and set an option. Raises OptionError with what was expected, what came."""
        self.set_together({path: value})

    def set_together(self, values: Mapping[str, Any]) -> None:
        """Set several options: all of them, or none if one is wrong."""
        self.values |= {path: find_option(path).checked(value) for path, value in values.items()}

    def add_data_set(self, **values: Any) -> None:
        """Add one to `data.datasets`; see `Entry.add_dataset`."""
        given = {key: value for key, value in values.items() if value is not None}
        one = read_data_sets([given])[0]
        self.set("data.datasets", (*self.data.datasets, one.as_dict()))


def all_options() -> Iterator[OptionSpec]:
    """Yield the rows of the option table, group by group."""
    yield from _TABLE.values()


def find_option(path: str) -> OptionSpec:
    """Return the row of an option; OptionError with the nearest name if there is none."""
    spec = _TABLE.get(path)
    if spec is None:
        raise OptionError(f"there is no option {path!r}{nearest_option(path)}")
    return spec


def nearest_option(path: str) -> str:
    """Return ``; did you mean 'train.batch_size'?`` for a misspelt path, or one without its group."""
    name = path.rpartition(".")[2].removeprefix("set_")
    names = {spec.name for spec in _TABLE.values()}
    if name in _SYNONYMS:
        near = [_SYNONYMS[name]]
    elif name in names:
        near = [known for known, spec in _TABLE.items() if spec.name == name]
    else:
        near = difflib.get_close_matches(path, _TABLE, 1, cutoff=0.85)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


_SYNONYMS = {
    "batch_size": "train.batch_size",
    "learning_rate": "optim.lr",
    "epochs": "train.epochs",
    "backbone": "model.name",
    "scheduler": "optim.schedule",
}


_TABLE = {
    path: spec
    for group, factory in typing.get_type_hints(Config).items()
    if isinstance(factory, type) and dataclasses.is_dataclass(factory)
    for path, spec in specs_of(group, factory).items()
}
