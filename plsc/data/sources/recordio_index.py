"""Find the records of a RecordIO file: by a scan, by its .idx, and in insightface's layout."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import numpy as np

from plsc.data.decode import MAX_FILE_BYTES
from plsc.data.native.records import MOST_RECORDS, find_records
from plsc.data.recordio import HEADER, LAST, LENGTH_MASK, MAGIC, PART, WHOLE, fits, unframe
from plsc.errors import DataError
from plsc.storage.blocks import Bytes, buffered
from plsc.storage.urls import shown

_HEAD = struct.Struct("<IIIfQQf")  # a part, an image header, the first label behind it
_FLOAT = struct.Struct("<f")
_PIECE = 2**20  # stays in the cache of a processor
_MAX_JOINED = MAX_FILE_BYTES + 2**20  # of a record in several parts
_IDX_CHUNK = 4 * 2**20
_MAX_IDX_LINE = 1000
# Numbers of at most 18 digits: all of them fit int64.
_PAIRS = re.compile(
    rb"(?:[0-9]{1,18}[ \t]+[0-9]{1,18}[ \t]*\r?\n)*[0-9]{1,18}[ \t]+[0-9]{1,18}[ \t]*\r?"
)
_NO_PAIRS = np.zeros((0, 2), np.int64)


class Records(NamedTuple):
    """What a scan finds, one entry a record, in the order of the file.

    offsets, lengths: int64, in bytes, of the whole record. labels: float32, the first one of each.
    flags: the number of labels in front of the image. image_bytes: 0 for a record that holds none.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    flags: np.ndarray
    image_bytes: np.ndarray


def scan(data: Bytes) -> Records:
    """Find all records of a file, from their lengths; DataError names the record that is damaged."""
    parts: list[Records] = []
    position = count = 0
    slow = 1
    while position < data.size:
        piece = data.read_at(position, min(_PIECE, data.size - position))
        found = find_records(piece, position, data.size)
        if found is not None:
            parts.append(Records(found.offsets, found.lengths, found.labels, *found[2:4]))
            count, position = count + len(found.offsets), position + found.position
            slow = 1 if len(found.offsets) > slow else min(2 * slow, MOST_RECORDS)
            if found.ended and len(found.offsets):
                continue
        else:
            slow = MOST_RECORDS
        some, position = _scan_one_by_one(data, position, count, slow)
        parts.append(some)
        count += len(some.offsets)
    if not parts:
        parts.append(_of([]))
    return Records(*map(np.concatenate, zip(*parts, strict=True)))


def _scan_one_by_one(data: Bytes, position: int, number: int, most: int) -> tuple[Records, int]:
    """Find some records from a byte on, the first is `number`, and where they end: the plain way."""
    found: list[tuple[int, int, float, int, int]] = []
    file = buffered(data)
    file.seek(position)
    read, seek, size = file.read, file.seek, data.size
    unpack = _HEAD.unpack_from
    while position < size and len(found) < most:
        head = read(_HEAD.size)
        magic, word, flag, label, _, _, first_label = unpack(head.ljust(_HEAD.size, b"\0"))
        content_bytes = word & LENGTH_MASK
        end = position + 8 + (content_bytes + 3 & ~3)
        if magic != MAGIC or word >> 29 != WHOLE:
            end, content = _join(data, position, number + len(found))
            content_bytes = len(content)
            flag, label, _, _ = HEADER.unpack_from(content.ljust(HEADER.size, b"\0"))
            first_label = _FLOAT.unpack_from(content.ljust(HEADER.size + 4, b"\0"), HEADER.size)[0]
        image = content_bytes - HEADER.size - 4 * flag
        if end > size or image < 0:
            raise _damaged(data, position, number + len(found), end, content_bytes, flag)
        found.append((position, end - position, first_label if flag else label, flag, image))
        position = end
        seek(position)
    return _of(found), position


def _of(found: list[tuple[int, int, float, int, int]]) -> Records:
    columns = list(zip(*found, strict=True)) or [()] * 5
    kinds = (np.int64, np.int64, np.float32, np.int64, np.int64)
    arrays = (np.array(column, kind) for column, kind in zip(columns, kinds, strict=True))
    return Records(*arrays)


def _join(data: Bytes, position: int, number: int) -> tuple[int, bytes]:
    """Return where a record of several parts ends, and its content."""
    start, inside = position, False
    while True:
        if position + 8 > data.size:
            raise _broken(data, number, start, "is cut off")
        magic, word = PART.unpack(data.read_at(position, 8))
        flag, content_bytes = word >> 29, word & LENGTH_MASK
        if magic != MAGIC:
            raise _broken(
                data, number, start, f"has {magic:#010x} where {MAGIC:#010x} was expected"
            )
        if not fits(flag, inside):
            raise _broken(data, number, start, f"has a part of kind {flag} in the wrong place")
        position += 8 + (content_bytes + 3 & ~3)
        if position > data.size:
            raise _broken(data, number, start, f"ends at byte {position} of {data.size}")
        if position - start > _MAX_JOINED:
            raise _broken(data, number, start, f"is over {_MAX_JOINED} bytes long")
        if flag in (WHOLE, LAST):
            return position, unframe(data.read_at(start, position - start))
        inside = True


def _damaged(
    data: Bytes, position: int, number: int, end: int, content_bytes: int, flag: int
) -> DataError:
    if end > data.size:
        fault = f"ends at byte {end} of {data.size}: the file is truncated, or its length is wrong"
    elif content_bytes < HEADER.size:
        fault = f"has {content_bytes} bytes, fewer than the {HEADER.size} of an image header"
    else:
        fault = f"has {content_bytes} bytes, but its header announces {flag} labels"
    return _broken(data, number, position, fault)


def _broken(data: Bytes, number: int, position: int, fault: str) -> DataError:
    return DataError(
        f"{shown(data.location)}: record {number} at byte {position} {fault}; "
        "fetch the file again or write it anew"
    )


def read_idx(data: Bytes, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (keys, rows) of an .idx file, whose lines are ``key<TAB>offset``.

    offsets: int64 [R], rising, where the records begin; rows: which record each key means. Raises
    DataError that names the line, for a line that is none, an offset where no record begins, and a key
    that comes twice.
    """
    name = shown(data.location)
    keys, found, lines = [], [], 0
    file = buffered(data, _IDX_CHUNK)
    rest = b""
    while chunk := file.read(_IDX_CHUNK):
        text, newline, rest = (rest + chunk).rpartition(b"\n")
        numbers = _read_pairs(text, lines, name)
        lines += text.count(b"\n") + len(newline)
        keys.append(numbers[:, 0])
        found.append(numbers[:, 1])
        if len(rest) > _MAX_IDX_LINE:
            raise DataError(
                f"{name}:{lines + 1} is over {_MAX_IDX_LINE} bytes long; expected 'key<TAB>offset'"
            )
    numbers = _read_pairs(rest, lines, name)
    all_keys = np.concatenate([*keys, numbers[:, 0]])
    all_found = np.concatenate([*found, numbers[:, 1]])
    rows = np.minimum(np.searchsorted(offsets, all_found), max(0, len(offsets) - 1))
    bad = np.flatnonzero(offsets[rows] != all_found) if len(offsets) else np.arange(len(rows))
    if len(bad):
        raise DataError(
            f"{name}: key {all_keys[bad[0]]} is at byte {all_found[bad[0]]}, where no record begins "
            f"({len(bad)} such keys); remove the .idx, it is not needed"
        )
    unique, counts = np.unique(all_keys, return_counts=True)
    if len(unique) < len(all_keys):
        raise DataError(
            f"{name}: key {unique[counts > 1][0]} comes twice; remove the .idx, it is not needed"
        )
    return all_keys, rows


def _read_pairs(text: bytes, lines_before: int, name: str) -> np.ndarray:
    """Return the numbers of lines of two, int64 [lines, 2]; blank lines are passed over."""
    if not _PAIRS.fullmatch(text):
        for number, line in enumerate(text.split(b"\n"), start=lines_before + 1):
            if line.strip() and not _PAIRS.fullmatch(line):
                raise DataError(f"{name}:{number}: expected 'key<TAB>offset', got {line[:100]!r}")
    numbers = text.split()
    return np.array(numbers, dtype=bytes).astype(np.int64).reshape(-1, 2) if numbers else _NO_PAIRS


def insightface_images(
    records: Records, keys: np.ndarray, rows: np.ndarray, name: str
) -> np.ndarray | None:
    """Return which entries of `keys` are images, in the order of their keys; None for other layouts.

    insightface: record 0 has two labels and no image. Its first label is the key after the last image; a
    float32, so rounded where there are more than 2^24 images, and then the end is where the image-less
    records of the persons begin.
    """
    zero = np.flatnonzero(keys == 0)
    if len(zero) != 1:
        return None
    row = rows[zero[0]]
    if records.flags[row] != 2 or records.image_bytes[row] != 0:
        return None
    end = float(records.labels[row])
    if not (end >= 1 and end == np.floor(end)):
        raise DataError(f"{name}: record 0 gives {end:g} as the end of the images")
    unsure = 0 if end < 2**24 else float(np.spacing(np.float32(end)))
    order = np.argsort(keys, kind="stable")
    chosen = order[(keys[order] >= 1) & (keys[order] < end + unsure)]
    if unsure:
        with_image = np.flatnonzero(records.image_bytes[rows[chosen]] > 0)
        chosen = chosen[: with_image[-1] + 1 if len(with_image) else 0]
    elif len(chosen) != end - 1:
        raise DataError(
            f"{name}: record 0 says that records 1 to {end - 1:g} are images, {len(chosen)} of them "
            "are there; fetch the file again"
        )
    return chosen
