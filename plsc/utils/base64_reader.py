"""The base64 reader of the original PLSC, under its old import path; a thin layer over ``plsc.data``.

The list of files is split into equal consecutive parts, one per rank. plsc passes rank and world size when it
calls the reader (``reader.shards_itself``). Otherwise they come from the arguments, or from the environment
variables RANK and WORLD_SIZE, or PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plsc.data.batch import to_input
from plsc.data.decode import ImageShape, decode_image
from plsc.data.sources.rows import Base64Source
from plsc.errors import DataError, OptionError
from plsc.utils.jpeg_reader import Reader, load_bin, test

__all__ = ["arc_iterator", "load_bin", "test", "train"]


def train(
    data_dir: str | Path,
    file_list: str | int = "file_list.txt",
    num_classes: int | None = None,
    image_shape: ImageShape = (3, 112, 112),
    rank: int | None = None,
    ranks: int | None = None,
) -> Reader:
    """Return a reader of this rank's files: each call yields (image, label), in the order of the lines.

    Called as ``train(data_dir, file_list, num_classes)`` or ``train(data_dir, num_classes)``.
    Images are float32 [C, H, W], (x - 127.5) / 128, mirrored at random (with ``random``). Raises DataError
    for a label outside 0..num_classes - 1, if that is set, and for files that cannot be divided equally over
    the ranks.
    """
    if isinstance(file_list, int):
        return train(data_dir, "file_list.txt", file_list, image_shape, rank, ranks)
    source = Base64Source(data_dir, file_list)
    options = {"rand_mirror": True, "normalize": True}
    return _reader(source, num_classes, image_shape, rank, ranks, **options)


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
    OptionError for color_jitter and rotate: use the augmentation options of plsc instead.
    """
    if color_jitter or rotate:
        raise OptionError(
            "color_jitter and rotate are not supported by this reader; use the augmentation options data.* "
            "(plsc config lists them), or transform the images that the reader yields"
        )
    path = Path(file_list)
    source = Base64Source(path.parent, path.name)
    return _reader(source, class_dim, image_shape, None, None, rand_mirror, normalize)


def _reader(
    source: Base64Source,
    num_classes: int | None,
    image_shape: ImageShape,
    rank: int | None,
    ranks: int | None,
    rand_mirror: bool,
    normalize: bool,
) -> Reader:
    rank, ranks = _rank_and_world_size(rank, ranks)
    _share(source, rank, ranks, num_classes)  # report errors now, not at the first image

    def reader(rank: int = rank, ranks: int = ranks) -> Iterator[tuple[np.ndarray, int]]:
        for index in _share(source, rank, ranks, num_classes):
            data, label = source[index]
            try:
                image = decode_image(data, image_shape)
            except DataError as error:
                raise error.at(source.name(index)) from error
            if rand_mirror and random.random() < 0.5:
                image = image.flip(-1)
            pixels = to_input(image, "cpu") if normalize else image.float()
            yield pixels.numpy(), label

    reader.shards_itself = True  # type: ignore[attr-defined]
    return reader


def _share(source: Base64Source, rank: int, ranks: int, num_classes: int | None) -> range:
    """Return the samples of a rank's files, after checking their labels."""
    counts = source.lines_per_file
    lines = counts.reshape(ranks, -1).sum(axis=1) if len(counts) % ranks == 0 else None
    if lines is None or (lines != lines[0]).any():
        raise DataError(
            f"{len(counts)} files of {', '.join(map(str, counts[:20]))} lines cannot be divided equally over "
            f"{ranks} ranks; run tools/process_base64_files.py --nranks {ranks} first"
        )
    share = range(rank * int(lines[0]), (rank + 1) * int(lines[0]))
    labels = source.labels()[share.start : share.stop]
    if num_classes is None:
        return share
    bad = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(bad):
        raise DataError(
            f"label {labels[bad[0]]} at {source.name(share[bad.item(0)])} is outside 0..{num_classes - 1}; "
            "pass more classes or fix the line"
        )
    return share


def _rank_and_world_size(rank: int | None, ranks: int | None) -> tuple[int, int]:
    if (rank is None) != (ranks is None):
        raise OptionError("only one of rank and ranks is set; pass both or neither")
    if rank is None or ranks is None:
        rank = int(os.environ.get("RANK", os.environ.get("PADDLE_TRAINER_ID", "0")))
        ranks = int(os.environ.get("WORLD_SIZE", os.environ.get("PADDLE_TRAINERS_NUM", "1")))
    if not 0 <= rank < ranks:
        raise OptionError(f"rank {rank} is outside 0..{ranks - 1}; pass rank and ranks of this process")
    return rank, ranks
