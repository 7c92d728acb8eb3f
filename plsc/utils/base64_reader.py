"""The base64 reader of the original PLSC, under its old import path; a thin layer over ``plsc.data``.

The list of files is split into equal consecutive parts, one per rank. plsc passes rank and world size when it
calls the reader (``reader.shards_itself``). Otherwise they are the environment variables RANK and WORLD_SIZE.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plsc.data.batch import to_input
from plsc.data.decode import ImageShape, decode_image
from plsc.data.sources import Base64Source, check_labels
from plsc.errors import DataError, OptionError, naming
from plsc.utils.jpeg_reader import Reader, load_bin, test

__all__ = ["arc_iterator", "load_bin", "test", "train"]


def train(
    data_dir: str | Path,
    file_list: str | int = "file_list.txt",
    num_classes: int | None = None,
    image_shape: ImageShape = (3, 112, 112),
) -> Reader:
    """Return a reader of this rank's files: each call yields (image, label), in the order of the lines.

    Called as ``train(data_dir, file_list, num_classes)`` or ``train(data_dir, num_classes)``.
    Images are float32 [C, H, W], (x - 127.5) / 128, mirrored at random (with ``random``). Raises DataError
    for a label outside 0..num_classes - 1, if that is set, and for files that cannot be divided equally over
    the ranks.
    """
    if isinstance(file_list, int):
        return train(data_dir, "file_list.txt", file_list, image_shape)
    source = Base64Source(data_dir, file_list)
    return _reader(source, num_classes, image_shape, rand_mirror=True, normalize=True)


def arc_iterator(
    file_list: str | Path,
    class_dim: int,
    color_jitter: bool = False,
    rotate: bool = False,
    rand_mirror: bool = False,
    normalize: bool = False,
    image_shape: ImageShape = (3, 112, 112),
) -> Reader:
    """Return a reader like `train`, for a file list at any path.

    Names in the list are relative to its folder. Without `normalize`, images are float32 in 0..255. Raises
    OptionError for color_jitter and rotate: use a transform of torchvision instead.
    """
    if color_jitter or rotate:
        raise OptionError("color_jitter and rotate are not supported by this reader; use train_transform")
    path = Path(file_list)
    source = Base64Source(path.parent, path.name)
    return _reader(source, class_dim, image_shape, rand_mirror, normalize)


def _reader(
    source: Base64Source,
    num_classes: int | None,
    image_shape: ImageShape,
    rand_mirror: bool,
    normalize: bool,
) -> Reader:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    _share(source, rank, ranks, num_classes)  # report errors now, not at the first image

    def reader(rank: int = rank, ranks: int = ranks) -> Iterator[tuple[np.ndarray, int]]:
        for index in _share(source, rank, ranks, num_classes):
            data, label = source[index]
            with naming(source.name, index):
                image = decode_image(data, image_shape)
            if rand_mirror and random.random() < 0.5:
                image = image.flip(-1)
            pixels = to_input(image, "cpu") if normalize else image.float()
            yield pixels.numpy(), label

    reader.shards_itself = True  # type: ignore[attr-defined]
    return reader


def _share(source: Base64Source, rank: int, ranks: int, num_classes: int | None) -> range:
    """Return the samples of a rank's files, after checking all labels."""
    counts = source.lines_per_file
    lines = counts.reshape(ranks, -1).sum(axis=1) if len(counts) % ranks == 0 else None
    if lines is None or (lines != lines[0]).any():
        raise DataError(
            f"{len(counts)} files of {', '.join(map(str, counts[:20]))} lines cannot be divided equally over "
            f"{ranks} ranks; run plsc data partition --nranks {ranks}"
        )
    if num_classes is not None:
        check_labels(source, num_classes)
    return range(rank * int(lines[0]), (rank + 1) * int(lines[0]))
