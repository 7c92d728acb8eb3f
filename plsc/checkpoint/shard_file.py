"""Write a data file of a checkpoint, and read its header and checksum.

The format is safetensors (https://huggingface.co/docs/safetensors, "Format"): eight bytes with the length
of the header, the header in JSON, then the tensors' bytes. The header's metadata has the offset of each part
in its whole tensor, in the layout of torch's HuggingFaceStorageWriter, so torch's reader can read the files.
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
from typing import Annotated, Any

import torch
from torch import Tensor

from plsc.checkpoint.manifest import SUFFIX, FileInfo
from plsc.data.native import crc32
from plsc.errors import CheckpointError
from plsc.storage.regular import open_regular, read_record

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


def shard_name(rank: int, mark: str = "0") -> str:
    """Return the file name of a rank's shard.

    mark: distinguishes saves of different steps. In a store without renames, the files of a new checkpoint
    then do not overwrite those of an older one of the same name.
    """
    return f"shard-{rank + 1:05d}-{mark}{SUFFIX}"


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


def checksum(
    path: Path, expected_bytes: int | None = None, after: Callable[[int], None] | None = None
) -> FileInfo:
    """Return the size and CRC-32 of a file of a folder. OSError for another size than `expected_bytes`.

    after: called with the bytes read so far, after each piece, which then is in the processor's cache.
    """
    size, crc = 0, 0
    buffer = memoryview(bytearray(_CHECKSUM_BYTES))
    with open_regular(path, path.parent, expected_bytes, buffering=0) as stream:
        while count := stream.readinto(buffer):
            size, crc = size + count, crc32(buffer[:count], crc)
            if after is not None:
                after(size)
    return FileInfo(size, crc)
