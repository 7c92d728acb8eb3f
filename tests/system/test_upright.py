"""Photos stored in the eight EXIF orientations, compared with the same images stored upright."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import plsc
from plsc.evaluate.embed import embed_images
from plsc.gallery import open_gallery
from plsc.gallery.embedder import index_images, open_embedder, search_images
from tests.faces import write_photos
from tests.images import photo, turn_images, write_dataset
from tests.system.small_entry import entry


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a dataset, and the same one with each image stored turned."""
    folder = tmp_path_factory.mktemp("data")
    upright, turned = write_dataset(folder / "upright", classes=6, per_class=4), folder / "turned"
    shutil.copytree(upright, turned)
    turn_images(turned)
    return upright, turned


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    return entry(folders[0], tmp_path_factory.mktemp("run")).train().checkpoint


@pytest.mark.parametrize("settings", [{}, {"set_cache": "memory:1G"}])
def test_training_on_turned_images_is_training_on_upright_ones(folders, trained, tmp_path, settings):
    found = plsc.load_network(entry(folders[1], tmp_path, **settings).train().checkpoint).state_dict()
    expected = plsc.load_network(trained).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_predict_index_and_search_embed_turned_images_as_upright_ones(folders, trained, tmp_path):
    plain, found = (entry(folder, tmp_path, set_checkpoint_dir=trained).predict() for folder in folders)
    assert np.array_equal(found.embeddings, plain.embeddings)
    embedder = open_embedder(trained)
    for name, folder in zip(("plain", "turned"), folders, strict=True):
        index_images(embedder, tmp_path / name, folder / "images")
    images = sorted((folders[1] / "images").iterdir())
    for gallery in (open_gallery(tmp_path / name) for name in ("plain", "turned")):
        for path, (_, nearest) in zip(images, search_images(embedder, gallery, images, 1), strict=True):
            assert (nearest[0].name, round(nearest[0].similarity, 5)) == (path.name, 1)
    how, network = {"batch_size": 8, "device": "cpu"}, plsc.load_network(trained)
    stored = ([(folder / "images" / path.name).read_bytes() for path in images] for folder in folders)
    expected, embedded = (embed_images(network, files, (3, 16, 16), **how) for files in stored)
    assert np.array_equal(expected, embedded)


def test_landmarks_are_those_of_the_upright_image(trained, tmp_path):
    plain, turned = tmp_path / "plain", tmp_path / "turned"
    for path in write_photos(plain):
        (turned / path).parent.mkdir(parents=True, exist_ok=True)
        orientation = len(list(turned.rglob("*.*"))) % 8 + 1
        (turned / path).write_bytes(photo(Image.open(plain / path), orientation, "PNG"))
    shutil.copy(plain / "landmarks.txt", turned)
    one, other = (
        entry(folder, tmp_path, set_checkpoint_dir=trained, set_landmarks="landmarks.txt")
        .predict()
        .embeddings
        for folder in (plain, turned)
    )
    assert np.array_equal(one, other)
