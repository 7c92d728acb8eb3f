import pytest

from tests.images import write_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """91 images: 23 steps of 4, the last of 3."""
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=13, per_class=7)
