"""One suite over all sources: a new source is added to ``SOURCES`` and nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from plsc.data.decode import decode_image
from plsc.data.sources import Source, TorchDatasetSource, check_labels, open_source
from plsc.errors import DataError

COLOURS = [10, 90, 170, 250]
LABELS = [0, 1, 1, 2]


def write_images(folder: Path) -> list[str]:
    names = []
    for index, (colour, label) in enumerate(zip(COLOURS, LABELS, strict=True)):
        name = f"class{label}/{index}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (colour,) * 3).save(folder / name)
        names.append(name)
    return names


def from_label_file(folder: Path) -> Source:
    names = write_images(folder)
    lines = [f"{name} {label}\n" for name, label in zip(names, LABELS, strict=True)]
    (folder / "label.txt").write_text("".join(lines))
    return open_source(folder)


def from_image_folder(folder: Path) -> Source:
    write_images(folder)
    return open_source(folder)


def from_torch_dataset(folder: Path) -> Source:
    write_images(folder)
    return TorchDatasetSource(ImageFolder(folder))


SOURCES = [from_label_file, from_image_folder, from_torch_dataset]


@pytest.fixture(params=SOURCES, ids=lambda make: make.__name__)
def source(request, tmp_path) -> Source:
    return request.param(tmp_path)


def test_each_index_gives_its_image_and_label(source):
    assert len(source) == len(COLOURS)
    for index, (colour, label) in enumerate(zip(COLOURS, LABELS, strict=True)):
        data, found = source[index]
        assert found == label
        assert torch.equal(decode_image(data, (3, 16, 16)), torch.full((3, 16, 16), colour).byte())


def test_labels_are_those_of_the_items_as_int64(source):
    labels = source.labels()
    assert isinstance(labels, np.ndarray)
    assert labels.dtype == np.int64
    assert labels.tolist() == LABELS
    assert all(type(source[index][1]) is int for index in range(len(source)))


def test_names_are_different_and_one_line(source):
    names = [source.name(index) for index in range(len(source))]
    assert len(set(names)) == len(names)
    assert all(name and "\n" not in name for name in names)


def test_an_index_outside_raises_index_error(source):
    for index in (len(source), -1):
        with pytest.raises(IndexError):
            source[index]


def test_a_copy_in_another_process_gives_the_same(source):
    copy = pickle.loads(pickle.dumps(source))
    assert len(copy) == len(source)
    assert copy.labels().tolist() == LABELS
    assert copy.name(2) == source.name(2)
    assert copy[3][1] == source[3][1]


def test_a_label_outside_the_classes_is_named(source):
    check_labels(source, 3)
    with pytest.raises(
        DataError, match=r"label 2 at .* is outside 0\.\.1.*set_class_num\(3\)"
    ) as caught:
        check_labels(source, 2)
    assert source.name(3) in str(caught.value)
