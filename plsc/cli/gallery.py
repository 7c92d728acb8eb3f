"""The commands ``index`` and ``search``."""

from __future__ import annotations

from plsc.cli.parser import Argument, Command, word
from plsc.errors import OptionError


def run_index(model: str, gallery: str, images: str | None, embeddings: str | None, kind: str) -> None:
    """Write a gallery of images, embeddings or classes."""
    from plsc.gallery import embedder

    if images is not None and embeddings is not None:
        raise OptionError("--images and --embeddings are both given; remove one of them")
    if images is not None:
        made = embedder.index_images(model, gallery, images, kind)
    elif embeddings is not None:
        made = embedder.index_embeddings(model, gallery, embeddings, kind)
    else:
        made = embedder.index_classes(model, gallery, kind)
    print(f"wrote {gallery}: {len(made):,} {'images' if images or embeddings else 'classes'}, {kind}")


def run_search(model: str, gallery: str, images: str, k: int) -> None:
    """Print the nearest entries of each image."""
    from plsc.gallery.embedder import search_images

    for name, nearest in search_images(model, gallery, images, k):
        print(name, *(f"  {cosine:7.4f}  {entry}" for cosine, entry in nearest), sep="\n")


_MODEL = word("model", "a folder of plsc export, or a checkpoint (folder or fsspec URL)")
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
        ),
    ),
    "search": Command(
        "find the nearest entries of a gallery for images",
        run_search,
        (
            _MODEL,
            word("gallery", "a folder of plsc index"),
            word("images", "an image, a folder or a list file"),
            Argument("k", int, 5, "number of entries per image"),
        ),
    ),
}
