"""The commands of an exported model: ``index``, ``search``, ``gallery`` and ``serve``."""

from __future__ import annotations

import logging
from typing import Any

from plsc.cli.data import ALLOWED
from plsc.cli.parser import REQUIRED, Argument, Command, Group, arguments_of, word
from plsc.config.option import at_least
from plsc.errors import DataError, OptionError, in_terminal, shown
from plsc.serve import ServeOptions
from plsc.version import install


def run_index(model: str, gallery: str, images: str | None, embeddings: str | None, **options: Any) -> None:
    """Write a gallery of images, embeddings or classes."""
    from plsc.gallery.embedder import enrol, index_classes, index_embeddings, index_images, open_embedder
    from plsc.gallery.gallery import is_postgres

    if images is not None and embeddings is not None:
        raise OptionError("--images and --embeddings are both given; remove one of them")
    allowed = options["allowed"] or ()
    if is_postgres(gallery):
        if images is None:
            raise OptionError("a database takes only --images; remove the other options")
        count, recall = enrol(open_embedder(model, options["model.name"]), gallery, images, allowed)
        print(f"wrote {shown(gallery)}: {count:,} images; {recall:.2%} of the 10 nearest entries are found")
        return
    if embeddings is not None:
        made = index_embeddings(model, gallery, embeddings)
    elif images is not None:
        made = index_images(open_embedder(model, options["model.name"]), gallery, images, allowed)
    else:
        made = index_classes(open_embedder(model, options["model.name"]), gallery)
    print(f"wrote {gallery}: {len(made):,} {'images' if images or embeddings else 'classes'}")


def run_search(
    model: str, gallery: str, images: list[str], k: int, fpir: float | None, **options: Any
) -> None:
    """Print the nearest entries of each image, and how many strangers would score as high."""
    from plsc.evaluate.capacity import capacity_of_search
    from plsc.gallery import open_gallery
    from plsc.gallery.embedder import open_embedder, search_images
    from plsc.gallery.gallery import import_faiss, is_postgres, open_store

    if not is_postgres(gallery):
        import_faiss()  # fails here, before the model is opened
    embedder = open_embedder(model, options["model.name"])
    opened = (open_store if is_postgres(gallery) else open_gallery)(gallery, embedder.fingerprint)
    capacity = capacity_of_search(embedder.capacity, getattr(opened, "is_classes", False), fpir)
    threshold, size = embedder.threshold, len(opened)
    if not size:
        raise DataError(f"{shown(gallery)} has no entries of this network")
    expected = ""
    if capacity is not None and fpir is not None:
        threshold = capacity.strictest(fpir, size)
        expected = f"; {capacity.expected(fpir, size)[1]}, {threshold:.4f}"
    if capacity is not None and (warning := capacity.warning(size, fpir)):
        logging.getLogger(__name__).warning(warning)
    for name, nearest in search_images(embedder, opened, images, k, options["allowed"] or ()):
        lines = [f"  {one.similarity:7.4f}  {one.name}{' (mapped)' * bool(one.mapped)}" for one in nearest]
        if threshold is not None and nearest[0].similarity < threshold:
            lines.insert(0, f"  unknown: no entry reaches the threshold, {threshold:.4f}")
        if capacity is not None:
            lines.append(f"  {capacity.fpir(nearest[0].similarity, size).sentence(size)}{expected}")
        print(in_terminal("\n".join([name, *lines])))


def run_copy(source: str, target: str, fingerprint: str) -> None:
    """Copy a gallery."""
    from plsc.gallery.gallery import copy_gallery

    print(f"copied to {shown(target)}: {copy_gallery(source, target, fingerprint)}")


def run_upgrade(
    source: str, target: str, anchors_from: str | None, anchors_to: str | None, **options: Any
) -> None:
    """Map a gallery to another network."""
    from plsc.gallery.embedder import open_embedder
    from plsc.gallery.upgrade import upgrade_gallery

    anchors = (anchors_from, anchors_to) if anchors_from and anchors_to else None
    if (anchors_from or anchors_to) and not anchors:
        raise OptionError("one of --anchors-from and --anchors-to is missing; pass both, of the same images")
    runs = open_embedder(options["from"]), open_embedder(options["to"])
    text = upgrade_gallery(source, target, runs, anchors)
    print(f"mapped to {shown(target)}: {text}")


def run_serve(model: str, **given: Any) -> None:
    """Serve an exported model."""
    try:
        from plsc.serve.app import serve  # imports torch, which --help does not need
    except ImportError as error:
        raise OptionError(f"the server needs {error.name}, which is missing: {install('serve')}") from error
    serve(model, ServeOptions(**given))


_MODEL = word("model", "a folder of plsc export, or a checkpoint (folder or fsspec URL)")
_PLACES = (
    word("source", "a folder of plsc index, an SQLite file, or a postgresql:// URL"),
    word("target", "a folder to write, a file named *.sqlite, or a postgresql:// URL"),
)
_NETWORK = Argument("model.name", str, None, "custom network of a checkpoint, as module:Class")
_COPY = Command(
    "copy a gallery between folders, SQLite files of plsc serve, and PostgreSQL",
    run_copy,
    (*_PLACES, Argument("fingerprint", str, "", "of several networks in a database, the first digits")),
)
_UPGRADE = Command(
    "map a gallery to a new network, without its images",
    run_upgrade,
    (
        *_PLACES,
        Argument("from", str, REQUIRED, "the run that made it: a checkpoint or an export"),
        Argument("to", str, REQUIRED, "the new run: a checkpoint, or an export with --classes"),
        Argument("anchors_from", str, None, "embeddings of images by the old run (plsc predict)"),
        Argument("anchors_to", str, None, "embeddings of the same images by the new run"),
    ),
)
COMMANDS: dict[str, Command | Group] = {
    "index": Command(
        "write a gallery for search: the classes of a model, or images",
        run_index,
        (
            _MODEL,
            word("gallery", "the folder to write, which must not exist; or a postgresql:// URL"),
            Argument("images", str, None, "folder, list file or image; default: the classes of the model"),
            Argument("embeddings", str, None, "folder of plsc predict with this model"),
            _NETWORK,
            ALLOWED,
        ),
    ),
    "search": Command(
        "find the nearest entries of a gallery for images",
        run_search,
        (
            _MODEL,
            word("gallery", "a folder of plsc index, or a postgresql:// URL"),
            Argument("images", list[str], REQUIRED, "images, folders or list files", positional=True),
            Argument("k", int, 5, "number of entries per image", check=at_least(1)),
            Argument("fpir", float, None, "share of strangers to accept, for the threshold of unknown"),
            _NETWORK,
            ALLOWED,
        ),
    ),
    "gallery": Group("copy and upgrade galleries", {"copy": _COPY, "upgrade": _UPGRADE}),
    "serve": Command(
        "serve an exported model over HTTP, with a page: embed, compare, search, enrol",
        run_serve,
        [word("model", "a folder of plsc export"), *arguments_of(ServeOptions)],
    ),
}
