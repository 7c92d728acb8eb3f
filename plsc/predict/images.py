"""The images to predict: of a source, read by number, or of a generator, read forwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from plsc.checkpoint import Manifest
from plsc.checkpoint.load import read_class_names
from plsc.config import Config
from plsc.data.class_names import class_names_of
from plsc.data.reader import declares_shards, open_reader
from plsc.data.sources.base import FileSource, IndexedSource, Source, TorchDatasetSource, whole_number
from plsc.data.sources.image_folders import open_images
from plsc.errors import DataError, shown
from plsc.evaluate.embed import ImagesOf, Listed
from plsc.inputs import Input
from plsc.train.data import align_source, check_no_landmarks, is_generator_reader, open_labelled

Images = str | os.PathLike[str] | Sequence[Any]


class Samples:
    """The images of a source, read by number."""

    def __init__(self, source: Source, name: str, threads: int) -> None:
        self.source, self.name, self.count = source, name, len(source)
        # A custom Dataset may not be thread-safe.
        self.threads = 0 if isinstance(source, TorchDatasetSource) else threads
        self._where: Callable[[int], Any] = source.path if isinstance(source, FileSource) else source.name
        if not self.count:
            raise DataError(f"{name} contains no images")

    def has(self, number: int) -> bool:
        """Return whether there is an image of this number."""
        return number < self.count

    def parts(self, start: int, stop: int, batch: int) -> Iterator[ImagesOf]:
        """Yield the images from `start` to `stop` in batches."""
        stop = min(stop, self.count)
        for first in range(start, stop, batch):
            yield ImagesOf(self.source, range(first, min(first + batch, stop)))

    def names(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of images."""
        return [shown(str(self._where(number))) for number in numbers]


class StreamedSamples:
    """The images of a generator, which can only be read forwards; every rank reads all of them."""

    name, count, threads = "the predict reader", None, 0

    def __init__(self, reader: Any, example: Input | None) -> None:
        arguments = {"rank": 0, "ranks": 1} if declares_shards(reader) else {}
        self._samples = _images_and_labels(open_reader(reader, "predict reader", example, **arguments))
        self._position = 0
        self._next = next(self._samples, None)
        if self._next is None:
            raise DataError("the predict reader yielded no image")

    def has(self, number: int) -> bool:
        """Skip the images before this number; return whether there are more."""
        while self._next is not None and self._position < number:
            self._take()
        return self._next is not None

    def parts(self, start: int, stop: int, batch: int) -> Iterator[ImagesOf]:
        """Yield the images from `start` to `stop` in batches."""
        while self.has(start) and self._position < stop:
            first, images, labels = self._position, [], []
            while self._next is not None and self._position < min(first + batch, stop):
                image, label = self._take()
                images.append(image)
                labels.append(label)
            listed = Listed(images, self.name, labels, first)
            yield ImagesOf(listed, range(first, self._position))

    def _take(self) -> tuple[Any, int]:
        taken = self._next
        assert taken is not None
        self._next = next(self._samples, None)
        self._position += 1
        return taken

    def names(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of images."""
        return [f"sample {number}" for number in numbers]


def open_samples(
    images: Images | None,
    reader: Any,
    config: Config,
    checkpoint: tuple[Path, Manifest],
    example: Input | None = None,
) -> Samples | StreamedSamples:
    """Return the images; classes with names are numbered as in the head, new ones after them."""
    data, is_strict = config.data, config.data.bad_images == "stop"
    threads = data.num_workers
    if images is not None:
        name = str(images) if isinstance(images, (str, os.PathLike)) else "the list"
        return Samples(
            align_source(open_images(images, data.allowed), data.landmarks, is_strict), name, threads
        )
    source: Source
    if reader is None:
        source = open_labelled(data.dataset_dir, data.format_arguments, data.landmarks, is_strict)
    else:
        check_no_landmarks(data.landmarks, "a reader")
        if is_generator_reader(reader, "predict_reader"):
            return StreamedSamples(reader, example)
        source = TorchDatasetSource(reader)
    class_names, saved = class_names_of(source), read_class_names(*checkpoint)
    if class_names is not None and saved is not None:
        assert isinstance(source, IndexedSource)
        source.renumber(saved.numbered(class_names))
    return Samples(source, str(config.data.dataset_dir), threads)


def _images_and_labels(samples: Any) -> Iterator[tuple[Any, int]]:
    for index, sample in enumerate(samples):
        if isinstance(sample, (tuple, list)) and sample:
            name = f"sample {index} of the predict reader"
            yield sample[0], whole_number(sample[1], name) if len(sample) > 1 else -1
        else:
            yield sample, -1
