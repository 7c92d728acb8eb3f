"""The files that are partitioned: plain, gzip or zstd, local or behind an fsspec URL."""

from __future__ import annotations

import gzip
import io
import posixpath
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.data.file_list import read_file_list
from plsc.errors import DataError
from plsc.storage.blocks import streamed
from plsc.storage.cache import FileStamp, stamp_of
from plsc.storage.retry import reason_of
from plsc.storage.urls import is_url, shown

_FAILURES = (OSError, EOFError, zlib.error)
_CLIENTS = ("pyarrow", "botocore", "aiobotocore", "hdfs_native")  # have exceptions of their own
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Input:
    """One data file, and what shows whether it is still the one that was listed."""

    location: str
    stamp: FileStamp

    @property
    def size(self) -> int:
        """Bytes as stored."""
        return self.stamp.size

    @property
    def name(self) -> str:
        """How messages call it."""
        return shown(self.location)

    @property
    def compression(self) -> str | None:
        """Return 'gzip', 'zstd' or None, by the name's ending."""
        return _COMPRESSED.get(posixpath.splitext(self.location)[1].lower())

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are lines, on this machine."""
        return self.compression is None and not is_url(self.location)

    @contextmanager
    def open(self) -> Iterator[_Told]:
        """Open it for reading, decompressed. What goes wrong, here or later, is DataError with its name."""
        with ExitStack() as stack:
            with self._telling():
                stream = self._open(stack)
            yield _Told(stream, self)

    def check_unchanged(self) -> None:
        """Raise DataError if the file is not what it was when it was listed."""
        if stamp_of(self.location) != self.stamp:
            raise DataError(f"{self.name} changed while it was read; start again when it is whole")

    def _open(self, stack: ExitStack) -> Any:
        if is_url(self.location):
            raw: Any = stack.enter_context(streamed(self.location))
        else:
            raw = stack.enter_context(io.FileIO(self.location))
        if self.compression == "gzip":
            return stack.enter_context(gzip.GzipFile(fileobj=raw))
        if self.compression == "zstd":
            import pyarrow

            plain = stack.enter_context(pyarrow.PythonFile(raw, mode="r"))
            return stack.enter_context(pyarrow.CompressedInputStream(plain, "zstd"))
        return raw

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            raise self._error(error) from error
        except Exception as error:
            if type(error).__module__.split(".")[0] not in _CLIENTS:
                raise
            raise self._error(error) from error

    def _error(self, error: BaseException) -> DataError:
        reason = getattr(error, "strerror", None) or reason_of(error)  # without passwords
        return DataError(f"{self.name} cannot be read: {reason}; check the file")


@dataclass(frozen=True)
class _Told:
    """A stream whose errors name its file."""

    stream: Any
    source: Input

    def readinto(self, buffer: memoryview, /) -> int | None:
        with self.source._telling():
            return self.stream.readinto(buffer)

    def seek(self, position: int) -> None:
        """Go to a byte of the content; of a compressed file that takes as long as reading it."""
        with self.source._telling():
            self.stream.seek(position)


def list_inputs(data_dir: str, file_list: str) -> list[Input]:
    """Return the files that `file_list` names, in its order. Raises DataError as read_file_list does.

    A file that is listed under two names is refused too.
    """
    locations = read_file_list(data_dir, file_list)
    inputs = [Input(location, stamp_of(location)) for location in locations]
    seen: dict[tuple[int, int], Input] = {}
    for one in inputs:
        if is_url(one.location):
            continue
        status = Path(one.location).stat()
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            raise DataError(
                f"{one.name} is the same file as {seen[identity].name}; take one out of {file_list}"
            )
        seen[identity] = one
    return inputs
