from pathlib import Path

import numpy as np
import pytest

from plsc.data.overview import draw_indices, inspect_dataset
from plsc.data.sources import TorchDatasetSource, open_source
from tests.images import write_dataset


@pytest.fixture
def folder(tmp_path) -> Path:
    root = write_dataset(tmp_path / "set", classes=5, per_class=3, size=16)
    with (root / "label.txt").open("a") as file:
        file.write("images/0_0.png 9\nimages/1_0.png 9\nimages/cut.png 9\nimages/gone.png 2\n")
    data = (root / "images/0_0.png").read_bytes()
    (root / "images/cut.png").write_bytes(data[: len(data) // 2])
    return root


def test_samples_classes_and_broken_images_are_counted(folder):
    found = inspect_dataset(open_source(folder), checked=0)
    assert (found.samples, found.classes, found.largest_label, found.unused) == (19, 6, 9, 4)
    assert (found.fewest, found.median, found.most) == (3, 3, 4)
    assert (found.checked, found.broken) == (19, 2)
    assert "images/cut.png (label.txt:18)" in found.faults[0]
    assert "images/gone.png (label.txt:19)" in found.faults[1]
    assert inspect_dataset(open_source(folder), checked=7).checked == 7


def test_names_of_files_do_not_control_the_terminal(folder):
    path = folder / "a\x1b[2J.csv"
    path.write_text("path,label\nimages/none.png,x\nimages/1_0.png,y\n")
    assert r"a\x1b[2J.csv:2" in inspect_dataset(open_source(path)).render()


def test_the_chosen_samples_depend_only_on_the_seed_and_decoded_images_are_checked_too():
    assert draw_indices(100, 10, 1).tolist() == draw_indices(100, 10, 1).tolist()
    assert draw_indices(100, 10, 1).tolist() != draw_indices(100, 10, 2).tolist()
    assert len(set(draw_indices(100, 10, 1).tolist())) == 10
    assert draw_indices(5, 10, 0).tolist() == list(range(5))
    arrays = [(np.zeros((4, 6, 3), np.uint8), 0), (np.zeros((3, 8, 5), np.float32), 1)]
    found = inspect_dataset(TorchDatasetSource(arrays))
    assert (found.checked, found.broken) == (2, 0)
