"""`plsc gallery upgrade`: galleries in folders and stores, by class weights and images; what is refused."""

import contextlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from plsc import open_embeddings
from plsc.checkpoint import load_weights
from plsc.cli import main
from plsc.export.folder import checksum_of
from plsc.gallery import open_gallery, write_gallery
from plsc.gallery.embedder import open_embedder
from plsc.gallery.gallery import open_store
from plsc.gallery.store import New
from tests.images import write_dataset
from tests.postgres_server import PASSWORD
from tests.system.small_entry import entry

CLASSES = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two epochs of a run, `old` and `new`, a run with class names, the embeddings of images, a gallery."""
    folder = tmp_path_factory.mktemp("upgrade")
    dataset = write_dataset(folder / "faces", CLASSES, per_class=2)
    entry(dataset, folder / "run", set_train_epochs=6, set_train_batch_size=24).train()
    (folder / "run/4").rename(folder / "old")
    (folder / "run/5").rename(folder / "new")
    for image in (dataset / "images").iterdir():
        person = folder / "named_faces" / f"person {image.name.partition('_')[0]}"
        person.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, person)
    named = entry(folder / "named_faces", folder / "named", set_train_epochs=4, set_train_batch_size=24)
    named.set_pretrained(str(folder / "old"))
    named.train()
    for name in ("old", "new"):
        predicted = ["--checkpoint.load_dir", str(folder / name), "--images", str(dataset / "images")]
        assert main(["predict", *predicted, "--output", str(folder / f"by_{name}"), "--quiet"]) == 0
    indexed = ["--embeddings", str(folder / "by_old")]
    assert main(["index", str(folder / "old"), str(folder / "gallery"), *indexed]) == 0
    return folder


def model_of(run):
    return checksum_of(load_weights(run))


def upgrade(folder, source, target, *more, old="old", new="new"):
    runs = ["--from", folder / old, "--to", folder / new]
    return main([str(word) for word in ("gallery", "upgrade", source, target, *runs, *more)])


def cosines(folder, vectors):
    """Cosines of mapped vectors with the embeddings of the same images by the new network."""
    real = open_embeddings(folder / "by_new")["embeddings"][:]
    return (vectors * real).sum(axis=1) / np.linalg.norm(real, axis=1) / np.linalg.norm(vectors, axis=1)


def vectors_of(place):
    return np.stack([one.vector for one in place.read(0, 10**6)])


def test_a_mapped_gallery_is_near_the_real_embeddings_and_says_what_it_is(folder, tmp_path, capsys):
    target = tmp_path / "new"
    assert upgrade(folder, folder / "gallery", target) == 0
    shown = capsys.readouterr().out
    before, mapped = open_gallery(folder / "gallery"), open_gallery(target, model_of(folder / "new"))
    assert cosines(folder, vectors_of(mapped)).mean() > 0.9
    about = json.loads(mapped.about["mapped"])
    assert about["from"] == model_of(folder / "old")
    assert (about["classes"], about["images"], about["bound"]) == (CLASSES, 0, None)
    assert f"{2 * CLASSES} entries; {about['method']}, fitted on {CLASSES} classes and 0 images" in shown
    assert "upper bound" in shown
    assert about["is_upper_bound"]
    assert [mapped.name(i) for i in range(len(mapped))] == [before.name(i) for i in range(len(before))]
    assert "mapped" not in before.about


def test_images_of_both_networks_are_used_too_and_give_a_bound(folder, tmp_path, messages):
    anchors = ["--anchors-from", folder / "by_old", "--anchors-to", folder / "by_new"]
    assert upgrade(folder, folder / "gallery", tmp_path / "new", *anchors) == 0
    about = json.loads(open_gallery(tmp_path / "new").about["mapped"])
    assert about["classes"] + about["images"] > 0
    assert np.mean(cosines(folder, vectors_of(open_gallery(tmp_path / "new"))) >= about["bound"]) > 0.9
    embedder = open_embedder(folder / "named/3")
    images = str(folder / "faces/images")
    predicted = ["--checkpoint.load_dir", str(folder / "named/3"), "--images", images, "--quiet"]
    assert main(["predict", *predicted, "--output", str(tmp_path / "by_named")]) == 0
    real = open_embeddings(tmp_path / "by_named")["embeddings"][:]
    write_gallery(tmp_path / "named", real, model=embedder.fingerprint)
    anchors[1] = tmp_path / "by_named"
    assert upgrade(folder, tmp_path / "named", tmp_path / "other", *anchors, old="named/3") == 0
    mapped = open_gallery(tmp_path / "other", model_of(folder / "new"))
    assert cosines(folder, vectors_of(mapped)).mean() > cosines(folder, real).mean()
    about = json.loads(mapped.about["mapped"])
    assert (about["classes"], about["images"]) == (0, 2 * CLASSES)
    assert "class weights are not used" in "".join(messages)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_mapped_store_keeps_ids_and_continues_and_is_copied_but_not_mapped_again(
    folder, tmp_path, kind, request, messages
):
    places = [tmp_path / "old.sqlite", tmp_path / "new.sqlite"]
    if kind == "postgres":
        places = [request.getfixturevalue("database")] * 2  # a table per network
    models = [model_of(folder / name) for name in ("old", "new")]
    with contextlib.closing(open_store(str(places[0]), models[0], 8)) as store:
        entries = open_gallery(folder / "gallery").read(0, 10**6)
        store.write([New(one.name, one.vector, b"jpeg %d" % one.id) for one in entries])
        store.write([3, 77])
        before = store.read(0, 10**6)
    for _ in range(2):  # the second one finds all entries
        assert upgrade(folder, places[0], places[1]) == 0
    with contextlib.closing(open_store(str(places[1]), models[1], 8)) as store:
        after = store.read(0, 10**6)
        assert json.loads(store.read(0, 1)[0].mapped)["from"] == models[0]
    for one, other in zip(before, after, strict=True):
        assert replace(one, vector=None) == replace(other, vector=None, mapped="")
        assert json.loads(other.mapped)["from"] == models[0]
    kept = [one.id - 1 for one in before]
    real = open_embeddings(folder / "by_new")["embeddings"][:][kept]
    mapped = np.stack([one.vector for one in after])
    assert ((mapped * real).sum(axis=1) / np.linalg.norm(real, axis=1)).mean() > 0.9
    how = ["--fingerprint", models[1][:16]] if kind == "postgres" else []
    assert main(["gallery", "copy", str(places[1]), str(tmp_path / "copy"), *how]) == 0
    copy = open_gallery(tmp_path / "copy", models[1])
    assert json.loads(copy.about["mapped"])["from"] == models[0]
    for place in (places[1], tmp_path / "copy"):
        assert upgrade(folder, place, tmp_path / "again", old="new", new="named/3") == 1
        assert "older network" in messages[-1]
    with contextlib.closing(open_store(str(places[1]), models[1], 8)) as store:
        [new] = store.write([New("new", real[0] / np.linalg.norm(real[0]), b"")])
        assert store.read(new - 1, 1)[0].mapped == ""
    assert main(["gallery", "copy", str(places[1]), str(tmp_path / "mixed"), *how]) == 1
    assert "mapped" in messages[-1]
    assert PASSWORD not in "".join(messages)


def test_what_cannot_be_mapped_is_one_message_and_writes_nothing(folder, tmp_path, messages):
    gallery, target = folder / "gallery", tmp_path / "target"
    few = write_dataset(tmp_path / "few", 20, per_class=2)
    assert main(["index", str(folder / "old"), str(tmp_path / "classes")]) == 0
    entry(few, tmp_path / "centers_run", set_sub_centers=2).train()
    other = ["--checkpoint.load_dir", str(folder / "new"), "--images", str(few / "images"), "--quiet"]
    assert main(["predict", *other, "--output", str(tmp_path / "by_few")]) == 0
    exported = [str(tmp_path / "flipped"), "--classes", "--flip", "--quiet"]
    assert main(["export", str(folder / "new"), *exported]) == 0
    by_old, by_new = folder / "by_old", folder / "by_new"
    for source, more, how, message in [
        (gallery, [], {"old": "new", "new": "old"}, "another network"),
        (gallery, [], {"new": "named/3"}, "class names"),
        (gallery, ["--anchors-from", by_new, "--anchors-to", by_old], {}, "by_new"),
        (gallery, ["--anchors-from", by_old, "--anchors-to", tmp_path / "by_few"], {}, "by_few"),
        (gallery, [], {"new": tmp_path / "centers_run/0"}, "sub-centres"),
        (gallery, ["--anchors-from", by_new], {}, "--anchors-to"),
        (tmp_path / "classes", [], {}, "classes"),
        (gallery, [], {"new": tmp_path / "flipped"}, "mirrored"),
        (gallery, [], {"new": "missing"}, "missing"),
    ]:
        assert upgrade(folder, source, target, *more, **how) == 1
        assert message in messages[-1]
        assert not target.exists()
    assert upgrade(folder, gallery, gallery) == 1
