"""One dataset for the tests that only read it."""

import pytest

from tests.images import write_dataset, write_pair_file


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """24 images of 4 classes, and 40 pairs."""
    folder = write_dataset(tmp_path_factory.mktemp("train") / "faces", classes=4, per_class=6)
    write_pair_file(folder / "lfw.bin", folder)
    return folder
