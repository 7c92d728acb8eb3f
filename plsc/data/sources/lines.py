"""The lines of a large text file, in blocks, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

from plsc.data.decode import MAX_FILE_BYTES
from plsc.data.native.rows import count_byte
from plsc.errors import DataError
from plsc.storage.blocks import Bytes
from plsc.storage.urls import shown

MAX_LINE_BYTES = MAX_FILE_BYTES * 4 // 3 + 2**16  # the longest image in base64, and some more
_CHUNK = 2**18  # as Python objects, the fields of a block take up to 60 times its bytes
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def line_blocks(data: Bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (offset, number of its first line from 1, text): whole lines, without the last one's LF.

    A byte order mark at the start is left out. Raises DataError that names a line of over 85 MiB.
    """
    offset = position = 0
    line = 1
    parts: list[bytes] = []
    held = 0
    while position < data.size:
        chunk = data.read_at(position, min(_CHUNK, data.size - position))
        position += len(chunk)
        if position == len(chunk) and chunk.startswith(_BYTE_ORDER_MARK):
            offset, chunk = 3, chunk[3:]
        whole, newline, rest = chunk.rpartition(b"\n")
        if newline:
            text = b"".join((*parts, whole))
            yield offset, line, text
            offset += len(text) + 1
            line += count_byte(text, b"\n") + 1
            parts, held = [], 0
        parts.append(rest)
        held += len(rest)
        if held > MAX_LINE_BYTES:
            raise DataError(
                f"{shown(data.location)}:{line} is over {MAX_LINE_BYTES} bytes long; fix it"
            )
    if held:
        yield offset, line, b"".join(parts)


def first_line(data: Bytes) -> bytes:
    """Return the first line that is not blank; nothing if there is none."""
    for _, _, text in line_blocks(data):
        for line in text.split(b"\n"):
            if line and not line.isspace():
                return line
    return b""
