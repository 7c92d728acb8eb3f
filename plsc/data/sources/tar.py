"""Read WebDataset tar files: members with the same name up to the first dot form one sample."""

from __future__ import annotations

import json
import re
import tarfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from tarfile import TarInfo
from typing import Any, NamedTuple

import numpy as np

from plsc.data.class_names import ClassNames
from plsc.data.files import Shards, hidden_part, load_or_build, shard_files
from plsc.data.sources.base import Ignored, is_image, printable
from plsc.data.sources.columns import (
    ColumnSource,
    Label,
    LabelReader,
)
from plsc.errors import DataError
from plsc.storage.blocks import Bytes, buffered
from plsc.storage.regular import parse_json, without_mark
from plsc.storage.urls import base_name, shown

_DIGITS = re.compile(rb"\d{200}")  # quadratic in tarfile before Python 3.12.6 (CVE-2024-6232)
_LABEL_BYTES = 2**20  # largest size of a .cls or .json
_MOST_REMARKS = 2**20  # bytes of a long name or of pax headers
_MOST_LISTED = 5
DEEPEST = 200  # nested folders; Python allows some hundred recursive calls
_ADJACENT = "members of a sample must be adjacent: tar --sort=name"


class TarSource(ColumnSource):
    """The samples of one or several tar shards (`shard_files`), local or remote, not compressed.

    ``a/17.jpg`` and ``a/17.cls`` form the sample ``a/17``: the name of a sample ends at the first dot after
    the folder, as for the webdataset package and Hugging Face. Labels are integers, or class names as in
    `RowSource`. The files are read once; the index is stored.

    Args:
        image_column: suffix of the image, such as ``input.png``; default: the only image suffix.
        label_column: suffix of the label as text, or key in the ``.json``; default: the only suffix that is
            ``cls`` or ends in ``.cls``, or ``label`` in the ``.json``.

    Raises:
        DataError: names the sample or member: a damaged archive, a link, a name that leads out of the
            folder, or a sample without image or label.
    """

    def _open(
        self, location: str, image: str | None, label: str | None, labels: LabelReader
    ) -> Mapping[str, np.ndarray]:
        self._files = Shards(shard_files(location, ".tar"))
        self._image, self._label = image, label
        kind = f"tar-7 {json.dumps([image, label, labels.names_wanted])}"
        index = load_or_build(self._files, kind, lambda: self._build(labels))
        self._shard, self._offsets, self._lengths = (index[name] for name in ("shards", "offsets", "lengths"))
        self._keys = ClassNames(index["keys"], index["key_ends"])
        return index

    def name(self, index: int) -> str:
        """Return ``train-000.tar:a/17``: the shard and the sample's name in it."""
        return f"{base_name(shown(self._files.locations[self._shard[index]]))}:{self._keys[index]}"

    def _file_numbers(self, indices: np.ndarray) -> np.ndarray:
        return self._shard[indices]

    def _build(self, labels: LabelReader) -> dict[str, np.ndarray]:
        places = array("q")  # shard, offset and length of each image
        keys: list[str] = []
        ignored = Ignored()

        def found(shard: int, title: str) -> Iterator[Label]:
            wanted = self._label or "cls", "json"
            for sample in read_samples(self._files[shard], title, wanted, ignored):
                image = self._image_of(sample)
                places.extend((shard, image.offset_data, image.size))
                keys.append(sample.key)
                yield self._label_of(sample)

        def place(_: int) -> str:
            return f"{shown(self._files.locations[places[-3]])}:{printable(keys[-1])}"

        for shard, location in enumerate(self._files.locations):
            labels.extend(found(shard, shown(location)), place)
        ignored.report(self._files.locations[0])
        if not keys:
            raise DataError(f"{shown(self._files.locations[0])} contains no samples: a/17.jpg and a/17.cls")
        shards, offsets, lengths = np.array(places, np.int64).reshape(-1, 3).T
        packed = ClassNames.of(keys)
        arrays = {"keys": packed.text, "key_ends": packed.ends, **labels.arrays()}
        return {"shards": shards, "offsets": offsets, "lengths": lengths, **arrays}

    def _image_of(self, sample: Sample) -> TarInfo:
        if self._image is not None:
            found = [self._image] if self._image in sample.members else []
        else:
            found = [suffix for suffix in sample.members if is_image(f".{suffix}")]
        if len(found) == 1:
            return sample.members[found[0]]
        there = ", ".join(f".{printable(suffix[:100])}" for suffix in sorted(sample.members)[:_MOST_LISTED])
        raise DataError(
            f"{sample.place} has {len(found)} images {self._image or 'of a known type'}, among {there}; "
            f"expected one (image_column); {_ADJACENT}"
        )

    def _label_of(self, sample: Sample) -> Label:
        wanted, key = self._label or "cls", self._label or "label"
        try:
            label = parse_json(sample.text("json")).get(key)
        except (AttributeError, ValueError, RecursionError):
            label = None
        label = without_mark(sample.text(wanted), f"{sample.place}.{wanted}").strip() or label
        if isinstance(label, str | bytes) or type(label) is int:
            return label
        raise DataError(
            f"{sample.place} has no label: expected one .{wanted}, or an integer or string {key!r} in a "
            f".json; label_column chooses another; {_ADJACENT}"
        )


class Sample(NamedTuple):
    """The members of one sample by suffix, and the content of those with a label."""

    key: str
    title: str
    members: dict[str, TarInfo]
    texts: dict[str, bytes]

    @property
    def place(self) -> str:
        """Location for messages."""
        return f"{self.title}:{printable(self.key[:200])}"

    def text(self, suffix: str) -> bytes:
        """Return the text of a suffix, or of the only one that ends in it after a dot; b"" if none is."""
        found = [suffix] if suffix in self.texts else [s for s in self.texts if s.endswith(f".{suffix}")]
        return self.texts[found[0]] if len(found) == 1 else b""


def read_samples(data: Bytes, title: str, wanted: Sequence[str], ignored: Ignored) -> Iterator[Sample]:
    """Yield the samples of one tar file, with the `wanted` texts.

    Hidden members (`is_hidden`) and those without a suffix are added to `ignored`.
    """
    file = buffered(data)
    sample: Sample | None = None
    for member in read_members(file, title):
        folder, slash, base = member.name.rpartition("/")
        stem, dot, suffix = base.partition(".")
        if member.isdir():
            continue
        if (hidden := hidden_part(member.name)) or not dot:
            ignored.add(hidden or member.name, "hidden" if hidden else None)
            continue
        if member.offset_data + member.size > data.size:
            raise DataError(
                f"{title} is truncated in '{printable(member.name[:200])}'; copy or write it again"
            )
        key, suffix = f"{folder}{slash}{stem}", suffix.lower()
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = Sample(key, title, {}, {})
        if suffix in sample.members:
            raise DataError(f"{sample.place} has two members .{printable(suffix[:100])}; fix the archive")
        sample.members[suffix] = member
        if member.size <= _LABEL_BYTES and f".{suffix}".endswith(tuple(f".{one}" for one in wanted)):
            sample.texts[suffix] = data.read_at(member.offset_data, member.size)
    if sample is not None:
        yield sample


def read_members(file: Any, title: str, *, has_end: bool = True) -> Iterator[TarInfo]:
    """Yield the files and folders of an uncompressed tar, in order, with names that stay below a folder.

    Args:
        file: has read, tell and seek, at least forwards.
        title: file name for messages.
        has_end: check that the archive has its end mark, and that nothing follows (which would be ignored).

    Raises:
        DataError: a damaged or truncated archive; a link, device or sparse file; or a name that is absolute
            or leads out of the folder.
    """
    try:
        bounded: Any = _Bounded(file)
        with tarfile.TarFile(fileobj=bounded, encoding="utf-8", errors="surrogateescape") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else it keeps all of them
                yield _checked(member, title)
            if has_end:
                file.seek(archive.offset)
                rest = file.read(2**16)  # tarfile ends silently at an invalid header
                if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
                    raise tarfile.ReadError("its end mark is missing; give joined archives as shards")
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        reason = printable(str(error))[:100]
        raise DataError(f"{title} is truncated, damaged, compressed or not a tar ({reason})") from error


class _Bounded:
    """A file whose headers cannot request large reads, which would take as much memory."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, length: int) -> bytes:
        """Read up to `length` bytes."""
        if not 0 <= length <= _MOST_REMARKS:
            raise tarfile.ReadError(f"a header announces {length} bytes of names or pax headers")
        data: bytes = self._file.read(length)
        if length > tarfile.BLOCKSIZE and _DIGITS.search(data):
            raise tarfile.ReadError("a header has a number of over 200 digits")
        return data


def _checked(member: TarInfo, title: str) -> TarInfo:
    """Return a member with a relative path as its name; DataError if it is not a plain file or folder."""
    is_plain = member.type == tarfile.REGTYPE and member.sparse is None  # the usual case
    is_known = is_plain or member.isdir() or (member.isreg() and not member.issparse())
    is_known &= member.name.count("/") < DEEPEST
    if not is_plain and member.isdir():
        member.size = 0
    name = member.name
    if not name or name[0] in "/." or "/." in name or "//" in name or "\0" in name:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        is_known &= not (
            name.startswith("/") or ".." in parts or "\0" in name or (not parts and "." not in name)
        )
        member.name = "/".join(parts)
    if not is_known or member.size < 0:
        raise DataError(
            f"{title}: '{printable(name[:200])}' leads out of the archive, is too deep, or no plain file"
        )
    return member
