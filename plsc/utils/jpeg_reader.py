"""The image reader of the original PLSC, under its old import path; a thin layer over ``plsc.data``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from plsc.data.batch import to_input
from plsc.data.decode import Image, ImageShape, decode_image
from plsc.data.pairs import read_pairs
from plsc.data.sources import LabelFileSource, check_labels
from plsc.errors import OptionError, naming

Reader = Callable[..., Iterator[tuple[np.ndarray, int]]]
LoadedPairs = tuple[list[np.ndarray], list[bool]]


def get_train_image_list(data_dir: str | Path) -> list[tuple[str, int]]:
    """Return (absolute path, label) of each line of ``label.txt``, in order."""
    source = LabelFileSource(Path(data_dir).absolute())
    labels = source.labels().tolist()
    return [(source.path(index), label) for index, label in enumerate(labels)]


def arc_train(
    data_dir: str | Path,
    class_dim: int | None = None,
    image_shape: ImageShape = (3, 112, 112),
    data_format: str = "NCHW",
) -> Reader:
    """Return a reader of the training set: each call yields all (image, label) in a new random order.

    Images are float32 [C, H, W], (x - 127.5) / 128, mirrored at random. Order and mirroring are drawn from
    ``random``. Raises DataError for a label outside 0..class_dim - 1, if class_dim is set.
    """
    if data_format != "NCHW":
        raise OptionError(f"data_format is {data_format!r}; expected 'NCHW'")
    source = LabelFileSource(data_dir)
    if class_dim is not None:
        check_labels(source, class_dim)

    def reader() -> Iterator[tuple[np.ndarray, int]]:
        order = list(range(len(source)))
        random.shuffle(order)
        for index in order:
            data, label = source[index]
            image = _normalised(data, image_shape, source.name(index))
            yield (image.flip(-1) if random.random() < 0.5 else image).numpy(), label

    return reader


def load_bin(path: str | Path, image_size: int | tuple[int, int]) -> LoadedPairs:
    """Return ([plain, flipped], is_same) of a pair file such as lfw.bin.

    Both arrays are float32 [2P, 3, H, W], normalised; images 2i and 2i + 1 are pair i.
    image_size: (H, W), or one number for a square.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    pairs = read_pairs(Path(path))
    plain = np.empty((len(pairs.images), 3, height, width), dtype=np.float32)
    for index, data in enumerate(pairs.images):
        plain[index] = _normalised(data, (3, height, width), f"image {index} of {path}").numpy()
    return [plain, plain[..., ::-1].copy()], [bool(same) for same in pairs.is_same]


def test(
    data_dir: str | Path,
    datasets: str,
    image_size: int | tuple[int, int] = (112, 112),  # noqa: PT028 - no pytest test
) -> tuple[list[LoadedPairs], list[str]]:
    """Load ``<data_dir>/<name>.bin`` for each of the comma-separated names.

    Returns the results of ``load_bin`` and the names. Raises DataError if a file is missing.
    """
    names = [name.strip() for name in datasets.split(",") if name.strip()]
    return [load_bin(Path(data_dir) / f"{name}.bin", image_size) for name in names], names


def _normalised(data: Image, image_shape: ImageShape, name: str) -> torch.Tensor:
    with naming(str, name):
        return to_input(decode_image(data, image_shape), "cpu")
