"""Read RecordIO files of images: ``.rec`` with or without its ``.idx``, also in insightface's layout.

The format is that of dmlc-core (``recordio.h``). A record
has one or more parts. A part: magic (u32), flag and length (u32; the flag in the upper 3 bits), the bytes,
zeros up to a multiple of 4; all little-endian. Flag 0: a whole record; 1, 2, 3: its first part, a middle one,
the last. A record is split where it contains the magic at a multiple of 4; the reader inserts it again.

The header of an image record is ``IfQQ``: flag, label, two ids. With flag > 0, that many float32 labels
follow and replace the one in the header. The rest is the encoded image.
"""

from __future__ import annotations

import re
import struct
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plsc.data.decode import MAX_FILE_BYTES
from plsc.data.files import Shards, load_or_build
from plsc.data.sources.base import IndexedSource
from plsc.errors import DataError
from plsc.storage.blocks import Bytes, buffered, open_bytes
from plsc.storage.urls import base_name, exists, parent_of, shown

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
LENGTH_MASK = 2**29 - 1
WHOLE, FIRST, MIDDLE, LAST = range(4)
PART = struct.Struct("<II")
HEADER = struct.Struct("<IfQQ")
_HEAD = struct.Struct("<IIIfQQf")  # a part, an image header, its first label
_FLOAT = struct.Struct("<f")
_MAX_JOINED = MAX_FILE_BYTES + 2**20  # bytes of a record in several parts
_MAX_IDX_LINE = 1000
_IDX_LINE = re.compile(rb"([0-9]{1,18})[ \t]+([0-9]{1,18})\s*")  # such numbers fit int64


class RecordIOSource(IndexedSource):
    """Images of a ``.rec`` file: a local path or an fsspec URL.

    The order is that of its ``.idx``, or of the file if there is none. For a record with several labels, the
    first one is its class. In insightface's layout, record 0 has no image but the number of the first record
    without one; the records from there, one per identity, are left out.

    The file is read once; the index of records and labels is stored (`load_or_build`). Raises DataError
    that names the record if the file is damaged, truncated or not RecordIO, if the .idx does not match, and
    for a label that is not an integer of 0 or more.
    """

    def __init__(self, location: str | Path) -> None:
        self.location = str(location)
        self._title = base_name(shown(self.location))
        idx = self.location.removesuffix(".rec") + ".idx"
        self._files = Shards([self.location, idx] if exists(idx) else [self.location])
        index = load_or_build(self._files, "recordio-1", self._build)
        self._offsets, self._lengths = index["offsets"], index["lengths"]
        self._labels, self._keys = index["labels"], index["keys"]

    def name(self, index: int) -> str:
        """Return ``train.rec record 12``, with the number from the .idx if there is one."""
        return f"{self._title} record {self._keys[index]}"

    def _image_in(self, stored: bytes) -> bytes:
        return image_of(unframe(stored))

    def _build(self) -> dict[str, np.ndarray]:
        records, files = scan(self._files[0]), self._files.locations
        if len(files) > 1:
            keys, rows = read_idx(open_bytes(files[1], parent_of(files[1])), records.offsets)
        else:
            keys = rows = np.arange(len(records.offsets))
        chosen = insightface_images(records, keys, rows, shown(self.location))
        if chosen is not None:
            keys, rows = keys[chosen], rows[chosen]
        if len(rows) == 0:
            raise DataError(f"{shown(self.location)} contains no image records")
        labels = records.labels[rows]
        bad = np.flatnonzero(~((labels >= 0) & (labels == np.floor(labels)) & (labels < 2**62)))
        if len(bad):
            name = f"{shown(self.location)} record {keys[bad[0]]}"
            raise DataError(f"{name}: the label is {labels[bad[0]]:g}; expected an integer of 0 or more")
        return {
            "offsets": records.offsets[rows],
            "lengths": records.lengths[rows],
            "labels": labels.astype(np.int64),
            "keys": keys.astype(np.int64),
        }


class Records(NamedTuple):
    """The result of a scan: arrays with one entry per record, in the order of the file.

    Attributes:
        offsets, lengths: int64, in bytes, of the whole record.
        labels: float32, the first label of each.
        flags: number of labels in front of the image.
        image_bytes: 0 for a record without an image.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    flags: np.ndarray
    image_bytes: np.ndarray


def scan(data: Bytes) -> Records:
    """Find all records of a file from their lengths; DataError names a damaged record."""
    found: list[tuple[int, int, float, int, int]] = []
    file = buffered(data)
    read, seek, size = file.read, file.seek, data.size
    unpack = _HEAD.unpack_from
    position = 0
    try:
        while position < size:
            head = read(_HEAD.size)
            magic, word, flag, label, _, _, first_label = unpack(head.ljust(_HEAD.size, b"\0"))
            content_bytes = word & LENGTH_MASK
            end = position + 8 + (content_bytes + 3 & ~3)
            if magic != MAGIC or word >> 29 != WHOLE:
                end = _end_of(data, position)
                content = unframe(data.read_at(position, end - position))
                content_bytes = len(content)
                flag, label, _, _ = HEADER.unpack_from(content.ljust(HEADER.size, b"\0"))
                first_label = _FLOAT.unpack_from(content.ljust(HEADER.size + 4, b"\0"), HEADER.size)[0]
            image = content_bytes - HEADER.size - 4 * flag
            if end > size or image < 0:
                raise DataError("ends after the file, or within its header: it is damaged or truncated")
            found.append((position, end - position, first_label if flag else label, flag, image))
            position = end
            seek(position)
    except DataError as error:
        place = f"{shown(data.location)}: record {len(found)} at byte {position}"
        raise DataError(f"{place} {error}; download the file again, or write it again") from error
    columns = list(zip(*found, strict=True)) or [()] * 5
    kinds = (np.int64, np.int64, np.float32, np.int64, np.int64)
    arrays = (np.array(column, kind) for column, kind in zip(columns, kinds, strict=True))
    return Records(*arrays)


def _end_of(data: Bytes, position: int) -> int:
    """Return the end of a record of several parts; `unframe` checks them."""
    most, flag = position + _MAX_JOINED, FIRST
    while flag not in (WHOLE, LAST) and position < most:
        _, word = PART.unpack(data.read_at(position, 8))
        flag, position = word >> 29, position + 8 + ((word & LENGTH_MASK) + 3 & ~3)
    return min(position, most)


def read_idx(data: Bytes, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (keys, rows) of an .idx file, whose lines are ``key<TAB>offset``.

    Args:
        offsets: int64 [R], ascending, where the records begin.

    Returns:
        keys, and for each key the index of its record (rows).

    Raises:
        DataError: names an invalid line, an offset where no record begins, or a repeated key.
    """
    name = shown(data.location)
    numbers = array("q")
    file = buffered(data)
    for line, text in enumerate(iter(lambda: file.readline(_MAX_IDX_LINE), b""), start=1):
        found = _IDX_LINE.fullmatch(text)
        if found:
            numbers.extend((int(found[1]), int(found[2])))
        elif text.strip() or len(text) == _MAX_IDX_LINE:
            raise DataError(f"{name}:{line}: expected 'key<TAB>offset', got {text[:100]!r}")
    keys, starts = np.array(numbers, np.int64).reshape(-1, 2).T
    rows = np.searchsorted(offsets, starts)
    is_bad = np.append(offsets, -1)[rows] != starts
    _, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    bad = np.flatnonzero(is_bad | (counts[place] > 1))
    if len(bad):
        raise DataError(f"{name}: key {keys[bad[0]]} is repeated, or no record begins at {starts[bad[0]]}")
    return keys, rows


def insightface_images(records: Records, keys: np.ndarray, rows: np.ndarray, name: str) -> np.ndarray | None:
    """Return which of `keys` are images, in the order of their keys; None for other layouts than insightface.

    In insightface's layout, record 0 has two labels and no image. Its first label is the key after the last
    image. It is a float32, so it is rounded above 2^24 images; the end is then where the image-less records
    of the identities begin.
    """
    zero = np.flatnonzero(keys == 0)
    if len(zero) != 1:
        return None
    row = rows[zero[0]]
    if records.flags[row] != 2 or records.image_bytes[row] != 0:
        return None
    end = float(records.labels[row])
    unsure = 0 if end < 2**24 else float(np.spacing(np.float32(end)))
    order = np.argsort(keys, kind="stable")
    chosen = order[(keys[order] >= 1) & (keys[order] < end + unsure)]
    if unsure:
        with_image = np.flatnonzero(records.image_bytes[rows[chosen]] > 0)
        chosen = chosen[: with_image[-1] + 1 if len(with_image) else 0]
    elif not (end >= 1 and len(chosen) == end - 1):
        raise DataError(f"{name}: record 0 announces {end - 1:g} images, but there are {len(chosen)}")
    return chosen


def frame(content: bytes) -> bytes:
    """Return the content, of less than 2^29 bytes, as a record."""
    cuts = []
    position = content.find(MAGIC_BYTES)
    while position >= 0:
        if position % 4 == 0:
            cuts.append(position)
        position = content.find(MAGIC_BYTES, position + 4 - position % 4)
    if not cuts:
        return b"".join((PART.pack(MAGIC, len(content)), content, bytes(-len(content) % 4)))
    parts: list[bytes] = []
    start = 0
    for cut in cuts:
        flag = MIDDLE if parts else FIRST
        parts += [PART.pack(MAGIC, flag << 29 | cut - start), content[start:cut]]
        start = cut + 4
    tail = content[start:]
    return b"".join((*parts, PART.pack(MAGIC, LAST << 29 | len(tail)), tail, bytes(-len(tail) % 4)))


def unframe(record: bytes) -> bytes:
    """Return the content of one whole record, as made by `frame`; DataError if it is invalid."""
    parts: list[bytes] = []
    position, flag = 0, FIRST
    while flag not in (WHOLE, LAST):
        magic, word = PART.unpack_from(record, position) if position + 8 <= len(record) else (0, 0)
        flag, end = word >> 29, position + 8 + (word & LENGTH_MASK)
        fits = flag in ((MIDDLE, LAST) if parts else (WHOLE, FIRST)) and end <= len(record)
        parts.append(record[position + 8 : end])
        position = end + -end % 4
        if magic != MAGIC or not fits or (flag in (WHOLE, LAST) and position != len(record)):
            raise DataError(f"is damaged: its part {len(parts)} begins or ends in the wrong place")
    return MAGIC_BYTES.join(parts)


def image_of(content: bytes) -> bytes:
    """Return the image in a record's content, empty if there is none."""
    return content[HEADER.size + 4 * HEADER.unpack_from(content)[0] :]


def pack_image(image: bytes, label: int, number: int) -> bytes:
    """Return an image record's content, with the label in its header.

    Raises DataError for a label that float32 cannot represent: odd numbers above 2^24.
    """
    header = HEADER.pack(0, label, number, 0) if 0 <= label < 2**62 else b""
    if not header or HEADER.unpack(header)[1] != label:
        raise DataError(f"label {label} cannot be written: .rec stores labels as 32-bit floats")
    return header + image
