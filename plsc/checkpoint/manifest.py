"""The files of a checkpoint: the manifest, which describes it, and the shard files with its tensors."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import torch
from torch import Tensor

from plsc.data.native import crc32
from plsc.errors import CheckpointError, DataError
from plsc.storage.disk import MANIFEST_NAME, open_regular, read_record
from plsc.storage.store import Store
from plsc.storage.urls import shown

FORMAT_VERSION: Literal[4] = 4  # the only one that is read: nothing was released before it
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
        of: for optimizer state the key of its parameter; for `RANK` the rank's number; for `CALLBACK` the
            name of the callback; otherwise empty.
    """

    kind: Annotated[str, "|".join(KINDS)]
    name: str
    of: str = ""

    @property
    def key(self) -> str:
        """The tensor's key in the checkpoint."""
        if self.kind in (CLASS_WEIGHTS, STATISTICS):
            return f"head.{self.name}"
        if self.kind == OPTIMIZER:
            is_momentum = self.name == "momentum_buffer"
            return f"momentum.{self.of}" if is_momentum else f"optimizer.{self.name}.{self.of}"
        if self.kind == CLASS_OPTIMIZER:
            return f"rows.{self.of.partition('.')[2]}.{self.name}"
        if self.kind == RANK:
            return f"rank{self.of}.{self.name}"
        if self.kind == CALLBACK:
            return f"callbacks.{self.of}.{self.name}"
        return f"{self.kind}.{self.name}" if self.kind in (BACKBONE, CLASS_NAMES) else self.name


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


_Heads = TypedDict("_Heads", {"": HeadInfo})
_DATA_NAME = r"(?#a plain file name)(?!\.\.?$)[0-9A-Za-z_.-]+"  # a server would decode or cut others


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
        heads: the head, whose name is empty.
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
    heads: _Heads
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    scalars: Annotated[dict[str, Any], Scalars] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: dict[Annotated[str, _DATA_NAME], FileInfo] = field(default_factory=dict)
    lineage: list[dict[str, Any]] = field(default_factory=list)
    run_id: str = ""

    @property
    def class_num(self) -> int:
        """Number of classes."""
        return self.head.class_num

    @property
    def head(self) -> HeadInfo:
        """The head."""
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
    why = f"it has no {MANIFEST_NAME}" if folder.exists() else "it does not exist"
    raise CheckpointError(f"{folder} is no complete checkpoint: {why}; expected one such as saved_model/5")


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


PIECE_BYTES = 4 << 20
_CHECKSUM_BYTES = 1 << 20  # read at once for a checksum; fits the processor's cache
_LARGEST_HEADER = 100_000_000  # bytes; the limit of safetensors
_SHARD = re.compile(rf"shard-(\d{{5,}})-.+{re.escape(SUFFIX)}")
# torch's writer stores the offsets of each part under these keys of a file's header.
PLACES_KEY = "DCP_SHARDING_INFO"
OFFSETS_KEY = "saved_offsets"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Chunks = Callable[[], Iterator[memoryview]]


@dataclass(frozen=True)
class Entry:
    """A tensor, or some rows of one, to write to a file.

    Attributes:
        shape: of this part.
        start: index of its first row in the whole tensor.
        chunks: called once; yields the bytes, row-major and little-endian, in pieces of any size. A piece
            may be overwritten when the next one is requested.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    chunks: Chunks

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def entry_of(key: str, tensor: Tensor, start: int = 0) -> Entry:
    """Return the entry of a tensor, or of a part whose first row is `start`."""
    return Entry(key, tensor.dtype, tuple(tensor.shape), start, tensor_chunks(tensor))


def tensor_chunks(tensor: Tensor) -> Chunks:
    """Return the chunks of a tensor of any dtype and device.

    A contiguous CPU tensor is not copied, and a contiguous GPU tensor is copied piece by piece. A tensor
    that is not contiguous is copied as a whole when it is written.
    """

    def pieces() -> Iterator[memoryview]:
        for piece in bytes_of(tensor).split(PIECE_BYTES):
            yield memoryview(piece.cpu().numpy())

    return pieces


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 [n]; a view if it is contiguous."""
    # A single element with any stride counts as contiguous, but its byte view would not.
    return tensor.detach().reshape(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def shard_name(rank: int) -> str:
    """Return a new file name for a rank's shard, such as ``shard-00001-0f3a9b1c.safetensors``.

    No two checkpoints have files of one name: in a store without renames, an upload overwrites nothing.
    """
    return f"shard-{rank + 1:05d}-{secrets.token_hex(4)}{SUFFIX}"


def rank_of_shard(name: str) -> int | None:
    """Return the rank whose shard has this file name; None for any other name."""
    match = _SHARD.fullmatch(name)
    return None if match is None else int(match[1]) - 1


def write_shard(path: Path, entries: Sequence[Entry]) -> FileInfo:
    """Write a new file and flush it to the disk; return its size and CRC-32.

    The widest dtypes come first, so that each tensor is aligned to its elements. On an error, such as
    OSError for a full disk, a partial file is left.
    """
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.key))
    with path.open("xb", buffering=0) as file:
        out = _Measured(file)
        out.write(memoryview(_header(ordered)))
        for entry in ordered:
            for chunk in entry.chunks():
                out.write(chunk)
        os.fsync(file.fileno())
    return FileInfo(out.size, out.crc)


def _header(entries: Sequence[Entry]) -> bytes:
    """Return the header's length and JSON, padded so that the data begin at a multiple of 8 bytes."""
    parts: dict[str, object] = {}
    places = {}
    begin = 0
    for entry in entries:
        end = begin + entry.size
        parts[entry.key] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        places[entry.key] = {OFFSETS_KEY: [entry.start, *(0 for _ in entry.shape)][: len(entry.shape)]}
        begin = end
    metadata = {PLACES_KEY: json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    text = json.dumps({"__metadata__": metadata, **parts}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Measured:
    """Write to a raw file; count the bytes and compute their CRC-32."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.size = 0
        self.crc = 0

    def write(self, data: memoryview) -> None:
        if not data.nbytes:
            return
        data = data.cast("B")
        self.crc = crc32(data, self.crc)
        self.size += len(data)
        while data:
            data = data[self._file.write(data) :]  # one write may accept fewer bytes


@dataclass(frozen=True)
class Part:
    """Rows of a tensor in a file, as described by the header; a scalar counts as one row.

    shape: of these rows; start: index of the first one in the whole tensor; begin: byte offset in the file.
    """

    path: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    begin: int

    @property
    def stop(self) -> int:
        """Index after the last row."""
        return self.start + (self.shape[0] if self.shape else 1)


@dataclass(frozen=True)
class _Stored:
    dtype: Annotated[str, "|".join(DTYPES)]
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class _Place:
    saved_offsets: list[int]


def read_header(path: Path) -> list[Part]:
    """Return the tensor parts in a file; no tensor data are read.

    Raises CheckpointError if the header is damaged or describes tensors outside the file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        # JSON that ends with the file is incomplete; a header over the limit is refused by its length.
        text = file.read(min(length, _LARGEST_HEADER + 1))
        header = read_record(dict[str, Any], text, path, most=_LARGEST_HEADER)
    metadata = read_record(dict[str, str], header.pop("__metadata__", {}), path)
    places = read_record(dict[str, _Place], metadata.get(PLACES_KEY, "{}").encode(), path)
    parts = []
    for key, about in read_record(dict[str, _Stored], header, path).items():
        dtype, (begin, end), place = DTYPES[about.dtype], about.data_offsets, places.get(key)
        offsets = [] if place is None else place.saved_offsets
        if (
            end - begin != math.prod(about.shape) * dtype.itemsize
            or 8 + length + end > size
            or len(offsets) != len(about.shape)
            or any(offsets[1:])  # not whole rows
        ):
            raise CheckpointError(f"{path}: {key!r:.80}, {about}, cannot be at {offsets} of a tensor")
        name = str(dtype).removeprefix("torch.")
        parts.append(Part(path, key, name, about.shape, sum(offsets[:1]), 8 + length + begin))
    return parts


def checksum(path: Path, expected_bytes: int | None = None) -> FileInfo:
    """Return the size and CRC-32 of a file of a folder. OSError for another size than `expected_bytes`."""
    size, crc = 0, 0
    buffer = memoryview(bytearray(_CHECKSUM_BYTES))
    with open_regular(path, path.parent, expected_bytes, buffering=0) as stream:
        while count := stream.readinto(buffer):
            size, crc = size + count, crc32(buffer[:count], crc)
    return FileInfo(size, crc)
