"""The lines of a large text file, in blocks, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from plsc.data.decode import MAX_FILE_BYTES
from plsc.errors import DataError
from plsc.storage.blocks import Bytes
from plsc.storage.urls import shown

MAX_LINE_BYTES = MAX_FILE_BYTES * 4 // 3 + 2**16  # the longest image in base64, and some more
_CHUNK = 2**18  # stays in the cache of a processor
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Block(NamedTuple):
    """Whole lines of a file: text[:end], the last one's LF left out.

    offset: where the text begins, in bytes. lines_before: how many lines were left out before it.
    """

    offset: int
    text: bytes
    end: int
    lines_before: int = 0


def line_blocks(data: Bytes) -> Iterator[Block]:
    """Yield all lines but a byte order mark; DataError that names the line for one of over 85 MiB.

    The bytes are handed on as they were read, uncopied: a line that a block began is read again.
    """
    head = data.read_at(0, min(data.size, len(_BYTE_ORDER_MARK)))
    position = len(head) if head == _BYTE_ORDER_MARK else 0
    wanted = _CHUNK
    while position < data.size:
        text = data.read_at(position, min(wanted, data.size - position))
        newline = text.rfind(b"\n")
        if newline < 0 and len(text) > MAX_LINE_BYTES:
            line = line_at(data, position)
            raise DataError(
                f"{shown(data.location)}:{line} is over {MAX_LINE_BYTES} bytes long; fix it"
            )
        if position + len(text) == data.size and newline < len(text) - 1:
            newline = len(text)  # the last one is missing
        if newline < 0:
            wanted = min(2 * wanted, MAX_LINE_BYTES + 1)
            continue
        yield Block(position, text, newline)
        position += newline + 1
        wanted = _CHUNK


def line_at(data: Bytes, offset: int) -> int:
    """Return the number, from 1, of the line that a byte of the file belongs to."""
    line = 1
    for start in range(0, offset, _CHUNK):
        line += data.read_at(start, min(_CHUNK, offset - start)).count(b"\n")
    return line


def first_line(data: Bytes) -> bytes:
    """Return the first line that is not blank; nothing if there is none."""
    for _, text, end, _ in line_blocks(data):
        for line in text[:end].split(b"\n"):
            if line and not line.isspace():
                return line
    return b""
