"""The RecordIO format (dmlc-core, ``recordio.h``) and the image header that MXNet puts into its records.

A record is one or more parts. A part: magic (u32), flag and length (u32; the flag in the upper 3 bits),
the bytes, zeros up to a multiple of 4; all little-endian. Flag 0: the whole record; 1, 2, 3: the first
part, a middle one, the last. A record is cut where the magic stands in it at a multiple of 4; the reader
puts it back.

The header of an image record is ``IfQQ``: flag, label, two ids. With flag > 0 that many float32 labels
follow and replace the one in the header. The rest is the encoded image.
"""

from __future__ import annotations

import struct

from plsc.errors import DataError

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
LENGTH_MASK = 2**29 - 1
WHOLE, FIRST, MIDDLE, LAST = range(4)
PART = struct.Struct("<II")
HEADER = struct.Struct("<IfQQ")


def frame(content: bytes) -> bytes:
    """Return the content as a record; DataError if it is 2^29 bytes or more."""
    if len(content) > LENGTH_MASK:
        raise DataError(
            f"a record of {len(content)} bytes is too long; RecordIO allows {LENGTH_MASK}"
        )
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
    """Return the content of one whole record, as `frame` makes it; DataError if it is none."""
    parts: list[bytes] = []
    position = 0
    while True:
        if position + 8 > len(record):
            raise DataError("is a damaged record: its last part is missing")
        magic, word = PART.unpack_from(record, position)
        flag, end = word >> 29, position + 8 + (word & LENGTH_MASK)
        if magic != MAGIC or end > len(record) or not fits(flag, bool(parts)):
            raise DataError("is a damaged record: a part of it begins or ends in the wrong place")
        parts.append(record[position + 8 : end])
        position = end + -end % 4
        if flag in (WHOLE, LAST):
            break
    if position != len(record):
        raise DataError("is a damaged record: it ends too early")
    return MAGIC_BYTES.join(parts)


def fits(flag: int, inside: bool) -> bool:
    """Whether a part with this flag may come at the start of a record, or inside one."""
    return flag in ((MIDDLE, LAST) if inside else (WHOLE, FIRST))


def image_of(content: bytes) -> bytes:
    """Return the image in a record's content; DataError if the header does not fit, or none follows."""
    if len(content) < HEADER.size:
        raise DataError(f"has {len(content)} bytes; an image header has {HEADER.size}")
    flag = HEADER.unpack_from(content)[0]
    start = HEADER.size + 4 * flag
    if start > len(content):
        raise DataError(f"has {len(content)} bytes, but its header announces {flag} labels")
    if start == len(content):
        raise DataError(
            "holds no image (0 bytes after its header); take the record out", kind="empty"
        )
    return content[start:]


def pack_image(image: bytes, label: int, number: int) -> bytes:
    """Return an image record's content, with the label in its header.

    Raises DataError for a label that float32 cannot hold, which are the odd ones above 2^24.
    """
    header = HEADER.pack(0, label, number, 0) if 0 <= label < 2**62 else b""
    if not header or HEADER.unpack(header)[1] != label:
        raise DataError(
            f"label {label} cannot be written: .rec keeps labels as 32-bit floats, whole up to "
            f"{2**24}; write .parquet or .tar"
        )
    return header + image
