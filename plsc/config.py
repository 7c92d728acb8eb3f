"""All options of a run, and the table that is made of them.

Setters, command-line flags, config files, the docs page and the options in a checkpoint all derive from
this table. Its rows stand in `plsc.options`, a file a group. An option is named by its path, such as
``train.batch_size``.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, MutableSet
from dataclasses import dataclass, field
from typing import Any

from plsc.errors import OptionError, suggest
from plsc.option import OptionSpec, specs_of
from plsc.options.checkpoint import CheckpointOptions
from plsc.options.data import DataOptions
from plsc.options.data_set import DataSet, read_data_sets
from plsc.options.head import HeadOptions
from plsc.options.memory import MemoryOptions
from plsc.options.model import ModelOptions
from plsc.options.optim import OptimOptions
from plsc.options.parallel import ParallelOptions
from plsc.options.precision import PrecisionOptions
from plsc.options.runtime import RuntimeOptions
from plsc.options.speed import SpeedOptions
from plsc.options.train import TrainOptions


@dataclass
class Options:
    """All options of a run, in groups.

    `explicit` holds the paths that somebody set, `adopted` those that came from a checkpoint.
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
    explicit: MutableSet[str] = field(default_factory=set)
    adopted: MutableSet[str] = field(default_factory=set)

    def get(self, path: str) -> Any:
        """Return the value of the option at a path such as ``train.batch_size``."""
        spec = find_option(path)
        return getattr(getattr(self, spec.group), spec.name)

    def set(self, path: str, value: Any) -> None:
        """Check and set an option. Raises OptionError with what was expected, what came."""
        spec = find_option(path)
        setattr(getattr(self, spec.group), spec.name, spec.checked(value))
        self.explicit.add(path)

    def set_together(self, values: dict[str, Any]) -> None:
        """Set several options: all of them, or none if one is wrong."""
        for path, value in values.items():
            find_option(path).checked(value)
        for path, value in values.items():
            self.set(path, value)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of `data.datasets`; none if there is one data set, of `data.dataset_dir`."""
        return read_data_sets(self.data.datasets)

    def add_data_set(self, **values: Any) -> None:
        """Add one to `data.datasets`; see `Entry.add_dataset`."""
        given = {key: value for key, value in values.items() if value is not None}
        one = read_data_sets([given])[0]
        self.set("data.datasets", (*self.data.datasets, one.as_dict()))

    def set_hdfs(
        self,
        name: str,
        ugi: str | None = None,
        dir_for_save: str | None = None,
        checkpoint_dir: str | None = None,
    ) -> None:
        """Set the options of a remote file system at once; see `Entry.set_hdfs_info`."""
        if not isinstance(name, str) or "://" not in name:
            raise OptionError(
                f"fs_name is {name!r}; expected the URL of a file system, such as hdfs://namenode:9000"
            )
        if ugi is not None:
            # Whatever follows the comma is a password, which goes nowhere, messages included.
            user = str(ugi).split(",", 1)[0].strip()
            if not user:
                raise OptionError("fs_ugi has no user name; expected 'name,password'")
            self.set("checkpoint.hdfs_user", user)
        if dir_for_save is not None:
            self.set("checkpoint.upload_dir", _below(name, dir_for_save))
        if checkpoint_dir is not None:
            self.set("checkpoint.download_dir", _below(name, checkpoint_dir))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the options as plain nested values for JSON or YAML."""
        nested: dict[str, dict[str, Any]] = {}
        for spec in all_options():
            value = self.get(spec.path)
            plain = list(value) if isinstance(value, tuple) else value
            nested.setdefault(spec.group, {})[spec.name] = plain
        return nested

    def adopt(self, saved: dict[str, Any], keep: frozenset[str] = frozenset()) -> list[str]:
        """Take the options of a checkpoint where nobody set them here.

        `keep` names paths that are never taken. Unknown options (of a newer version) are passed over.
        Returns a line for each option that was set here to another value.
        """
        differences = []
        for spec in all_options():
            values = saved.get(spec.group)
            if spec.path in keep or not isinstance(values, dict) or spec.name not in values:
                continue
            value = spec.checked(values[spec.name])
            mine = self.get(spec.path)
            if spec.path not in self.explicit:
                setattr(getattr(self, spec.group), spec.name, value)
                self.adopted.add(spec.path)
            elif mine != value:
                differences.append(f"{spec.path}: {mine} here, {value} in the checkpoint")
        return differences


def _below(name: str, folder: str) -> str:
    return folder if "://" in folder else f"{name.rstrip('/')}/{folder.lstrip('/')}"


def all_options() -> Iterator[OptionSpec]:
    """Yield the rows of the option table, group by group."""
    yield from _TABLE.values()


def find_option(path: str) -> OptionSpec:
    """Return the row of an option; OptionError with the nearest names if there is none."""
    spec = _TABLE.get(path)
    if spec is None:
        raise OptionError(f"there is no option {path!r}; {suggest(path, _TABLE)}")
    return spec


def _build_table() -> dict[str, OptionSpec]:
    groups = typing.get_type_hints(Options)
    table: dict[str, OptionSpec] = {}
    for group in (item.name for item in dataclasses.fields(Options)):
        if group not in ("explicit", "adopted"):
            table |= specs_of(group, groups[group])
    return table


_TABLE = _build_table()
