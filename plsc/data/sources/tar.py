"""WebDataset tar files: members whose names differ in what follows the first dot are one sample."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping

import numpy as np

from plsc.data.native.tar import IS_JSON, MOST_SAMPLES, FoundSamples, find_tar_samples
from plsc.data.sources.columns import (
    ColumnSource,
    Label,
    LabelReader,
    pack_texts,
    text_at,
)
from plsc.data.sources.index_store import load_or_build
from plsc.data.sources.limits import check_image_bytes
from plsc.data.sources.paths import printable
from plsc.data.sources.shards import Shards, shard_files
from plsc.data.sources.tar_samples import Sample, Samples, is_image, read_samples
from plsc.data.tar_format import Member
from plsc.errors import DataError, OptionError
from plsc.storage.blocks import Bytes
from plsc.storage.urls import base_name, shown

_PIECE = 2**20  # stays in the cache of a processor


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
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        keys: list[bytes] = []
        for shard, location in enumerate(self._shards.locations):
            title = shown(location)
            for samples in self._samples_in(self._shards[shard], title):
                if samples.numbers is None or not labels.extend_numbers(samples.numbers):
                    place = functools.partial(_place, title, samples.keys)
                    labels.extend(samples.texts(), place)
                keys += samples.keys
                shards = np.full(len(samples.keys), shard)
                parts.append((shards, samples.offsets, samples.lengths))
        if not keys:
            raise DataError(
                f"{shown(self._shards.locations[0])} holds no samples; expected members such as a/17.jpg and "
                "a/17.cls"
            )
        shards, offsets, lengths = map(np.concatenate, zip(*parts, strict=True))
        text, ends = pack_texts(keys)
        names = {"keys": text, "key_ends": ends, **labels.arrays()}
        return {"shards": shards, "offsets": offsets, "lengths": lengths, **names}

    def _samples_in(self, data: Bytes, title: str) -> Iterator[Samples]:
        """Yield the samples of an archive: found by C, or one by one where one is not usual."""
        position, slow = 0, 1
        label = self._label or "cls"
        while position < data.size or not data.size:  # an empty one is refused below
            found = None
            if not is_image(label):  # which never counts as a text
                piece = data.read_at(position, min(_PIECE, data.size - position))
                found = find_tar_samples(piece, position, data.size, self._image or "", label)
            if found is not None:
                yield self._of_found(found, piece, title)
                position += found.position
                slow = 1 if len(found) > slow else min(2 * slow, MOST_SAMPLES)
                if found.ended and len(found):
                    continue
            else:
                slow = MOST_SAMPLES
            one_by_one = read_samples(data, title, position)
            taken = list(itertools.islice(one_by_one, slow))
            yield self._of_taken(taken)
            position = taken[-1].end if taken else data.size

    def _of_taken(self, samples: list[Sample]) -> Samples:
        images = [self._image_of(sample) for sample in samples]
        labels = [self._label_of(sample) for sample in samples]
        keys = [sample.key.encode("utf-8", "surrogateescape") for sample in samples]
        offsets = np.array([image.offset for image in images], np.int64)
        lengths = np.array([image.size for image in images], np.int64)
        return Samples(keys, offsets, lengths, lambda: labels)

    def _of_found(self, found: FoundSamples, piece: bytes, title: str) -> Samples:
        keys = _cut(piece, found.key_starts, found.key_lengths)

        def texts() -> list[Label]:
            texts: list[Label] = list(_cut(piece, found.text_starts, found.text_lengths))
            for index in np.flatnonzero(found.numbers == IS_JSON).tolist():
                key = keys[index].decode("utf-8", "surrogateescape")
                sample = Sample(key, title, {}, {"json": bytes(texts[index])}, 0)
                texts[index] = self._label_of(sample)
            return texts

        is_numbers = len(found) > 0 and found.numbers.min() >= 0
        numbers = found.numbers if is_numbers else None
        return Samples(keys, found.offsets, found.lengths, texts, numbers)

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


def _place(title: str, keys: list[bytes], position: int) -> str:
    return f"{title}:{printable(keys[position])}"


def _cut(text: bytes, starts: np.ndarray, lengths: np.ndarray) -> list[bytes]:
    places = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [text[start : start + length] for start, length in places]
