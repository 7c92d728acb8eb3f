"""The table of all options of a run, the configuration that is resolved from it, and the setters of Entry.

Command-line flags, config files, docs/options.md and the options in a checkpoint are derived from
this table. Its rows are declared in the other files of this folder. The path of an option, such as
``train.batch_size``, is its name.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from plsc.config.data_and_model import DataOptions, HeadOptions, ModelOptions
from plsc.config.option import Need, OptionSpec, shown_value, specs_of
from plsc.config.train import (
    CheckpointOptions,
    MemoryOptions,
    OptimOptions,
    PrecisionOptions,
    RuntimeOptions,
    SpeedOptions,
    TrainOptions,
)
from plsc.errors import CheckpointError, OptionError, record_failure, without_our_frames

SCRIPT, CHECKPOINT = "set by the script", "from the checkpoint"
"""Origins of values; those of flags and of lines of files are their names."""


@dataclass(frozen=True)
class Config:
    """The options of a run, frozen: values that were set, values from a checkpoint, and defaults.

    origins: where each value that is not the default comes from, by path. differences: one line per option
    that was set to a value other than the checkpoint's. arguments: constructor arguments of a custom
    network, from a checkpoint.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    head: HeadOptions = field(default_factory=HeadOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    speed: SpeedOptions = field(default_factory=SpeedOptions)
    origins: Mapping[str, str] = field(default_factory=dict)
    differences: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def explicit(self) -> frozenset[str]:
        """The paths of the options that were set."""
        return frozenset([path for path, origin in self.origins.items() if origin != CHECKPOINT])

    @property
    def adopted(self) -> frozenset[str]:
        """The paths of the options that come from a checkpoint."""
        return frozenset([path for path, origin in self.origins.items() if origin == CHECKPOINT])

    def get(self, path: str) -> Any:
        """Return the value of the option at a path such as ``train.batch_size``."""
        spec = find_option(path)
        return getattr(getattr(self, spec.group), spec.name)

    def changed(self, values: Mapping[str, Any]) -> Config:
        """Return a copy with other values, by path; `origins` is unchanged."""
        groups: dict[str, Any] = {}
        for path, value in values.items():
            spec = find_option(path)
            group = groups.get(spec.group, getattr(self, spec.group))
            groups[spec.group] = replace(group, **{spec.name: value})
        return replace(self, **groups)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the options as nested plain values, by group and name, for JSON or YAML."""
        return {
            group: {name: list(one) if isinstance(one, tuple) else one for name, one in vars(found).items()}
            for group, found in vars(self).items()
            if group in _GROUPS
        }

    def without_effect(self) -> Iterator[tuple[str, Need]]:
        """Yield the options that were set, not to their default, and a need of each that does not hold."""
        explicit = self.explicit
        for spec in [one for path, one in _TABLE.items() if one.needs and path in explicit]:
            unmet = [one for one in spec.needs if not one.holds(self)]
            if unmet and self.get(spec.path) != spec.default:
                yield spec.path, unmet[0]

    def idle_note(self) -> str:
        """Return a line that lists options without effect, with the reasons, or an empty string."""
        idle = [f"{path} ({unmet.path} is {self.get(unmet.path)})" for path, unmet in self.without_effect()]
        return f"note: these options have no effect in this run: {', '.join(idle)}" if idle else ""

    def check_needs(self) -> None:
        """Raise OptionError for an option that was set although a strict need of it does not hold."""
        for path, unmet in self.without_effect():
            if unmet.is_strict:
                value = shown_value(self.get(path))
                raise OptionError(
                    f"{path} is {value}, which has an effect only if {unmet.text}; remove {path}"
                )


class Options:
    """Mutable options: `values` has the values that were set, by path, `origins` where; see `resolve`."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        """Return a group with the values set so far, as ``options.train``, or an attribute of `Config`."""
        if name in _GROUPS:
            return _GROUPS[name](**_of_group(name, self.values))
        if name.startswith("__"):  # copy and pickle look up special methods
            raise AttributeError(name)
        return getattr(self.resolve(), name)

    def get(self, path: str) -> Any:
        """Return the value that was set, or the default."""
        return self.values.get(path, find_option(path).default)

    def resolve(self, saved: Mapping[str, Any] | None = None, use: Literal["model", "run"] = "run") -> Config:
        """Return the configuration: values that were set, else those of a checkpoint, else defaults.

        saved: options from the manifest of a checkpoint. use: whether only its network or its whole run is
        used. Options that are never taken from a checkpoint and unknown ones (of a newer version) are
        ignored. Raises CheckpointError for an invalid or unsafe value, and for a former option of a run that
        had another value than all runs have now.
        """
        adopted, differences = {}, []
        for path, only in _GONE.items() if use == "run" else ():
            of, _, name = path.partition(".")
            here = (saved or {}).get(of)
            if isinstance(here, dict) and here.get(name, only) != only:
                raise CheckpointError(
                    f"{path} is {shown_value(here[name])} in the checkpoint, but all runs now have {only!r}"
                )
        for spec in _TABLE.values():
            group = (saved or {}).get(spec.group)
            if spec.decides not in ("model", use) or not isinstance(group, dict) or spec.name not in group:
                continue
            value = spec.saved(group[spec.name])
            mine = self.values.get(spec.path, spec)
            if mine is spec:
                adopted[spec.path] = spec.harmless(value)
            elif mine != value:
                differences.append(f"{spec.path}: {mine} here, {value} in the checkpoint")
        values = {**adopted, **self.values}
        groups = {name: factory(**_of_group(name, values)) for name, factory in _GROUPS.items()}
        origins = {**dict.fromkeys(adopted, CHECKPOINT), **self.origins}
        return Config(**groups, origins=origins, differences=tuple(differences))

    def set(self, path: str, value: Any, origin: str = SCRIPT) -> None:
        """Validate and set an option. Raises OptionError for an unknown path or an invalid value."""
        self.set_together({path: value}, origin)

    def set_together(self, values: Mapping[str, Any], origin: str = SCRIPT) -> None:
        """Set several options, or none of them if one is invalid."""
        self.values |= {path: find_option(path).checked(value) for path, value in values.items()}
        self.origins |= dict.fromkeys(values, origin)


def all_options() -> Iterator[OptionSpec]:
    """Yield all options, group by group."""
    yield from _TABLE.values()


def find_option(path: str) -> OptionSpec:
    """Return the option at a path. Raises OptionError, with the nearest path, if there is none."""
    spec = _TABLE.get(path)
    if spec is None:
        raise OptionError(f"unknown option {path!r}{nearest_option(path)}")
    return spec


def nearest_option(path: str) -> str:
    """Return ``; did you mean 'train.batch_size'?`` for a misspelt path or one without its group."""
    name = path.rpartition(".")[2].removeprefix("set_")
    names = {spec.name for spec in _TABLE.values()}
    if name in SYNONYMS:
        near = [SYNONYMS[name]]
    elif name in names:
        near = [known for known, spec in _TABLE.items() if spec.name == name]
    else:
        near = difflib.get_close_matches(path, _TABLE, 1, cutoff=0.85)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


SYNONYMS = {
    "batch_size": "train.batch_size",
    "learning_rate": "optim.lr",
    "epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "max_steps": "train.steps",
    "backbone": "model.name",
    "scheduler": "optim.schedule",
}


_GONE: dict[str, Any] = {
    "data.balance": 0.5,
    "data.block_samples": 1024,
    "data.datasets": [],
    "data.images_per_class": 4,
    "data.order_arguments": None,
    "data.pool_samples": 65536,
    "head.initial_norm": None,
    "head.keep_mb": 0.0,
    "head.kernels": "auto",
    "head.products": "auto",
    "optim.decay_norm_and_bias": True,
    "optim.l1_decay": 0.0,
    "optim.lr_decay_factor": 0.1,
    "optim.schedule_arguments": None,
    "optim.step_boundaries": [100000, 160000, 220000],
    "optim.warmup_epochs": 0,
    "parallel.backbone": "replicated",
    "precision.evaluation": "float32",
    "precision.loss_scaling": "auto",
    "precision.white_list": [],
    "precision.black_list": [],
    "runtime.dtype": "float32",
    "speed.bucket_mb": 25.0,
    "speed.channels_last": "auto",
    "speed.late_losses": True,
    "train.overfit_batches": 0,
}
"""Former options that decided a resumed run, and the value that all runs have now."""

_GROUPS: dict[str, Any] = {
    group: factory
    for group, factory in typing.get_type_hints(Config).items()
    if isinstance(factory, type) and dataclasses.is_dataclass(factory)
}
_TABLE = {path: spec for group, factory in _GROUPS.items() for path, spec in specs_of(group, factory).items()}


def _of_group(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group, by name."""
    prefix = f"{group}."
    return {path.removeprefix(prefix): value for path, value in values.items() if path.startswith(prefix)}


class Setters:  # setters.pyi has them for editors and type checkers
    """Setters that check a value and put it into `options`; OptionError says what was expected."""

    __slots__ = ("options",)

    options: Options


def _setter(spec: OptionSpec) -> Callable[..., None]:
    """Return a method that takes a value, ``**`` items of a mapping, or both.

    ``**arguments`` are those of the value; items by another name are the option of that name in the group.
    """
    value, _, mapping = spec.argument.replace(" ", "").partition("**")
    value = value.rstrip(",")
    kinds: dict[str, Any] = {"self": inspect.Parameter.POSITIONAL_OR_KEYWORD}
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


for _spec in reversed(_TABLE.values()):  # the first option of a setter describes it
    if _spec.setter:
        setattr(Setters, _spec.setter, _setter(_spec))
