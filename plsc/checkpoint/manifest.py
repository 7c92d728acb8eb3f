"""The manifest of a checkpoint: one JSON file, written last.

A folder without a manifest is not a checkpoint. The manifest lists every tensor in the data files
(`plsc.checkpoint.shard_file`) with shape and dtype, and every data file with size and checksum. A checkpoint
can therefore be checked before any tensor data are read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plsc.errors import CheckpointError
from plsc.storage import publish
from plsc.storage.regular import parse_json, read_regular

FORMAT_VERSION = 4  # the only one that is read: nothing was released before it
MANIFEST_NAME = publish.MANIFEST_NAME
SUFFIX = ".safetensors"  # of the data files
EMA = "ema"  # the callback that averages the network's weights; the names are those of `BACKBONE`
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal may interpret them
_DEEPEST = 50  # levels of JSON; Python's recursion limit allows some hundred
LARGEST_MANIFEST = 64 * 2**20  # bytes

# Roles, stored with every tensor.

BACKBONE = "backbone"  # name: its key in the network's state dict
CLASS_WEIGHTS = "class_weights"  # a parameter of a head: weight or bias
STATISTICS = "head_statistics"  # a buffer of a head: statistics of its margin
OPTIMIZER = "optimizer"  # state of the network's optimizer
CLASS_OPTIMIZER = "class_optimizer"  # state of the optimizer of sharded class weights
RANK = "rank"  # of a single rank: random generators, buffers that differ between ranks
CLASS_NAMES = "class_names"
CALLBACK = "callback"  # state of a callback
EXTRA = "extra"
KINDS = (
    BACKBONE, CLASS_WEIGHTS, STATISTICS, OPTIMIZER, CLASS_OPTIMIZER, RANK, CLASS_NAMES, CALLBACK, EXTRA
)  # fmt: skip


@dataclass(frozen=True)
class Role:
    """What a tensor is.

    Attributes:
        kind: one of KINDS.
        name: such as ``weight``, ``momentum_buffer`` or ``random``.
        of: for class weights, statistics and class names the head's name, empty for a single head; for
            optimizer state the key of its parameter; for `RANK` the rank's number; for `CALLBACK` the name
            of the callback.
    """

    kind: str
    name: str
    of: str = ""

    @property
    def key(self) -> str:
        """The tensor's key in the checkpoint."""
        if self.kind in (CLASS_WEIGHTS, STATISTICS):
            return f"{head_prefix(self.of)}.{self.name}"
        if self.kind == OPTIMIZER:
            is_momentum = self.name == "momentum_buffer"
            return f"momentum.{self.of}" if is_momentum else f"optimizer.{self.name}.{self.of}"
        if self.kind == CLASS_OPTIMIZER:
            return f"rows.{self.of.partition('.')[2]}.{self.name}"
        if self.kind == RANK:
            return f"rank{self.of}.{self.name}"
        if self.kind == CALLBACK:
            return f"callbacks.{self.of}.{self.name}"
        if self.kind == CLASS_NAMES:
            return ".".join(filter(None, (CLASS_NAMES, self.of, self.name)))
        return f"{BACKBONE}.{self.name}" if self.kind == BACKBONE else self.name


def head_prefix(name: str) -> str:
    """Return the common prefix of a head's keys; name: empty for a single head."""
    return f"heads.{name}" if name else "head"


_PATTERNS = (
    (BACKBONE, r"backbone\.(?P<name>.+)"),
    (CLASS_WEIGHTS, r"(head|heads\.(?P<of>[^.]+))\.(?P<name>weight|bias)"),
    (STATISTICS, r"(head|heads\.(?P<of>[^.]+))\.(?P<name>.+)"),
    (OPTIMIZER, r"(momentum|optimizer\.(?P<name>[^.]+))\.(?P<of>.+)"),
    (CLASS_OPTIMIZER, r"rows\.(?P<of>([^.]+\.)?(weight|bias))\.(?P<name>[^.]+)"),
    (RANK, r"rank(?P<of>\d+)\.(?P<name>.+)"),
    (EXTRA, r"(?P<name>.*)"),
)


def role_of_key(key: str) -> Role:
    """Return the role of a tensor from its key, for importers."""
    matches = ((kind, re.fullmatch(pattern, key, re.DOTALL)) for kind, pattern in _PATTERNS)
    kind, match = next((kind, match) for kind, match in matches if match)
    role = {name: text for name, text in match.groupdict().items() if text is not None}
    if kind == CLASS_OPTIMIZER:
        role["of"] = f"{'heads' if '.' in role['of'] else 'head'}.{role['of']}"
    return Role(kind, **{"name": "momentum_buffer", **role})


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's global shape, dtype (torch's name), whether it is sharded over files, and role."""

    shape: tuple[int, ...]
    dtype: str
    sharded: bool
    role: Role


@dataclass(frozen=True)
class FileInfo:
    """Size and CRC-32 of a data file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class HeadInfo:
    """A head: its classes, and the data that it was trained on.

    class_ranges: [start, stop) of the classes for each rank that saved. num_samples: None if unknown.
    computed_by: the backend and its choices, which a resumed run keeps.
    """

    class_num: int
    class_ranges: list[list[int]]
    loss_type: str = ""
    num_samples: int | None = None
    computed_by: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint but tensor data.

    Attributes:
        heads: by name; the name of a single head is empty. Only checkpoints of the former option
            `data.datasets` have several.
        options: the options of the run, as nested dictionaries.
        scalars: JSON state of the optimizer, the schedule and others.
        tensors, files: filled in by `save_checkpoint`.
        lineage: past changes of the classes, oldest first (see `plsc.checkpoint.classes`).
        run_id: of the run that saved it; only that run may delete it. A run resumed in place keeps its id.
            Empty if unknown.
    """

    plsc_version: str
    step: int
    epoch: int
    step_in_epoch: int
    world_size: int
    emb_size: int
    heads: dict[str, HeadInfo]
    options: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: dict[str, FileInfo] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    lineage: list[dict[str, Any]] = field(default_factory=list)
    run_id: str = ""

    @property
    def class_num(self) -> int:
        """Number of classes; of several heads together."""
        return sum(head.class_num for head in self.heads.values())

    @property
    def head(self) -> HeadInfo:
        """The head. Raises CheckpointError unless there is a single one, without a name."""
        if "" not in self.heads:
            raise CheckpointError(
                f"the checkpoint has the heads {str(list(self.heads))[:200]} of the former option "
                "data.datasets; only its network can be used"
            )
        return self.heads[""]

    @property
    def shards(self) -> list[str]:
        """Sorted names of the files that hold tensors."""
        return sorted(name for name in self.files if name.endswith(SUFFIX))

    def to_json(self) -> str:
        """Return the manifest as JSON text.

        Raises:
            CheckpointError: options or scalars are not valid JSON, such as an object or a NaN.
        """
        try:
            return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the options or scalars of a checkpoint must be finite JSON values: {error}"
            ) from error


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of the checkpoint folder ``path``, after checking the type of every field.

    Raises:
        CheckpointError: the folder or manifest is missing, or the manifest is damaged, larger than 64 MiB,
            or of another format.
    """
    folder = Path(path)
    try:
        if not folder.is_dir():
            raise CheckpointError(
                f"there is no checkpoint folder {folder}; expected a path such as saved_model/5"
            )
        file = folder / MANIFEST_NAME
        if not file.is_file():
            raise CheckpointError(
                f"{folder} has no {MANIFEST_NAME}: it is not a checkpoint, or was not saved completely; "
                "expected a folder such as saved_model/5"
            )
        data = read_regular(file, LARGEST_MANIFEST, folder)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    return parse_manifest(data, str(file))


def parse_manifest(data: bytes, source: str) -> Manifest:
    """Parse the bytes of a manifest and check the type of every field.

    source: its path or URL, for messages.

    Raises:
        CheckpointError: as `read_manifest`.
    """
    if len(data) > LARGEST_MANIFEST:
        raise CheckpointError(f"{source} is larger than {LARGEST_MANIFEST} bytes; it is not a plsc manifest")
    try:
        content = parse_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not JSON: {error}; choose another checkpoint") from error
    _check_plain(source, content)
    return _build(Checker(source), content)


def _check_plain(source: str, content: object) -> None:
    """Raise CheckpointError if a string has control characters, or the nesting is too deep."""
    level = [content]
    for _ in range(_DEEPEST):
        if any(isinstance(value, str) and _CONTROL.search(value) for value in level):
            raise CheckpointError(f"{source} contains control characters; choose another checkpoint")
        level = [
            inner
            for value in level
            if isinstance(value, (dict, list))
            for inner in ([*value, *value.values()] if isinstance(value, dict) else value)
        ]
    if level:
        raise CheckpointError(f"{source} is nested more than {_DEEPEST} levels; choose another checkpoint")


def _build(check: Checker, content: object) -> Manifest:
    top = check.mapping(content, "the manifest")
    version = check.integer(check.item(top, "format_version"), "format_version")
    if version != FORMAT_VERSION:
        advice = "upgrade plsc" if version > FORMAT_VERSION else "train again, or use the plsc that saved it"
        raise check.wrong(f"format_version is {version}, but this plsc reads only {FORMAT_VERSION}", advice)
    counts = {
        name: check.integer(check.item(top, name), name)
        for name in ("step", "epoch", "step_in_epoch", "world_size", "emb_size")
    }
    heads = check.mapping(check.item(top, "heads"), "heads")
    tensors = check.mapping(check.item(top, "tensors"), "tensors")
    files = check.mapping(check.item(top, "files"), "files")
    scalars = check.mapping(check.item(top, "scalars"), "scalars")
    options = check.mapping(check.item(top, "options"), "options")
    return Manifest(
        format_version=version,
        plsc_version=check.text(check.item(top, "plsc_version"), "plsc_version"),
        **counts,
        heads={name: _head(check, name, value) for name, value in heads.items()},
        options=options,
        scalars=scalars,
        tensors={key: _tensor(check, key, value) for key, value in tensors.items()},
        files={name: _file(check, name, value) for name, value in files.items()},
        lineage=[
            check.mapping(change, "a change of the lineage")
            for change in check.listing(check.item(top, "lineage"), "lineage")
        ],
        run_id=check.text(check.item(top, "run_id"), "run_id"),
    )


def _head(check: Checker, name: str, value: object) -> HeadInfo:
    what = f"head {name!r}"
    entry = check.mapping(value, what)
    num_samples, computed_by = (check.item(entry, key) for key in ("num_samples", "computed_by"))
    return HeadInfo(
        check.integer(check.item(entry, "class_num"), f"the number of classes of {what}"),
        [
            check.integers(pair, f"a class range of {what}")
            for pair in check.listing(check.item(entry, "class_ranges"), f"the class ranges of {what}")
        ],
        check.text(check.item(entry, "loss_type"), f"the loss type of {what}"),
        None if num_samples is None else check.integer(num_samples, f"the number of images of {what}"),
        None if computed_by is None else check.text(computed_by, f"the backend of {what}"),
    )


def _tensor(check: Checker, key: str, value: object) -> TensorInfo:
    what = f"tensor {key!r}"
    entry = check.mapping(value, what)
    sharded = check.item(entry, "sharded")
    if not isinstance(sharded, bool):
        raise check.wrong(f"'sharded' of {what} is {sharded!r}, expected true or false")
    return TensorInfo(
        tuple(check.integers(check.item(entry, "shape"), f"the shape of {what}")),
        check.text(check.item(entry, "dtype"), f"the dtype of {what}"),
        sharded,
        _role(check, key, check.item(entry, "role")),
    )


def _role(check: Checker, key: str, value: object) -> Role:
    entry = check.mapping(value, f"the role of {key!r}")
    kind, name, of = (
        check.text(check.item(entry, part), f"the {part} of the role of {key!r}")
        for part in ("kind", "name", "of")
    )
    if kind not in KINDS or Role(kind, name, of).key != key:
        raise check.wrong(f"the role of {key!r} is {repr(value)[:200]}, which does not match this key")
    return Role(kind, name, of)


def _file(check: Checker, name: str, value: object) -> FileInfo:
    # The name is joined to the folder's path, so it must be a single path component.
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise check.wrong(f"data file {name!r} is not a plain file name")
    entry = check.mapping(value, f"data file {name!r}")
    return FileInfo(
        check.integer(check.item(entry, "bytes"), f"the size of {name!r}"),
        check.integer(check.item(entry, "crc32"), f"the checksum of {name!r}"),
    )


class Checker:
    """Check the types of values read from ``source``, a path or URL for messages.

    All methods raise CheckpointError.
    """

    def __init__(self, source: str) -> None:
        self.source = source

    def wrong(self, what: str, advice: str = "choose another checkpoint") -> CheckpointError:
        """Return an error about this file."""
        return CheckpointError(f"{self.source}: {what}; {advice}")

    def item(self, mapping: dict[str, Any], key: str) -> Any:
        """Return the value of a required key."""
        if key not in mapping:
            raise self.wrong(f"{key!r} is missing")
        return mapping[key]

    def mapping(self, value: object, what: str) -> dict[str, Any]:
        """Return a JSON object as a dictionary."""
        if not isinstance(value, dict):
            raise self._type(value, what, "an object")
        return value

    def listing(self, value: object, what: str) -> list[Any]:
        """Return a list."""
        if not isinstance(value, list):
            raise self._type(value, what, "a list")
        return value

    def integer(self, value: object, what: str) -> int:
        """Return an integer of 0 or more; a boolean is an error."""
        if type(value) is not int or not 0 <= value < 2**63:
            raise self._type(value, what, "an integer of 0 or more")
        return value

    def integers(self, value: object, what: str) -> list[int]:
        """Return a list of integers of 0 or more."""
        return [self.integer(one, what) for one in self.listing(value, what)]

    def text(self, value: object, what: str) -> str:
        """Return a string."""
        if not isinstance(value, str):
            raise self._type(value, what, "a string")
        return value

    def _type(self, value: object, what: str, expected: str) -> CheckpointError:
        return self.wrong(f"{what} is {repr(value)[:80]}, expected {expected}")
