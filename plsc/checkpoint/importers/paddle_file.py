"""Read a variable that Paddle 1.x saved (fluid.io.save_vars): one LoDTensor a file.

uint32 version 0; uint64 number of levels, and for each a uint64 size and so many bytes; uint32 version 0;
int32 size of a protobuf TensorDesc {data_type = 1; repeated int64 dims = 2}; the numbers. Little-endian.
Format: paddle/fluid/framework/lod_tensor.cc (SerializeToStream), tensor_util.cc (TensorToStream) and
framework.proto.
"""

from __future__ import annotations

import math
import os

import torch

from plsc.checkpoint.importers.file_tensor import (
    FileTensor,
    RawFile,
    contiguous_strides,
    file_tensor,
)
from plsc.errors import CheckpointError

_LONGEST_DESCRIPTION = 1024
_TYPES = {
    2: torch.int32,
    3: torch.int64,
    4: torch.float16,
    5: torch.float32,
    6: torch.float64,
    22: torch.bfloat16,
}


def read_paddle_file(path: str | os.PathLike[str]) -> FileTensor:
    """Return the tensor of one file; its data are not read yet.

    Raises:
        CheckpointError: no such file, not this format, or more or fewer bytes than its dimensions say.
    """
    file = RawFile(path)
    try:
        dtype, shape, begin = _header(file)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no variable of Paddle 1.x: {error}; expected a file of fluid.io.save_vars"
        ) from error
    if begin + math.prod(shape) * dtype.itemsize != file.size:
        raise CheckpointError(
            f"{path} has {file.size} bytes, its dimensions {str(list(shape))[:80]} need "
            f"{begin + math.prod(shape) * dtype.itemsize}; it is truncated or damaged; fetch it again"
        )
    return file_tensor(
        file, begin, file.size, dtype, shape, contiguous_strides(shape), "the variable"
    )


def _header(file: RawFile) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Return the type, the dimensions and where the data begin."""
    if file.size < 20:
        raise ValueError(f"it has {file.size} bytes")
    if file.read(0, 4) != bytes(4):
        raise ValueError(f"it begins with {file.read(0, 4).hex(' ')}, not with version 0")
    levels = int.from_bytes(file.read(4, 8), "little")
    if levels:
        raise ValueError(f"it has {levels} levels of detail, a weight has none")
    length = int.from_bytes(file.read(16, 4), "little")
    if file.read(12, 4) != bytes(4) or not 0 < length <= _LONGEST_DESCRIPTION:
        raise ValueError(f"its description takes {length} bytes")
    return (*_parse(file.read(20, length)), 20 + length)


def _parse(message: bytes) -> tuple[torch.dtype, tuple[int, ...]]:
    kind, dims, position = None, [], 0
    while position < len(message):
        tag, position = _varint(message, position)
        value, position = _varint(message, position)
        if tag == 0x08:
            kind = value
        elif tag == 0x10:
            dims.append(value)
        elif tag == 0x12:  # the same numbers in one piece; value is its length
            end = position + value
            while position < end:
                value, position = _varint(message, position)
                dims.append(value)
        else:
            raise ValueError(f"its description has a field {tag:#x}")
    if kind not in _TYPES:
        raise ValueError(f"its numbers are of type {kind}")
    if len(dims) > 8 or any(size >= 1 << 48 for size in dims):
        raise ValueError(f"its dimensions are {str(dims)[:80]}")
    return _TYPES[kind], tuple(dims)


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            raise ValueError("its description is cut short")
        byte = message[position]
        value, position = value | (byte & 127) << shift, position + 1
        if byte < 128:
            return value, position
    raise ValueError("its description holds no number where one should be")
