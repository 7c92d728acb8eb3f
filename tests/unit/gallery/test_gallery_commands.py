"""`plsc index` and `plsc search`, with a checkpoint and with an exported model."""

import json
import shutil

import fsspec
import numpy as np
import pytest

from plsc.checkpoint import load_weights
from plsc.cli import main
from plsc.export import open_model
from plsc.export.folder import checksum_of
from plsc.gallery import open_gallery
from tests.postgres_server import PASSWORD
from tests.serving import export_model

pytest.importorskip("faiss", reason="plsc-torch[search] is not installed")
pytest.importorskip("onnxruntime", reason="plsc-torch[export] is not installed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint, its export, and its dataset."""
    folder = tmp_path_factory.mktemp("gallery")
    export_model(folder)
    return folder


def plsc(capsys, *words):
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("model", "place"), [("run/0", "folder"), ("model", "folder"), ("model", "postgres")]
)
def test_every_image_finds_itself(trained, tmp_path, capsys, request, model, place):
    images, gallery = trained / "faces/images", tmp_path / "g"
    gallery = request.getfixturevalue("database") if place == "postgres" else gallery
    shown = plsc(capsys, "index", trained / model, gallery, "--images", images)
    name = str(gallery).replace(f"plsc:{PASSWORD}@", "")
    assert shown[-1].startswith(f"wrote {name}: 24 images")
    assert ("100.00%" in shown[-1]) == (place == "postgres")  # of the nearest entries are found by the index
    found = plsc(capsys, "search", trained / model, gallery, images, "-k", 2)
    found = [line for line in found if "strangers" not in line]
    assert len(found) == 24 * 3
    for image, nearest in zip(found[::3], found[1::3], strict=True):
        cosine, name = nearest.split(maxsplit=1)
        assert name == image
        assert abs(float(cosine) - 1) < 1e-3
    for words in (["search", gallery, images, "-k", 0], ["index", gallery, "--images", images]):
        assert main([words[0], str(trained / model), *map(str, words[1:])]) == 1


def test_a_damaged_image_or_an_empty_table_is_one_message_and_nothing_is_enrolled(
    trained, database, tmp_path, messages
):
    images, model = shutil.copytree(trained / "faces/images", tmp_path / "images"), str(trained / "model")
    files = sorted(images.iterdir())
    files[-1].write_bytes(b"no image")
    for words, noun in (
        (["search", model, database, str(files[0])], "entries"),
        (["index", model, database], "--images"),
        (["index", model, database, "--images", str(images)], files[-1].name),
        (["search", model, database, str(files[0])], "has no entries"),
    ):
        assert main(words) == 1
        assert noun in messages[-1]


def test_a_list_of_images_names_urls_below_an_allowed_prefix(trained, tmp_path, capsys):
    fsspec.filesystem("memory").pipe("/shop/a.png", next((trained / "faces/images").iterdir()).read_bytes())
    (tmp_path / "list.txt").write_text("memory://shop/a.png\n")
    index = ["index", trained / "run/0", tmp_path / "g", "--images", tmp_path / "list.txt"]
    assert main([str(word) for word in index]) == 1
    assert plsc(capsys, *index, "--allowed", "memory://shop/")[-1].startswith("wrote")
    search = ["search", trained / "run/0", tmp_path / "g", tmp_path / "list.txt"]
    assert main([str(word) for word in search]) == 1
    assert plsc(capsys, *search, "--allowed", "memory://shop/")[0] == "memory://shop/a.png"


def test_no_control_character_of_an_error_or_a_name_reaches_the_terminal(trained, tmp_path, capsys):
    picture = next((trained / "faces/images").iterdir()).read_bytes()
    (tmp_path / "a\x1b]0;b\x07.png").write_bytes(picture)
    plsc(capsys, "index", trained / "run/0", tmp_path / "g", "--images", tmp_path)
    about = json.loads((tmp_path / "g/gallery.json").read_text())
    assert plsc(capsys, "search", trained / "run/0", tmp_path / "g", tmp_path)[0] == r"a\x1b]0;b\x07.png"
    (tmp_path / "g/gallery.json").write_text(json.dumps({**about, "model": "\x1b[2J\u202e"}))
    assert main(["search", str(trained / "run/0"), str(tmp_path / "g"), str(tmp_path)]) == 1
    shown = "".join(capsys.readouterr())
    assert r"\x1b[2J\u202e" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("model", ["run/0", "model"])
def test_the_nearest_classes_are_those_of_the_class_weights(trained, tmp_path, capsys, model):
    plsc(capsys, "index", trained / model, tmp_path / "g")
    gallery = open_gallery(tmp_path / "g", checksum_of(load_weights(trained / "run/0")))
    weight = load_weights(trained / "run/0", "class_weights")["weight"].numpy()
    weight /= np.linalg.norm(weight, axis=1, keepdims=True)
    scores, classes = gallery.search(weight, 6)
    np.testing.assert_allclose(scores, -np.sort(-(weight @ weight.T), axis=1), atol=1e-6)
    assert classes[:, 0].tolist() == [*range(6)]


def test_a_search_says_how_many_strangers_would_score_as_high(trained, tmp_path, capsys):
    model, gallery, image = trained / "model", tmp_path / "g", trained / "faces/images/0_0.png"
    plsc(capsys, "index", model, gallery, "--images", trained / "faces/images")
    capacity = open_model(model).capacity
    *_, last = plsc(capsys, "search", model, gallery, image, "-k", 2)
    assert last == f"  {capacity.fpir(1.0, 24).sentence(24)}"
    other = trained / "unseen/images/3_0.png"
    found = plsc(capsys, "search", model, gallery, other, "--fpir", "0.3", "-k", 1)
    assert found[-1].endswith(f"{capacity.expected(0.3, 24)[1]}, {capacity.strictest(0.3, 24):.4f}")
    is_known = float(found[-2].split()[0]) >= capacity.strictest(0.3, 24)
    assert found[1].startswith("  unknown") != is_known
    plsc(capsys, "index", model, tmp_path / "classes")
    assert open_gallery(tmp_path / "classes").is_classes
    assert "strangers" not in plsc(capsys, "search", model, tmp_path / "classes", image)[-1]
    assert main(["search", str(model), str(tmp_path / "classes"), str(image), "--fpir", "0.1"]) == 1


def test_several_images_are_searched_and_unknown_below_the_threshold_of_the_model(trained, tmp_path, capsys):
    images = trained / "faces/images"
    files = sorted(images.iterdir())
    plsc(capsys, "index", trained / "model", tmp_path / "g", "--images", files[0])
    model = open_model(trained / "model")
    embeddings = model.embed(np.stack([model.preprocess(file.read_bytes()) for file in files]))
    is_known = embeddings @ embeddings[0] >= model.thresholds[0.1]
    assert 0 < is_known.sum() < len(files)
    lines = plsc(capsys, "search", trained / "model", tmp_path / "g", *files[:2], images, "-k", 1)
    found = [line for line in lines if "strangers" not in line]
    names, expected = [*map(str, files[:2]), *(file.name for file in files)], []
    for name, known in zip(names, [*is_known[:2], *is_known], strict=True):
        expected += [name, *([] if known else ["  unknown"])]
    assert [line.partition(":")[0] for line in found if not line.endswith(f"  {files[0]}")] == expected
    assert f"{model.thresholds[0.1]:.4f}" in "".join(found)
    found = plsc(capsys, "search", trained / "run/0", tmp_path / "g", images, "-k", 1)  # has no threshold
    assert len(found) == 2 * len(files)
