"""A tensor that lies in a file of another program's, read when it is asked for, in part or whole."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plsc.errors import CheckpointError

_LONGEST_READ = 1 << 30  # one system call takes no more than 2 GiB


class RawFile:
    """A regular file, read at given places. Not mapped into memory: a file that shrinks would end us.

    Raises:
        CheckpointError: it cannot be opened, or is no regular file (follow_links: nor a link).
    """

    def __init__(self, path: str | os.PathLike[str], follow_links: bool = False) -> None:
        self.path = Path(path)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        try:
            if self.path.is_symlink() and not follow_links:
                raise CheckpointError(f"{path} is a link; copy the file that it leads to")
            self._descriptor = os.open(self.path, flags)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is no regular file; expected one that holds weights")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer of bytes from a place in the file; CheckpointError if it ends before."""
        try:
            while buffer:
                count = os.preadv(self._descriptor, [buffer[:_LONGEST_READ]], offset)
                if not count:
                    raise CheckpointError(
                        f"{self.path} is truncated: it ends before byte {offset + len(buffer)}; "
                        "fetch it again"
                    )
                buffer, offset = buffer[count:], offset + count
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error

    def read(self, offset: int, length: int) -> bytes:
        """Return so many bytes; CheckpointError, before any memory is taken, if they are not there."""
        if length < 0 or offset + length > self.size:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: {length} bytes from byte {offset} were expected, it "
                f"has {self.size}; fetch it again"
            )
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: element (i, j, ...) is at byte begin + itemsize (i strides[0] + j strides[1] ...).

    Made by `file_tensor`, which checks that it lies in the file and takes no more memory than its part of
    the file does.
    """

    file: RawFile
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self) -> Tensor:
        """Return the whole tensor, contiguous, in memory of its own."""
        return self._part(self.begin, self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rows [start, stop) of a tensor of one dimension or more, contiguous."""
        if self._is_transposed():
            return self._columns(start, stop)
        return self._part(
            self.begin + start * self.strides[0] * self.dtype.itemsize,
            (stop - start, *self.shape[1:]),
        )

    def transposed(self) -> FileTensor:
        """Return the same numbers with the order of the dimensions turned round."""
        return FileTensor(self.file, self.begin, self.dtype, self.shape[::-1], self.strides[::-1])

    def _is_transposed(self) -> bool:
        return len(self.shape) == 2 and self.strides[0] < self.strides[1]

    def _part(self, begin: int, shape: tuple[int, ...]) -> Tensor:
        extent = _extent(shape, self.strides)
        flat = torch.empty(extent, dtype=self.dtype)
        self.file.read_into(begin, _bytes_of(flat))
        return flat.as_strided(shape, self.strides).contiguous()

    def _columns(self, start: int, stop: int) -> Tensor:
        """Return rows of a matrix [rows, D] that is stored as [D, rows]: one short read for each of D."""
        size = self.dtype.itemsize
        part = torch.empty(self.shape[1], stop - start, dtype=self.dtype)
        for column in range(self.shape[1]):
            offset = self.begin + size * (start * self.strides[0] + column * self.strides[1])
            self.file.read_into(offset, _bytes_of(part[column]))
        return part.t().contiguous()


def file_tensor(
    file: RawFile,
    begin: int,
    limit: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    what: str,
) -> FileTensor:
    """Return a tensor that lies between the bytes ``begin`` and ``limit`` of a file.

    what: its name, for the errors.

    Raises:
        CheckpointError: its last element is beyond the limit or the file, or it repeats elements
            (a stride of 0), so that it would take more memory than there are bytes.
    """
    limit = min(limit, file.size)
    elements = math.prod(shape)
    good = len(shape) == len(strides) and min((*shape, *strides, begin, 0)) >= 0
    end = begin + _extent(shape, strides) * dtype.itemsize if good else 0
    if not good or (elements and (end > limit or begin + elements * dtype.itemsize > limit)):
        raise CheckpointError(
            f"{file.path}: {what} of shape {_short(shape)} does not fit into its {max(0, limit - begin)} "
            "bytes of the file, which is truncated or damaged; fetch it again"
        )
    return FileTensor(file, begin, dtype, shape, strides)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements lie from the first one to the last one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _short(shape: tuple[int, ...]) -> str:
    text = str(list(shape))
    return text if len(text) <= 80 else text[:77] + "..."
