"""Parquet files with the columns ``image`` (binary) and ``label`` (int64)."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from plsc.storage.publish import publishing

_SCHEMA = pa.schema(
    [
        pa.field("image", pa.binary(), nullable=False),
        pa.field("label", pa.int64(), nullable=False),
    ]
)
# A reader decodes a whole row group for one image; small groups make random access cheap.
_GROUP_ROWS = 1000
_GROUP_BYTES = 32 * 2**20


def write_parquet(location: str, samples: Iterable[tuple[bytes, int]]) -> int:
    """Write samples to a Parquet file, local or remote; return their number.

    Row groups end at 1000 rows or 32 MiB. Images are compressed already and are kept as they are; pages
    carry checksums. Raises DataError if the file exists or cannot be written.
    """
    count = group_bytes = 0
    images: list[bytes] = []
    labels: list[int] = []
    with (
        publishing(location) as file,
        pq.ParquetWriter(
            file, _SCHEMA, compression="none", use_dictionary=["label"], write_page_checksum=True
        ) as writer,
    ):
        for image, label in samples:
            images.append(image)
            labels.append(label)
            group_bytes += len(image)
            count += 1
            if len(images) == _GROUP_ROWS or group_bytes >= _GROUP_BYTES:
                writer.write_table(_table(images, labels))
                images, labels, group_bytes = [], [], 0
        if images:
            writer.write_table(_table(images, labels))
    return count


def _table(images: list[bytes], labels: list[int]) -> pa.Table:
    return pa.table([pa.array(images, pa.binary()), pa.array(labels, pa.int64())], schema=_SCHEMA)
