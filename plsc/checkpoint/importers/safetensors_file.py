"""Tensors of a .safetensors file, read part by part (https://huggingface.co/docs/safetensors, "Format")."""

from __future__ import annotations

import json
import os

from safetensors import SafetensorError, safe_open

from plsc.checkpoint.importers.file_tensor import (
    FileTensor,
    RawFile,
    contiguous_strides,
    file_tensor,
)
from plsc.checkpoint.layout import DTYPES
from plsc.errors import CheckpointError


def read_safetensors_file(
    path: str | os.PathLike[str], follow_links: bool = False
) -> dict[str, FileTensor]:
    """Return the tensors of the file by name; their data are not read yet.

    Raises:
        CheckpointError: no such file, no whole safetensors file, or a type that we have not.
    """
    file = RawFile(path, follow_links)
    try:
        with safe_open(path, framework="pt"):
            pass  # the library has checked the header against the file
        length = int.from_bytes(file.read(0, 8), "little")
        header = json.loads(file.read(8, length))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no whole safetensors file: {' '.join(str(error).split())[:200]}; fetch it again"
        ) from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(f"{path}: {name[:80]!r} is {entry['dtype']}, which is not read")
        shape = tuple(entry["shape"])
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        strides = contiguous_strides(shape)
        dtype = DTYPES[entry["dtype"]]
        tensors[name] = file_tensor(file, begin, end, dtype, shape, strides, name[:80])
    return tensors
