"""Build galleries with a trained network: a checkpoint, or a folder of ``plsc export``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from plsc.checkpoint import load_weights, read_manifest
from plsc.checkpoint.load import read_class_names
from plsc.checkpoint.manifest import CLASS_WEIGHTS
from plsc.data.class_names import ClassNames
from plsc.data.decode import decode_image
from plsc.data.sources import Source, open_images
from plsc.errors import DataError
from plsc.evaluate.capacity import Capacity
from plsc.export import open_model
from plsc.export.folder import checksum_of
from plsc.gallery.gallery import AnyStore, Gallery, normalised, open_store, write_gallery
from plsc.gallery.store import Found, New
from plsc.machine import Counter
from plsc.parallel.world import World
from plsc.predict.embeddings import EMBEDDINGS, NAMES, open_embeddings
from plsc.predict.network import find_model, load_trained

_BATCH = 64  # images
StrPath: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True)
class Embedder:
    """A trained network, which is loaded when it is first used.

    Attributes:
        place: of the checkpoint or export, for messages.
        fingerprint: as of `ServedModel`.
        size: returns D, values per embedding.
        decode: decodes an image.
        embed: returns the embeddings, float32 [n, D], of n decoded images.
        classes: returns the class weights, float32 [C, D] or [C, sub-centres, D], and the class names.
        threshold: cosine from which the nearest entry counts as found (`ServedModel.default_far`), or None.
        capacity: as of `ServedModel`.
    """

    place: str
    fingerprint: str
    size: Callable[[], int]
    decode: Callable[[Any], Any]
    embed: Callable[[list[Any]], np.ndarray]
    classes: Callable[[], tuple[np.ndarray, ClassNames | None]]
    threshold: float | None = None
    capacity: Capacity | None = None

    def embed_source(self, source: Source) -> Iterator[tuple[range, np.ndarray]]:
        """Yield numbers of images, and their embeddings, float32 [n, D]; an error names the image."""
        progress = Counter("embedded", len(source))
        for first in range(0, len(source), _BATCH):
            numbers, images = range(first, min(first + _BATCH, len(source))), []
            for number in numbers:
                image, _ = source[number]
                try:
                    images.append(self.decode(image))
                except DataError as error:
                    raise error.at(source.name(number)) from error
            yield numbers, self.embed(images)
            progress.add(len(numbers))


def open_embedder(model: StrPath, network: str | None = None) -> Embedder:
    """Open a checkpoint (folder or URL), or a folder of ``plsc export``, which onnxruntime runs.

    network: name of the class of a checkpoint's custom network, ``package.module:Class``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path, is_export = find_model(model)
    if is_export:
        served = open_model(path)
        return Embedder(
            os.fspath(model),
            served.fingerprint,
            lambda: served.emb_size,
            served.preprocess,
            lambda images: served.embed(np.stack(images)),
            served.class_weights,
            None if served.default_far is None else served.thresholds[served.default_far],
            served.capacity,
        )
    manifest = read_manifest(path)
    trained = functools.cache(lambda: load_trained(path, network, World.single("cpu")))

    def class_weights() -> tuple[np.ndarray, ClassNames | None]:
        weight = load_weights(path, CLASS_WEIGHTS)["weight"]
        return weight.float().numpy(), read_class_names(path, manifest)

    return Embedder(
        os.fspath(model),
        checksum_of(load_weights(path)),
        lambda: trained().config.model.emb_size,
        lambda data: decode_image(data, trained().config.model.image_shape),
        # without the mirrored image, as in `plsc predict` and `plsc export`
        lambda images: trained().embed(images, "the images", flip=False),
        class_weights,
    )


def index_classes(embedder: Embedder, gallery: StrPath) -> Gallery:
    """Write the class weights of a model as a gallery, whose entries are the classes.

    Args:
        embedder: of a checkpoint, or a folder of ``plsc export --classes``; one vector per class.
        gallery: the folder to write.
    """
    weight, names = embedder.classes()
    return write_gallery(gallery, weight, names, model=embedder.fingerprint, of="classes")


def index_images(
    embedder: Embedder, gallery: StrPath, images: StrPath, allowed: Sequence[str] = ()
) -> Gallery:
    """Write the embeddings of images as a gallery, whose entries are the images.

    images, allowed: as of `open_images`. Other arguments as in `index_classes`.
    """
    source = open_images(images, allowed)
    names = [source.name(number) for number in range(len(source))]
    embeddings = np.concatenate([found for _, found in embedder.embed_source(source)])
    return write_gallery(gallery, embeddings, names, model=embedder.fingerprint)


def enrol(embedder: Embedder, url: str, images: StrPath, allowed: Sequence[str] = ()) -> tuple[int, float]:
    """Enrol images in an empty table of PostgreSQL and build its index, in one transaction.

    Returns the number of images, and the recall of `PostgresStore.measure_recall`.
    """
    source = open_images(images, allowed)
    store: Any = open_store(url, embedder.fingerprint, embedder.size())
    with closing(store):
        if len(store):
            raise DataError(f"{store.path} has {len(store)} entries; enrol further images with plsc serve")
        rows = [row for _, found in embedder.embed_source(source) for row in normalised(found, 0, "vector")]
        store.write([New(source.name(number), row, b"") for number, row in enumerate(rows)], builds=True)
        return len(rows), store.measure_recall()


def index_embeddings(model: StrPath, gallery: StrPath, embeddings: StrPath) -> Gallery:
    """Write the output folder of `Entry.predict` with the same model as a gallery of its images.

    Raises CheckpointError if the embeddings are of another network. Arguments as in `index_classes`.
    """
    opened = open_embeddings(embeddings, model)
    names = opened[NAMES][:].tolist()
    fingerprint = opened.index["model"]["weights"]
    return write_gallery(gallery, opened[EMBEDDINGS].shards, names, model=fingerprint)


def search_images(
    embedder: Embedder,
    gallery: Gallery | AnyStore,
    images: Sequence[StrPath],
    k: int = 5,
    allowed: Sequence[str] = (),
) -> Iterator[tuple[str, list[Found]]]:
    """Yield the name of each image, and its k nearest entries, the nearest first.

    gallery: of the same network. images: each as in `index_images`, like allowed.
    """
    for source in (open_images(one, allowed) for one in images):
        for numbers, embeddings in embedder.embed_source(source):
            if isinstance(gallery, Gallery):
                found = gallery.find(embeddings, k)
            else:
                found = gallery.search(normalised(embeddings, 0, "embedding"), k)
            yield from zip(map(source.name, numbers), found, strict=True)
