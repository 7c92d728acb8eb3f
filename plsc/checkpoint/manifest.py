"""The manifest of a checkpoint: one JSON file, written last; the checkpoints in a folder or store.

A folder without a manifest is not a checkpoint. The manifest lists every tensor in the data files
(`plsc.checkpoint.shard_file`) with shape and dtype, and every data file with size and checksum. A checkpoint
can therefore be checked before any tensor data are read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from plsc.errors import CheckpointError, DataError
from plsc.storage import publish
from plsc.storage.regular import FileName, read_record
from plsc.storage.store import Store
from plsc.storage.urls import shown

FORMAT_VERSION: Literal[4] = 4  # the only one that is read: nothing was released before it
MANIFEST_NAME = publish.MANIFEST_NAME
SUFFIX = ".safetensors"  # of the data files
METRICS_KEY = "metrics"  # in the scalars: maps names to numbers
EMA = "ema"  # the callback that averages the network's weights; the names are those of `BACKBONE`
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

    kind: Annotated[str, "|".join(KINDS)]
    name: str
    of: str = ""

    @property
    def key(self) -> str:
        """The tensor's key in the checkpoint."""
        if self.kind in (CLASS_WEIGHTS, STATISTICS):
            return f"{f'heads.{self.of}' if self.of else 'head'}.{self.name}"
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


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's global shape, dtype (torch's name), whether it is sharded over files, and role."""

    shape: tuple[int, ...]
    dtype: Annotated[str, "bool|u?int8|int(16|32|64)|b?float16|float(32|64)"]
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
    class_ranges: list[tuple[int, int]]
    loss_type: str = ""
    num_samples: int | None = None
    computed_by: str | None = None


class LossScale(TypedDict):
    """State of `plsc.models.precision.LossScaler`."""

    scale: Annotated[float, (1, 2**53)]
    finite: int
    overflowed: int
    skipped: int
    stuck: int


class Scalars(TypedDict, total=False):
    """The types of some of the scalars; there may be others."""

    global_batch: int
    steps_per_epoch: int | None
    length_step: int
    length_epoch: int
    updates: int
    loss_scaling: LossScale | None
    optimizer_numbers: dict[str, Any]
    optimizer_groups: list[dict[str, Any]]
    optimizer_attributes: dict[str, Any]
    optimizer_own: dict[str, Any]
    callbacks: dict[str, Any]


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

    format_version: Literal[4] = field(default=FORMAT_VERSION, kw_only=True)
    plsc_version: str
    step: int
    epoch: int
    step_in_epoch: int
    world_size: int
    emb_size: int
    heads: dict[str, HeadInfo]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    scalars: Annotated[dict[str, Any], Scalars] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: dict[FileName, FileInfo] = field(default_factory=dict)
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
    def metrics(self) -> dict[str, float]:
        """The metrics by name, without values that are not finite numbers."""
        saved = self.scalars.get(METRICS_KEY)
        metrics = saved if isinstance(saved, dict) else {}
        return {name: x for name, x in metrics.items() if isinstance(x, float) and math.isfinite(x)}

    @property
    def shards(self) -> list[str]:
        """Sorted names of the files that hold tensors."""
        return sorted(name for name in self.files if name.endswith(SUFFIX))

    def to_json(self) -> str:
        """Return the manifest as JSON text. Raises TypeError or ValueError for an object or a NaN."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True, allow_nan=False)


OpenedCheckpoint = tuple[Path, Manifest]
"""The local folder of a checkpoint, and its manifest."""


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of the checkpoint folder ``path``, after checking the type of every field.

    Raises:
        CheckpointError: the folder or manifest is missing, or the manifest is damaged, larger than 64 MiB,
            or of another format. If it is a folder of checkpoints, the error lists them.
    """
    folder = Path(path)
    if (folder / MANIFEST_NAME).is_file():
        return parse_manifest(folder / MANIFEST_NAME, str(folder / MANIFEST_NAME))
    if inside := list_checkpoints(folder):
        names = ", ".join(checkpoint.name for checkpoint, _ in inside)
        raise CheckpointError(
            f"{folder} is not a checkpoint but a folder of checkpoints: {names}; use one of them, such as "
            f"{inside[-1][0]}"
        )
    raise CheckpointError(
        f"there is no complete checkpoint in {folder}: it has no {MANIFEST_NAME}; expected a folder such as "
        "saved_model/5"
    )


def parse_manifest(data: bytes | Path, source: str) -> Manifest:
    """Read a manifest, or its bytes, and check the type of every field.

    source: its path or URL, for messages.

    Raises:
        CheckpointError: as `read_manifest`.
    """
    manifest = read_record(Manifest, data, source, CheckpointError, LARGEST_MANIFEST)
    for key, info in manifest.tensors.items():
        if info.role.key != key:
            raise CheckpointError(f"{source}: the role of {key!r:.80} is {info.role!r:.200}")
    return manifest


def manifest_in(store: Store, name: str = "") -> Manifest:
    """Return the manifest of a checkpoint in a store. No name: the store's folder is the checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
        DataError: the store does not answer.
    """
    path = f"{name}/{MANIFEST_NAME}" if name else MANIFEST_NAME
    data = store.read(path, LARGEST_MANIFEST)
    where = shown(store.child(name)) if name else store.shown
    if data is None:
        raise CheckpointError(
            f"{where} is not a checkpoint: it has no {MANIFEST_NAME}; expected a path or URL such as "
            "saved_model/5 or hdfs://server/run/5"
        )
    return parse_manifest(data, f"{where}/{MANIFEST_NAME}")


def list_checkpoints(save_dir: str | os.PathLike[str]) -> list[OpenedCheckpoint]:
    """Return the checkpoints of the local folder ``save_dir`` with their manifests, fewest steps first.

    The list is empty if the folder does not exist. Raises DataError if it cannot be read.
    """
    folder = Path(save_dir)
    return [(folder / name, manifest) for name, manifest in checkpoints_in(Store(folder))]


def checkpoints_in(store: Store) -> list[tuple[str, Manifest]]:
    """Return names and manifests of the checkpoints in a folder or store, fewest steps first.

    Hidden folders and folders without a valid manifest are left out.
    """
    checkpoints = []
    for name in store.names(only_folders=True):
        if name.startswith("."):
            continue
        try:
            checkpoints.append((name, manifest_in(store, name)))
        except CheckpointError:
            continue
        except DataError:  # a local folder that this user cannot read
            if store.is_remote:
                raise
    return sorted(checkpoints, key=lambda entry: age_key(*entry))


def age_key(name: str, manifest: Manifest) -> tuple[int, int, str]:
    """Return the sort key of a checkpoint; the oldest sorts first."""
    return manifest.step, manifest.epoch, name
