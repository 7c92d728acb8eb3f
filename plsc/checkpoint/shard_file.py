"""Write one data file of a checkpoint piece by piece, so that no more than a piece need be in memory.

The format is safetensors (https://huggingface.co/docs/safetensors, "Format"): eight bytes with the length
of the header, the header in JSON, then the tensors' bytes one after another. As torch's
HuggingFaceStorageWriter does, the header's metadata notes where each part begins in its whole tensor;
torch's reader and `plsc.checkpoint.layout` read it there.
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

import torch
from torch import Tensor

from plsc.checkpoint.layout import DTYPES, OFFSETS_KEY, PLACES_KEY
from plsc.checkpoint.manifest import SUFFIX, FileInfo
from plsc.data.native import crc32

PIECE_BYTES = 4 << 20
LARGEST_HEADER = 100_000_000  # bytes; safetensors reads no larger one
_VERSION_KEY, _VERSION = "DCP_VERSION", "1.0"  # of torch's notes in the metadata
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHARD = re.compile(rf"shard-\d{{5,}}-.+{re.escape(SUFFIX)}")

Chunks = Callable[[], Iterator[memoryview]]


@dataclass(frozen=True)
class Entry:
    """A tensor, or the rows of one, for a file.

    shape: of this part; offsets: where it begins in the whole tensor, one number a dimension. chunks:
    called once, when the part's turn comes; yields its bytes, row-major and little-endian, in pieces of any
    size. A piece may be overwritten as soon as the next one is asked for.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    chunks: Chunks

    @property
    def size(self) -> int:
        """Count the bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def shard_name(rank: int, mark: str = "0") -> str:
    """Return the file name of a rank's part.

    mark: tells saves of different steps apart, so that in a store without renames the files of a new
    checkpoint do not overwrite those of an older one of the same name.
    """
    return f"shard-{rank + 1:05d}-{mark}{SUFFIX}"


def is_shard(name: str) -> bool:
    """Whether a file has a name that `shard_name` gives."""
    return _SHARD.fullmatch(name) is not None


def is_shard_of(name: str, rank: int) -> bool:
    """Whether a data file has the name of a part of this rank."""
    return name.startswith(f"shard-{rank + 1:05d}-")


def tensor_chunks(tensor: Tensor) -> Chunks:
    """Return the pieces of a tensor of any type and device.

    A contiguous tensor on the CPU is not copied; of one on a device, a piece at a time is. One that is not
    contiguous is copied whole when its turn comes.
    """

    def pieces() -> Iterator[memoryview]:
        # One element with a stride of its own counts as contiguous, but not as bytes.
        flat = tensor.detach().reshape(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        for piece in flat.split(PIECE_BYTES):
            yield memoryview(piece.cpu().numpy())

    return pieces


def write_shard(path: str | os.PathLike[str], entries: Sequence[Entry]) -> FileInfo:
    """Write a new file, down to the disk; return its size and the CRC-32 of its bytes.

    Widest types come first, so that every tensor is aligned to its elements. If anything is raised, a part
    of the file is left.

    Raises:
        OSError: such as a full disk, or a file that is there already.
        ValueError: a key twice, a type that checkpoints do not hold, a part with more or fewer bytes
            than its shape says, a header beyond what safetensors reads.
    """
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.key))
    with Path(path).open("xb", buffering=0) as file:
        out = _Measured(file)
        out.write(memoryview(_header(ordered)))
        for entry in ordered:
            expected = out.size + entry.size
            for chunk in entry.chunks():
                out.write(chunk)
            if out.size != expected:
                raise ValueError(
                    f"{entry.key} came to {entry.size - expected + out.size} bytes, its shape says "
                    f"{entry.size}"
                )
        os.fsync(file.fileno())
    return FileInfo(out.size, out.crc)


def _header(entries: Sequence[Entry]) -> bytes:
    """Return the length and the JSON, padded so that the data begin at a multiple of 8 bytes."""
    parts: dict[str, object] = {}
    places = {}
    begin = 0
    for entry in entries:
        if entry.key in parts:
            raise ValueError(f"{entry.key} is in one file twice")
        if entry.dtype not in _NAMES or len(entry.offsets) != len(entry.shape):
            raise ValueError(
                f"{entry.key} is {entry.dtype} {entry.shape} at {entry.offsets}: not to be kept"
            )
        end = begin + entry.size
        parts[entry.key] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        places[entry.key] = {OFFSETS_KEY: list(entry.offsets)}
        begin = end
    metadata = {
        PLACES_KEY: json.dumps(places),
        _VERSION_KEY: _VERSION,
        "format": "pt",
    }
    text = json.dumps({"__metadata__": metadata, **parts}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise ValueError(f"{len(entries)} tensors need a header of {len(text)} bytes")
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
