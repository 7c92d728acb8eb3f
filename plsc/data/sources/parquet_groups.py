"""Row groups of Parquet files, decoded as they are asked for, in bounded memory."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from plsc.data.sources.shards import Shards
from plsc.errors import DataError
from plsc.storage.blocks import BytesFile
from plsc.storage.urls import shown

CACHE_BYTES = 256 * 2**20
GROUP_BYTES = 2**30
_MOST_OPEN = 16
_BATCH_ROWS = 1024
# What pyarrow raises for a file that is damaged.
_FAULTS = (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError)


class Decoded(NamedTuple):
    """A row group: batches of one column, the row at which each begins, and their bytes."""

    batches: list[pa.Array]
    starts: list[int]
    nbytes: int

    def value(self, row: int) -> bytes | None:
        """Return the value of a row."""
        batch = bisect_right(self.starts, row) - 1
        found: bytes | None = self.batches[batch][row - self.starts[batch]].as_py()
        return found


class RowGroups:
    """The row groups of some files. Threads may share it, one of them decodes at a time; it is picklable.

    Decoded groups are kept while they take at most 256 MiB. Raises DataError for a damaged file, and for a
    group of over 1 GiB, which would have to be decoded for each single image in it.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._files: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._decoded: OrderedDict[tuple[int, int, str], Decoded] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def schema(self, shard: int) -> pa.Schema:
        """Return the schema of a file."""
        with self._lock, self._faults(shard):
            return self._open(shard).schema_arrow

    def rows(self, shard: int) -> list[int]:
        """Return the number of rows of each group of a file."""
        with self._lock, self._faults(shard):
            metadata = self._open(shard).metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            found = [(group.num_rows, group.total_byte_size) for group in groups]
        for number, (rows, size) in enumerate(found):
            if rows < 0 or not 0 <= size <= GROUP_BYTES:
                raise DataError(
                    f"{self.title(shard)}: row group {number} of {rows} rows takes {size} bytes; "
                    f"expected at most {GROUP_BYTES}: write it anew with smaller groups, as "
                    "`plsc data convert` does"
                )
        return [rows for rows, _ in found]

    def column(self, shard: int, name: str) -> pa.ChunkedArray:
        """Return a whole column of a file."""
        with self._lock, self._faults(shard):
            file = self._open(shard)
            found = file.read(columns=[name], use_threads=False).column(0)
            if len(found) != file.metadata.num_rows:
                raise ValueError(f"{len(found)} rows of {file.metadata.num_rows} could be read")
            return found

    def group(self, shard: int, number: int, leaf: str) -> Decoded:
        """Return one column of a group; leaf: its name, or ``struct.field``."""
        key = shard, number, leaf
        with self._lock:
            found = self._decoded.get(key)
            if found is not None:
                self._decoded.move_to_end(key)
                return found
            with self._faults(shard):
                found = self._decode(*key)
            self._decoded[key] = found
            self._bytes += found.nbytes
            while self._bytes > CACHE_BYTES and len(self._decoded) > 1:
                self._bytes -= self._decoded.popitem(last=False)[1].nbytes
            return found

    def title(self, shard: int) -> str:
        """Return the file's name for messages."""
        return shown(self.shards.locations[shard])

    def _decode(self, shard: int, number: int, leaf: str) -> Decoded:
        file = self._open(shard)
        decoded = Decoded([], [], 0)
        row = nbytes = 0
        batches = file.iter_batches(_BATCH_ROWS, [number], [leaf], use_threads=False)
        for batch in batches:
            values = batch.column(0)
            for name in leaf.split(".")[1:]:
                values = values.field(name)
            decoded.batches.append(values)
            decoded.starts.append(row)
            row, nbytes = row + len(values), nbytes + values.nbytes
            if nbytes > GROUP_BYTES:  # what the file says of itself need not be true
                raise ValueError(f"row group {number} is over {GROUP_BYTES} bytes")
        expected = file.metadata.row_group(number).num_rows
        if row != expected:
            raise ValueError(f"{row} rows of {expected} of row group {number} could be read")
        return decoded._replace(nbytes=nbytes)

    def _open(self, shard: int) -> pq.ParquetFile:
        found = self._files.get(shard)
        if found is None:
            source = pa.PythonFile(BytesFile(self.shards[shard]), mode="r")
            found = self._files[shard] = pq.ParquetFile(
                source,
                pre_buffer=False,
                page_checksum_verification=True,
                thrift_string_size_limit=64 * 2**20,
                thrift_container_size_limit=10**6,
            )
            if len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)
        self._files.move_to_end(shard)
        return found

    @contextmanager
    def _faults(self, shard: int) -> Any:
        try:
            yield
        except _FAULTS as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{self.title(shard)} is damaged, or no Parquet file ({reason}); copy or write it anew"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"shards": self.shards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["shards"])  # type: ignore[misc]
