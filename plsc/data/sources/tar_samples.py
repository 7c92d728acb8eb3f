"""The samples of a tar archive, one by one: the plain way, and what it gives."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from plsc.data.sources.columns import Label
from plsc.data.sources.image_folder import IMAGE_SUFFIXES
from plsc.data.sources.paths import printable
from plsc.data.tar_format import Member, TarReader
from plsc.errors import DataError
from plsc.storage.blocks import Bytes, buffered

_LABEL_BYTES = 2**20  # the most that a .cls or .json may have


class Samples(NamedTuple):
    """Some samples: their names, where their images are, int64 [n] each, and their labels as in `Rows`."""

    keys: list[bytes]
    offsets: np.ndarray
    lengths: np.ndarray
    texts: Callable[[], Sequence[Label]]
    numbers: np.ndarray | None = None


class Sample(NamedTuple):
    """The members of one sample by their suffix, and the content of those that are small and no image.

    end: where the headers of the next one begin, or the archive ends.
    """

    key: str
    title: str
    members: dict[str, Member]
    texts: dict[str, bytes]
    end: int

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.title}:{printable(self.key)}"


def read_samples(data: Bytes, title: str, position: int = 0) -> Iterator[Sample]:
    """Yield the samples of one tar file from a byte on where the headers of one begin: the plain way.

    Members without a suffix, or that are hidden, are left out.
    """
    file = buffered(data)
    file.seek(position)
    archive = TarReader(file, lambda length: file.seek(length, io.SEEK_CUR), title, position)
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
                yield sample._replace(end=archive.headers_at)
            sample = Sample(key, title, {}, {}, 0)
        if suffix in sample.members:
            raise DataError(f"{sample.place} has two members .{printable(suffix)}; fix the archive")
        sample.members[suffix] = member
        if member.size <= _LABEL_BYTES and not is_image(suffix):
            sample.texts[suffix] = archive.read(member.size)
    if sample is not None:
        yield sample._replace(end=data.size)


def is_image(suffix: str) -> bool:
    """Whether members with this suffix are images, by what follows its last dot."""
    return f".{suffix.rsplit('.', 1)[-1]}" in IMAGE_SUFFIXES
