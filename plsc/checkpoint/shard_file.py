"""One data file of a checkpoint: written, its header read and its checksum taken, piece by piece.

The format is safetensors (https://huggingface.co/docs/safetensors, "Format"): eight bytes with the length
of the header, the header in JSON, then the tensors' bytes one after another. As torch's
HuggingFaceStorageWriter does, the header's metadata notes where each part begins in its whole tensor: torch's
reader can read these files, too.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plsc.checkpoint.manifest import SUFFIX, Checker, FileInfo
from plsc.data.native import crc32

PIECE_BYTES = 4 << 20
_CHECKSUM_BYTES = 1 << 20  # read at once for a checksum: stays in the processor's cache
_LARGEST_HEADER = 100_000_000  # bytes; safetensors reads no larger one
_SHARD = re.compile(rf"shard-(\d{{5,}})-.+{re.escape(SUFFIX)}")
# torch's writer notes the place of each part under these names in a file's header.
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
    """A tensor, or the rows of one, for a file.

    shape: of this part; start: its first row in the whole tensor. chunks: called once, when the part's turn
    comes; yields its bytes, row-major and little-endian, in pieces of any size. A piece may be overwritten
    as soon as the next one is asked for.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    chunks: Chunks

    @property
    def size(self) -> int:
        """Count the bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def entry_of(key: str, tensor: Tensor, start: int = 0) -> Entry:
    """Return the entry of a tensor, or of rows from `start`."""
    return Entry(key, tensor.dtype, tuple(tensor.shape), start, tensor_chunks(tensor))


def tensor_chunks(tensor: Tensor) -> Chunks:
    """Return the pieces of a tensor of any type and device.

    A contiguous tensor on the CPU is not copied; of one on a device, a piece at a time is. One that is not
    contiguous is copied whole when its turn comes.
    """

    def pieces() -> Iterator[memoryview]:
        for piece in bytes_of(tensor).split(PIECE_BYTES):
            yield memoryview(piece.cpu().numpy())

    return pieces


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 [n], in its own memory if it is contiguous."""
    # One element with a stride of its own counts as contiguous, but not as bytes.
    return tensor.detach().reshape(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def shard_name(rank: int, mark: str = "0") -> str:
    """Return the file name of a rank's part.

    mark: tells saves of different steps apart, so that in a store without renames the files of a new
    checkpoint do not overwrite those of an older one of the same name.
    """
    return f"shard-{rank + 1:05d}-{mark}{SUFFIX}"


def rank_of_shard(name: str) -> int | None:
    """Return the rank whose part has this file name; None for any other name."""
    match = _SHARD.fullmatch(name)
    return None if match is None else int(match[1]) - 1


def write_shard(path: Path, entries: Sequence[Entry]) -> FileInfo:
    """Write a new file, down to the disk; return its size and the CRC-32 of its bytes.

    Widest types come first, so that every tensor is aligned to its elements. If anything is raised, such as
    OSError for a full disk, a part of the file is left.
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
    """Return the length and the JSON, padded so that the data begin at a multiple of 8 bytes."""
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
    """Writes to a raw file, counting bytes and keeping their CRC-32."""

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
            data = data[self._file.write(data) :]  # a raw file may take less than it is given


@dataclass(frozen=True)
class Part:
    """Rows of a tensor in a file, as its header says; a scalar is one row.

    shape: of the rows; start: number of the first one in the whole tensor; begin: of their bytes.
    """

    path: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    begin: int

    @property
    def stop(self) -> int:
        """The number of the row behind the last one."""
        return self.start + (self.shape[0] if self.shape else 1)


def read_header(path: Path) -> list[Part]:
    """Return the parts of tensors in a file; no tensor data are read.

    Raises CheckpointError for a damaged header, or one whose tensors would not be in the file.
    """
    check = Checker(str(path))
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                raise ValueError(f"its header would take {length} bytes of {size}")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        places = check.mapping(json.loads(metadata.get(PLACES_KEY, "null")), PLACES_KEY)
        return [
            _part(check, path, key, entry, check.item(places, key), 8 + length, size)
            for key, entry in header.items()
        ]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise check.wrong(f"it is no whole safetensors file: {error}") from error


def _part(check: Checker, path: Path, key: str, entry: Any, place: Any, data: int, size: int) -> Part:
    """Return a part of the header. data: where the tensors begin in the file, which has `size` bytes."""
    what = f"tensor {key!r}"
    entry = check.mapping(entry, what)
    dtype = check.text(check.item(entry, "dtype"), f"the dtype of {what}")
    shape = check.integers(check.item(entry, "shape"), f"the shape of {what}")
    ends = check.integers(check.item(entry, "data_offsets"), f"the bytes of {what}")
    offsets = check.item(check.mapping(place, f"the place of {what}"), OFFSETS_KEY)
    offsets = check.integers(offsets, f"the place of {what}")
    if dtype not in DTYPES or len(ends) != 2 or data + ends[1] > size:
        raise ValueError(f"{what} of {dtype} is not at bytes {ends}")
    if ends[1] - ends[0] != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{what} of {dtype} {shape} does not fit into bytes {ends}")
    if len(offsets) != len(shape) or any(offsets[1:]):
        raise check.wrong(f"{what} has a part {shape} at {offsets}, which are no whole rows")
    name = str(DTYPES[dtype]).removeprefix("torch.")
    return Part(path, key, name, tuple(shape), sum(offsets[:1]), data + ends[0])


def checksum(path: Path) -> FileInfo:
    """Return the size and CRC-32 of a file."""
    size, crc = 0, 0
    buffer = memoryview(bytearray(_CHECKSUM_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            size, crc = size + count, crc32(buffer[:count], crc)
    return FileInfo(size, crc)
