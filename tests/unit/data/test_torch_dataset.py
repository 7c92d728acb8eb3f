from __future__ import annotations

import traceback

import numpy as np
import pytest
import torch
from PIL import Image

from plsc.data.sources import TorchDatasetSource
from plsc.errors import DataError, add_note


class Items:
    """A dataset that counts how often it is read."""

    def __init__(self, labels: list) -> None:
        self.items = labels
        self.reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Image.Image, object]:
        self.reads += 1
        return Image.new("RGB", (8, 8)), self.items[index]


@pytest.mark.parametrize("attribute", ["targets", "labels"])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_declared_labels_are_used_without_reading_images(attribute, kind):
    dataset = Items([4, 5, 6])
    setattr(dataset, attribute, kind([4, 5, 6]))
    labels = TorchDatasetSource(dataset).labels()
    assert labels.dtype == np.int64
    assert labels.tolist() == [4, 5, 6]
    assert dataset.reads == 0
    dataset.target_transform = lambda target: target * 10
    dataset.items = [40, 50, 60]
    assert TorchDatasetSource(dataset).labels().tolist() == [40, 50, 60]


@pytest.mark.parametrize("declared", [[1, 2], [[1], [2], [3]], ["a", "b", "c"], [[1], [2, 3], 4]])
def test_labels_of_unexpected_form_are_not_used(declared):
    dataset = Items([4, 5, 6])
    dataset.targets = declared
    source = TorchDatasetSource(dataset)
    assert source.labels().tolist() == [4, 5, 6]
    source.labels()
    assert dataset.reads == 3


@pytest.mark.parametrize("label", [1.0, "1", None, torch.tensor(1.5), torch.tensor([1, 2])])
def test_a_label_that_is_not_an_integer_is_refused(label):
    with pytest.raises(DataError, match=r"dataset\[0\]: .*integer"):
        TorchDatasetSource(Items([label]))[0]


def test_a_file_that_the_dataset_cannot_read_is_a_bad_image(tmp_path):
    class Broken(Items):
        def __getitem__(self, index: int) -> tuple[Image.Image, object]:
            return Image.open(tmp_path / "missing.jpg"), 0

    with pytest.raises(
        DataError, match=r"dataset\[0\]: cannot be read \(.*\) at .*test_torch_dataset"
    ) as bad:
        TorchDatasetSource(Broken([0]))[0]
    assert isinstance(bad.value.__cause__, FileNotFoundError)


def test_exceptions_of_a_dataset_keep_type_and_traceback_and_name_the_sample():
    class Mistaken(Items):
        def __getitem__(self, index: int) -> tuple[Image.Image, object]:
            return super().__getitem__({0: 0}[index])

    source = TorchDatasetSource(Mistaken([0, 1]), "mine")
    for read in (lambda: source[1], source.labels):
        with pytest.raises(KeyError) as mistake:
            read()
        told = "".join(traceback.format_exception(mistake.value))
        assert "return super().__getitem__({0: 0}[index])" in told
        assert told.count("while reading mine[1]") == 1
    error = ValueError("text")
    add_note(error, "note")
    add_note(error, "note")
    assert "".join(traceback.format_exception(error)).count("note") == 1
