"""Training, prediction and tests on photos: with landmarks, and turned; compared with plain images."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import plsc
from plsc.data.alignment import align
from plsc.errors import DataError, OptionError
from plsc.evaluate.embed import embed_images
from plsc.gallery import open_gallery
from plsc.gallery.embedder import index_images, open_embedder, search_images
from tests.faces import write_photos
from tests.images import photo, turn_images, write_dataset
from tests.system.small_entry import entry


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder of photos with landmarks.txt, and one of the same faces, aligned to 16x16."""
    folder = tmp_path_factory.mktemp("faces")
    photos, aligned = folder / "photos", folder / "aligned"
    for path, points in write_photos(photos).items():
        (aligned / path).parent.mkdir(parents=True, exist_ok=True)
        pixels = align(np.asarray(Image.open(photos / path)), points, 16, 16)
        Image.fromarray(pixels).save(aligned / path)
    return photos, aligned


def weights(checkpoint):
    return plsc.load_network(checkpoint).state_dict()


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    return entry(folders[1], tmp_path_factory.mktemp("run")).train().checkpoint


@pytest.mark.parametrize(
    "settings",
    [{"set_cache": "memory:1G"}, {"set_num_workers": 0, "set_val_dir": "photos", "set_with_test": True}],
)
def test_training_on_photos_is_training_on_their_aligned_faces(folders, trained, tmp_path, settings):
    if "set_val_dir" in settings:
        settings = {**settings, "set_val_dir": folders[0]}
    ins = entry(folders[0], tmp_path, set_landmarks="landmarks.txt", **settings)
    found, expected = weights(ins.train().checkpoint), weights(trained)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_embeddings_of_photos_are_those_of_their_aligned_faces(folders, trained, tmp_path):
    plain = entry(folders[1], tmp_path, set_checkpoint_dir=trained).predict()
    found = entry(folders[0], tmp_path, set_checkpoint_dir=trained, set_landmarks="landmarks.txt").predict()
    assert np.array_equal(found.embeddings, plain.embeddings)
    assert [Path(name).name for name in found.names] == [Path(name).name for name in plain.names]
    without = entry(folders[0], tmp_path, set_checkpoint_dir=trained).predict()
    assert not np.allclose(without.embeddings, plain.embeddings, atol=1e-3)
    held_out = (
        entry(folder, tmp_path, set_checkpoint_dir=trained, set_val_dir=folder, set_landmarks=file).test()
        for folder, file in zip(folders, ("landmarks.txt", None), strict=True)
    )
    assert next(held_out) == next(held_out)


def test_lists_and_protocols_on_photos_are_those_on_their_aligned_faces(folders, trained, tmp_path):
    photos, aligned = folders
    paths = sorted(str(path.relative_to(photos)) for path in photos.glob("*/*.png"))
    pairs = [(a, b, int(Path(a).parent == Path(b).parent)) for a in paths for b in paths if a < b]
    (tmp_path / "pairs.txt").write_text("".join(f"{a} {b} {same}\n" for a, b, same in pairs))
    ins = {
        folder: entry(folder, tmp_path / folder.name, set_checkpoint_dir=trained, set_landmarks=landmarks)
        for folder, landmarks in ((photos, "landmarks.txt"), (aligned, None))
    }
    found, plain = (ins[folder].predict(folder).embeddings for folder in folders)
    assert np.array_equal(found, plain)
    for data in ({"protocol": "pairs", "pairs": tmp_path / "pairs.txt"}, {"protocol": "retrieval"}):
        found, plain = (
            ins[folder].test(images=str(folder), output=tmp_path / folder.name / data["protocol"], **data)
            for folder in folders
        )
        assert [one.as_dict() for one in found.values()] == [one.as_dict() for one in plain.values()]
        report = (tmp_path / "photos" / data["protocol"] / "report.md").read_text()
        assert "aligned by landmarks.txt" in report


def test_the_exported_model_and_the_log_say_that_faces_were_aligned(folders, trained, tmp_path, messages):
    run = entry(folders[0], tmp_path / "run", set_landmarks="landmarks.txt").train().checkpoint
    assert not any("data.landmarks" in text for text in messages)
    for checkpoint in (run, trained):
        ins = entry(folders[1], tmp_path, set_checkpoint_dir=checkpoint)
        folder = ins.convert_for_prediction(tmp_path / checkpoint.parent.name / "model", graph="none")
        alignment = json.loads((folder / "model.json").read_text())["input"].get("alignment")
        assert (alignment is None) == (checkpoint is trained)
        if alignment:
            assert alignment["transform"] == "similarity"
            assert alignment["landmarks"][0] == pytest.approx([38.2946 / 7, 51.6963 / 7], abs=1e-4)
            ins.predict()
            assert any("data.landmarks" in text for text in messages)


def test_images_without_landmarks_stop_the_run_or_are_skipped(folders, tmp_path):
    lines = (folders[0] / "landmarks.txt").read_text().splitlines(keepends=True)
    (tmp_path / "few.txt").write_text("".join(lines[1:]))
    settings = {"set_landmarks": tmp_path / "few.txt"}
    with pytest.raises(DataError, match=r"1 of 18 images have no line .* c0/0\.png"):
        entry(folders[0], tmp_path / "a", **settings).train()
    entry(folders[0], tmp_path / "b", set_bad_images="skip", **settings).train()
    listed = (tmp_path / "b" / "bad_samples.txt").read_text()
    assert listed.startswith("landmarks\tc0/0.png: the image has no line in ")
    assert listed.count("\n") == 1


def test_readers_cannot_be_aligned(folders, trained, tmp_path):
    ins = entry(folders[0], tmp_path, set_landmarks="landmarks.txt", set_class_num=3)
    ins.train_reader = ins.predict_reader = [(np.zeros((16, 16, 3), np.uint8), 0)] * 12
    with pytest.raises(OptionError, match=r"data\.landmarks"):
        ins.train()
    ins.set_checkpoint_dir(trained)
    for images in (None, [np.zeros((16, 16, 3), np.uint8)]):
        with pytest.raises(OptionError, match=r"data\.landmarks"):
            ins.predict(images)


# Photos in the eight EXIF orientations, compared with the same images stored upright.


@pytest.fixture(scope="module")
def turned(tmp_path_factory):
    """Return a dataset, and the same one with each image stored turned."""
    folder = tmp_path_factory.mktemp("data")
    upright, other = write_dataset(folder / "upright", classes=6, per_class=4), folder / "turned"
    shutil.copytree(upright, other)
    turn_images(other)
    return upright, other


@pytest.fixture(scope="module")
def on_upright(turned, tmp_path_factory):
    return entry(turned[0], tmp_path_factory.mktemp("run")).train().checkpoint


@pytest.mark.parametrize("settings", [{}, {"set_cache": "memory:1G"}])
def test_training_on_turned_images_is_training_on_upright_ones(turned, on_upright, tmp_path, settings):
    found = plsc.load_network(entry(turned[1], tmp_path, **settings).train().checkpoint).state_dict()
    expected = plsc.load_network(on_upright).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_predict_index_and_search_embed_turned_images_as_upright_ones(turned, on_upright, tmp_path):
    plain, found = (entry(folder, tmp_path, set_checkpoint_dir=on_upright).predict() for folder in turned)
    assert np.array_equal(found.embeddings, plain.embeddings)
    embedder = open_embedder(on_upright)
    for name, folder in zip(("plain", "turned"), turned, strict=True):
        index_images(embedder, tmp_path / name, folder / "images")
    images = sorted((turned[1] / "images").iterdir())
    for gallery in (open_gallery(tmp_path / name) for name in ("plain", "turned")):
        for path, (_, nearest) in zip(images, search_images(embedder, gallery, images, 1), strict=True):
            assert (nearest[0].name, round(nearest[0].similarity, 5)) == (path.name, 1)
    how, network = {"batch_size": 8, "device": "cpu"}, plsc.load_network(on_upright)
    stored = ([(folder / "images" / path.name).read_bytes() for path in images] for folder in turned)
    expected, embedded = (embed_images(network, files, (3, 16, 16), **how) for files in stored)
    assert np.array_equal(expected, embedded)


def test_landmarks_are_those_of_the_upright_image(on_upright, tmp_path):
    plain, photos = tmp_path / "plain", tmp_path / "turned"
    for path in write_photos(plain):
        (photos / path).parent.mkdir(parents=True, exist_ok=True)
        orientation = len(list(photos.rglob("*.*"))) % 8 + 1
        (photos / path).write_bytes(photo(Image.open(plain / path), orientation, "PNG"))
    shutil.copy(plain / "landmarks.txt", photos)
    one, other = (
        entry(folder, tmp_path, set_checkpoint_dir=on_upright, set_landmarks="landmarks.txt")
        .predict()
        .embeddings
        for folder in (plain, photos)
    )
    assert np.array_equal(one, other)
