"""WebDataset tar files: members whose names differ in what follows the first dot are one sample."""

from __future__ import annotations

import hashlib
import io
import json
from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from plsc.data.sources.columns import (
    ColumnSource,
    Label,
    LabelReader,
    pack_texts,
    text_at,
)
from plsc.data.sources.image_folder import IMAGE_SUFFIXES
from plsc.data.sources.index_store import load_or_build
from plsc.data.sources.limits import check_image_bytes
from plsc.data.sources.paths import printable
from plsc.data.sources.shards import Shards, shard_files
from plsc.data.tar_format import Member, TarReader
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
