"""WebDataset tar files: members whose names differ in what follows the first dot are one sample."""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from plsc.data.sources.base import check_image_bytes, printable
from plsc.data.sources.columns import (
    ColumnSource,
    Label,
    LabelReader,
    pack_texts,
    text_at,
)
from plsc.data.sources.image_folders import IMAGE_SUFFIXES
from plsc.data.sources.index_store import load_or_build
from plsc.data.sources.shards import Shards, shard_files
from plsc.errors import DataError, OptionError
from plsc.storage.blocks import Bytes, buffered
from plsc.storage.urls import base_name, shown

_LABEL_BYTES = 2**20  # the most that a .cls or .json may have


class TarSource(ColumnSource):
    """Samples of a tar file or of several shards (`shard_files`), local or remote, not compressed.

    ``a/17.jpg`` and ``a/17.cls`` are the sample ``a/17``. image_column: which suffix holds the image, such
    as ``input.png``; when not given, the only one that ends like an image. label_column: which suffix holds
    the label as text, or which entry of the ``.json``; when not given, ``.cls``, else ``label`` of the
    ``.json``. Labels are whole numbers; or names, as in `RowSource`.

    The files are read through once; the index is kept. Raises DataError that names the sample or member for
    a damaged archive, a link, a name that climbs out, and a sample without image or label.
    """

    def _open(
        self, location: str, image: str | None, label: str | None, labels: LabelReader
    ) -> Mapping[str, np.ndarray]:
        files = shard_files(location, ".tar")
        self._shards = Shards(files)
        self._image, self._label = image, label
        choice = json.dumps([image, label, labels.names_wanted]).encode()
        kind = f"tar-1-{hashlib.sha256(choice).hexdigest()[:8]}"
        index = load_or_build(files, kind, lambda: self._build(labels))
        self._shard, self._offsets, self._lengths = (
            index[name] for name in ("shards", "offsets", "lengths")
        )
        self._keys, self._key_ends = index["keys"], index["key_ends"]
        return index

    def name(self, index: int) -> str:
        """Return ``train-000.tar:a/17``: the shard and the sample's name in it."""
        key = printable(text_at(self._keys, self._key_ends, index))
        return f"{base_name(shown(self._shards.locations[self._shard[index]]))}:{key}"

    def _stored_at(self, index: int) -> bytes:
        length = self._lengths.item(index)
        check_image_bytes(length)
        return self._shards[self._shard.item(index)].read_at(self._offsets.item(index), length)

    def _stored_many(self, indices: np.ndarray) -> Iterator[bytes | None]:
        return self._shards.read_many(
            self._shard[indices], self._offsets[indices], self._lengths[indices]
        )

    def _build(self, labels: LabelReader) -> dict[str, np.ndarray]:
        places = array("q")  # shard, offset and length of each image
        keys: list[bytes] = []

        def found(shard: int, title: str) -> Iterator[Label]:
            for sample in read_samples(self._shards[shard], title):
                image = self._image_of(sample)
                places.extend((shard, image.offset, image.size))
                keys.append(sample.key.encode("utf-8", "surrogateescape"))
                yield self._label_of(sample)

        def place(_: int) -> str:
            return f"{shown(self._shards.locations[places[-3]])}:{printable(keys[-1])}"

        for shard, location in enumerate(self._shards.locations):
            labels.extend(found(shard, shown(location)), place)
        if not keys:
            raise DataError(
                f"{shown(self._shards.locations[0])} holds no samples; expected members such as a/17.jpg and "
                "a/17.cls"
            )
        shards, offsets, lengths = np.array(places, np.int64).reshape(-1, 3).T
        text, ends = pack_texts(keys)
        names = {"keys": text, "key_ends": ends, **labels.arrays()}
        return {"shards": shards, "offsets": offsets, "lengths": lengths, **names}

    def _image_of(self, sample: Sample) -> Member:
        if self._image is not None:
            found = [self._image] if self._image in sample.members else []
        else:
            found = [s for s in sample.members if is_image(s)]
        if len(found) == 1:
            return sample.members[found[0]]
        there = ", ".join(f".{printable(suffix)}" for suffix in sorted(sample.members))
        if found:
            raise OptionError(
                f"{sample.place} has several images ({there}); name one: image_column"
            )
        raise DataError(
            f"{sample.place} has no image {self._image or ''}; it has {there}; add it, or take them out"
        )

    def _label_of(self, sample: Sample) -> Label:
        wanted = self._label or "cls"
        if wanted in sample.texts:
            return sample.texts[wanted].strip()
        name = self._label or "label"
        try:
            label = json.loads(sample.texts["json"])[name]
        except (KeyError, TypeError, ValueError, RecursionError):
            label = None
        if isinstance(label, str) or type(label) is int:
            return label
        raise DataError(
            f"{sample.place} has no label: no .{wanted}, and no {name!r} in a .json; add one, or name it: "
            "label_column"
        )


class Sample(NamedTuple):
    """The members of one sample by their suffix, and the content of those that are small and no image."""

    key: str
    title: str
    members: dict[str, Member]
    texts: dict[str, bytes]

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.title}:{printable(self.key)}"


def read_samples(data: Bytes, title: str) -> Iterator[Sample]:
    """Yield the samples of one tar file; members without a suffix, or that are hidden, are left out."""
    file = buffered(data)
    archive = TarReader(file, lambda length: file.seek(length, io.SEEK_CUR), title)
    sample: Sample | None = None
    for member in archive:
        folder, slash, base = member.name.rpartition("/")
        stem, dot, suffix = base.partition(".")
        if member.is_folder or not stem or not dot:
            continue
        if member.offset + member.size > data.size:
            raise DataError(
                f"{title} is truncated in '{printable(member.name)}'; copy or write it anew"
            )
        key, suffix = f"{folder}{slash}{stem}", suffix.lower()
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = Sample(key, title, {}, {})
        if suffix in sample.members:
            raise DataError(f"{sample.place} has two members .{printable(suffix)}; fix the archive")
        sample.members[suffix] = member
        if member.size <= _LABEL_BYTES and not is_image(suffix):
            sample.texts[suffix] = archive.read(member.size)
    if sample is not None:
        yield sample


def is_image(suffix: str) -> bool:
    """Whether members with this suffix are images, by what follows its last dot."""
    return f".{suffix.rsplit('.', 1)[-1]}" in IMAGE_SUFFIXES


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
