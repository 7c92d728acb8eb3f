"""The members of a tar archive (POSIX ustar and pax, GNU), read without trust.

Python's own tarfile allocates what a header announces, and reads 8,000 members per second.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from plsc.data.sources.paths import printable
from plsc.errors import DataError

BLOCK = 512
_MAX_NAME = 2**16
_MAX_PAX = 2**20
_ZEROS = bytes(BLOCK)
_FILES = b"0\x007"  # plain files; 7: contiguous ones, which are read alike
_REMARKS = (b"L", b"K", b"x", b"g")
_REFUSED = {b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe"}
_REFUSED |= {b"S": "a sparse file", b"V": "a volume label", b"M": "a part of a file"}


class Member(NamedTuple):
    """A file or folder in an archive; offset: of its content, in bytes from where reading began."""

    name: str
    size: int
    offset: int
    is_folder: bool


class TarReader:
    """Iterates over the members of an archive, in their order; `read` gives the content of the last one.

    file: a binary file at the archive's start. skip: moves it on by some bytes. title: the archive's name,
    for messages.

    Raises DataError for a damaged or truncated archive; for a link, device or sparse file; and for a name
    that is absolute or climbs out.
    """

    def __init__(self, file: Any, skip: Callable[[int], object], title: str) -> None:
        self._file = file
        self._skip = skip
        self._title = title
        self._position = 0
        self._left = 0  # of the member's content
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        long_name: str | None = None
        pax: dict[str, str] = {}
        while True:
            header = self._take(BLOCK)
            if header == _ZEROS:
                self._check_end()
                return
            if not _sum_is_right(header):
                raise DataError(
                    f"{self._place()} has a wrong checksum; the archive is damaged, compressed, or none: "
                    "expected a plain tar; copy or write it anew"
                )
            kind = header[156:157]
            size = _number(header[124:136])
            if size < 0:
                raise DataError(
                    f"{self._place()} has a size that is none; copy or write the archive anew"
                )
            if kind in _REMARKS:
                if size > (_MAX_NAME if kind in b"LK" else _MAX_PAX):
                    raise DataError(
                        f"{self._place()} announces {size} bytes of names or remarks; copy or write it anew"
                    )
                content = self._take(size + -size % BLOCK)[:size]
                if kind == b"L":
                    long_name = _text(content.split(b"\0", 1)[0])
                elif kind == b"x":
                    pax = _pax(content, self._place())
                continue
            name = pax.get("path") or long_name or _name(header)
            if pax:
                size = _number(pax.get("size", str(size)).encode(), 10)
                if size < 0:
                    raise DataError(
                        f"{self._place()} has a size that is none; copy or write the archive anew"
                    )
                pax = {}
            long_name = None
            yield self._member(kind, name, size)
            if self._left + self._padding:
                self._pass_over(self._left + self._padding)

    def read(self, length: int) -> bytes:
        """Return up to `length` bytes of the last member's content; nothing at its end."""
        data = self._take(min(length, self._left))
        self._left -= len(data)
        return data

    def _place(self) -> str:
        return f"{self._title}: the member before byte {self._position}"

    def _member(self, kind: bytes, name: str, size: int) -> Member:
        is_folder = kind == b"5" or (kind in b"0\0" and name.endswith("/"))
        if not is_folder and kind not in _FILES:
            what = _REFUSED.get(kind, f"of an unknown kind {kind!r}")
            raise DataError(f"{self._title}: '{printable(name)}' is {what}; only files can be read")
        self._left = 0 if is_folder else size
        self._padding = -self._left % BLOCK
        return Member(_safe(name, self._title), self._left, self._position, is_folder)

    def _take(self, length: int) -> bytes:
        data: bytes = self._file.read(length) if length else b""
        self._position += len(data)
        if len(data) < length:
            raise DataError(
                f"{self._title} is truncated: it ends at byte {self._position}, without an end mark; copy or "
                "write it anew"
            )
        return data

    def _pass_over(self, length: int) -> None:
        self._skip(length)
        self._position += length

    def _check_end(self) -> None:
        """Refuse archives that were joined: what follows the end of the first would be lost silently."""
        if self._file.read(2**16).strip(b"\0"):
            raise DataError(
                f"{self._title} goes on behind its end mark at byte {self._position}; archives cannot "
                "be joined by joining their bytes: give them as shards"
            )


def _sum_is_right(header: bytes) -> bool:
    # The low half of Adler-32 is 1 + the sum of the bytes, modulo 65521: far faster than sum().
    field = header[148:156]
    digits = field.strip(b" \0")
    if not digits.isdigit():
        return False
    sum_of_others = (zlib.adler32(header) & 0xFFFF) - 1 - sum(field)
    try:
        return (sum_of_others + 8 * 32 - int(digits, 8)) % 65521 == 0
    except ValueError:
        return False


def _number(field: bytes, base: int = 8) -> int:
    """Return a size in digits, or in GNU's binary form; -1 if it is none."""
    if field[:1] == b"\x80":
        number = int.from_bytes(field[1:], "big")
    else:
        digits = field.strip(b" \0") or b"0"
        try:
            number = int(digits, base) if digits.isdigit() else -1
        except ValueError:
            number = -1
    return number if number < 2**62 else -1


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return _text(name)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _safe(name: str, title: str) -> str:
    """Return the name as a relative path; DataError if it is absolute, empty or climbs out."""
    if name and name[0] not in "/." and "/." not in name and "//" not in name and "\0" not in name:
        return name.rstrip("/")  # the usual case
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name or (not parts and "." not in name):
        raise DataError(
            f"{title}: the name '{printable(name[:200])}' leads out of the archive; it is refused"
        )
    return "/".join(parts)


def _pax(content: bytes, place: str) -> dict[str, str]:
    """Return the records of a pax header, ``<length> <key>=<value>\\n`` each."""
    found: dict[str, str] = {}
    position = 0
    while position < len(content):
        length, blank, _ = content[position : position + 20].partition(b" ")
        end = position + (int(length) if length.isdigit() else 0)
        key, equals, value = content[position + len(length) + 1 : end - 1].partition(b"=")
        if not blank or not equals or end > len(content) or content[end - 1 : end] != b"\n":
            raise DataError(f"{place} has damaged remarks (pax); copy or write it anew")
        if key.startswith(b"GNU.sparse."):
            raise DataError(f"{place} is a sparse file; only plain files can be read")
        found[_text(key)] = _text(value)
        position = end
    return found
