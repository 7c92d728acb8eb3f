"""The commands ``index`` and ``search``."""

from __future__ import annotations

import logging
from typing import Any

from plsc.cli.parser import REQUIRED, Argument, Command, word
from plsc.errors import OptionError


def run_index(
    model: str, gallery: str, images: str | None, embeddings: str | None, kind: str, **options: Any
) -> None:
    """Write a gallery of images, embeddings or classes."""
    from plsc.gallery.embedder import index_classes, index_embeddings, index_images, open_embedder

    if images is not None and embeddings is not None:
        raise OptionError("--images and --embeddings are both given; remove one of them")
    if embeddings is not None:
        made = index_embeddings(model, gallery, embeddings, kind)
    elif images is not None:
        made = index_images(open_embedder(model, options["model.name"]), gallery, images, kind)
    else:
        made = index_classes(open_embedder(model, options["model.name"], options["head"]), gallery, kind)
    print(f"wrote {gallery}: {len(made):,} {'images' if images or embeddings else 'classes'}, {kind}")


def run_search(
    model: str, gallery: str, images: list[str], k: int, fpir: float | None, **options: Any
) -> None:
    """Print the nearest entries of each image, and how many strangers would score as high."""
    from plsc.evaluate.capacity import capacity_of_search
    from plsc.gallery import open_gallery
    from plsc.gallery.embedder import open_embedder, search_images

    embedder = open_embedder(model, options["model.name"])
    opened = open_gallery(gallery, embedder.fingerprint)
    capacity = capacity_of_search(embedder.capacity, opened.is_classes, fpir)
    threshold, size = embedder.threshold, len(opened)
    if capacity is not None and fpir is not None:
        threshold = capacity.strictest(fpir, size)
    if capacity is not None and (warning := capacity.warning(size, fpir)):
        logging.getLogger(__name__).warning(warning)
    for name, nearest in search_images(embedder, opened, images, k):
        lines = [f"  {cosine:7.4f}  {entry}" for cosine, entry in nearest]
        if threshold is not None and nearest[0][0] < threshold:
            lines.insert(0, f"  unknown: no entry reaches the threshold, {threshold:.4f}")
        if capacity is not None:
            lines.append(f"  {capacity.fpir(nearest[0][0], size).sentence(size)}")
        print(name, *lines, sep="\n")


_MODEL = word("model", "a folder of plsc export, or a checkpoint (folder or fsspec URL)")
_NETWORK = Argument("model.name", str, None, "custom network of a checkpoint, as module:Class")
COMMANDS = {
    "index": Command(
        "write a gallery for search: the classes of a model, or images",
        run_index,
        (
            _MODEL,
            word("gallery", "the folder to write; it must not exist"),
            Argument("images", str, None, "folder, list file or image; default: the classes of the model"),
            Argument("embeddings", str, None, "folder of plsc predict with this model"),
            Argument(
                "kind", str, "float32", "float32, or int8: half the disk space, a quarter of the memory"
            ),
            Argument("head", str, None, "of several heads in a checkpoint, the one of the classes"),
            _NETWORK,
        ),
    ),
    "search": Command(
        "find the nearest entries of a gallery for images",
        run_search,
        (
            _MODEL,
            word("gallery", "a folder of plsc index"),
            Argument("images", list[str], REQUIRED, "images, folders or list files", positional=True),
            Argument("k", int, 5, "number of entries per image"),
            Argument("fpir", float, None, "share of strangers to accept, for the threshold of unknown"),
            _NETWORK,
        ),
    ),
}
