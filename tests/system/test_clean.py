"""`plsc data clean` and `plsc data overlap` with a small network, and planted faults."""

from __future__ import annotations

import csv
import re
import shlex
import shutil

import numpy as np
import pytest

from plsc import cli
from plsc.clean.changes import apply_changes
from plsc.data.lists import read_listing
from plsc.predict import predict as prediction
from tests.images import write_dataset
from tests.system.small_entry import entry

pytestmark = pytest.mark.slow
CLASSES, COPIES = 30, 10
# Few steps: of the images, noisy copies of a pattern per class, an untrained network tells most apart.
SIZES = {"set_emb_size": 16, "set_train_epochs": 1, "set_train_batch_size": 30, "set_log_period": 100}


def write_labels(folder, labels):
    (folder / "label.txt").write_text("".join(f"{path}\t{label}\n" for path, label in labels.items()))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A network of other classes; `faces`, with faults; `others`, which shares six classes and three images.

    Of `faces`, 20 labels are wrong, the classes 30 to 35 are those of 0 to 5, ten images are there twice, and
    one is broken.
    """
    root = tmp_path_factory.mktemp("clean")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLSC_CACHE_DIR", str(root / "cache"))
        write_dataset(root / "train", CLASSES, COPIES, seed=1)
        entry(root / "train", root / "run", **SIZES).train()
    pool = write_dataset(root / "pool", CLASSES, 16, seed=2)
    faces, rng = root / "faces", np.random.default_rng(0)
    (faces / "images").mkdir(parents=True)
    labels = {}
    for label in range(CLASSES):
        for copy in range(COPIES):
            path = f"images/{label}_{copy}.png"
            shutil.copy(pool / path, faces / path)
            labels[path] = label + 30 if label < 6 and copy < 5 else label
    for path in rng.choice([path for path, label in labels.items() if 6 <= label < 20], 20, replace=False):
        labels[str(path)] = (labels[path] + int(rng.integers(1, CLASSES))) % CLASSES
    for label in range(20, 30):
        shutil.copy(faces / f"images/{label}_0.png", faces / f"images/{label}_again.png")
        labels[f"images/{label}_again.png"] = label
    (faces / "images/broken.png").write_bytes(b"no image")
    labels["images/broken.png"] = 7
    write_labels(faces, labels)
    others = write_dataset(root / "others", CLASSES, COPIES, seed=3)
    lines = (others / "label.txt").read_text().splitlines()
    labels = {path: int(label) for path, label in (line.split("\t") for line in lines)}
    for label in range(20, 26):
        for copy in range(COPIES, 16):
            path = f"images/shared_{label}_{copy}.png"
            shutil.copy(pool / f"images/{label}_{copy}.png", others / path)
            labels[path] = 80 + label
    for label in (14, 15, 16):
        shutil.copy(faces / f"images/{label}_3.png", others / f"images/copy_{label}.png")
        labels[f"images/copy_{label}.png"] = label
    write_labels(others, labels)
    return root


@pytest.fixture
def run(world, monkeypatch, capsys, messages):
    """Return a function that runs a command of `plsc data` in the folder, and returns its output or error."""
    monkeypatch.setenv("PLSC_CACHE_DIR", str(world / "cache"))
    monkeypatch.chdir(world)

    def run(words, code=0):
        capsys.readouterr()
        assert cli.main(["data", *words.split()]) == code
        return messages[-1] if code else capsys.readouterr().out

    return run


def changes_in(folder, name="changes.tsv"):
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def owner(path):
    """Return the true class of an image of `faces`."""
    return int(re.search(r"(\d+)_", path)[1])


def check_changes(folder):
    """Most of the planted faults are found, and little else; classes that may be one are questions."""
    changes, questions = changes_in(folder), changes_in(folder, "questions.tsv")
    wrong = [one for one in changes if one["reason"].startswith("wrong label")]
    assert sum(owner(one["image"]) != int(one["class"]) for one in wrong) >= 14
    assert sum(owner(one["image"]) == int(one["class"]) % 30 for one in wrong) <= 3
    merges = [sorted((int(one["class"]), int(one["to"]))) for one in questions if one["change"] == "merge"]
    assert len(merges) >= 5
    assert all(large == small + 30 for small, large in merges)
    doubled = {one["image"] for one in changes if one["reason"].startswith("exact duplicate of")}
    assert doubled == {f"images/{label}_again.png" for label in range(20, 30)}


def test_planted_faults_are_found_the_changes_are_applied_and_an_interrupted_command_resumes(
    world, run, monkeypatch
):
    monkeypatch.setattr(prediction, "MOST_ROWS", 64)
    shown = run(command := "clean run/0 faces out").splitlines()
    check_changes(world / "out")
    assert "faces: 310 of 311 images, 36 classes." in shown
    assert "images/broken.png" in next(line for line in shown if line.startswith("Without embedding"))
    page = (world / "out/report.html").read_text(encoding="utf-8")
    assert all(line in page for line in shown[:5])
    told = re.search(r"(\d+)% of the images are nearest to their own class\.( Many.*too weak)?", page)
    assert (int(told[1]) < 80) == bool(told[2])
    assert page.count("<img ") > 100
    apply = shlex.split(shown[-1])
    assert run(" ".join(apply[2:-1]) + " applied").startswith("wrote applied/list.tsv: ")
    _, after = read_listing(world / "applied/list.tsv", image_folder=world / "faces")
    labels = {path: int(after.classes[label]) for path, label in zip(after.paths, after.labels, strict=True)}
    assert labels.pop("images/broken.png") == 7
    assert sum(owner(path) != label % 30 for path, label in labels.items()) <= 6
    changes = (world / "out/changes.tsv").read_bytes()
    for path in (world / "out/changes.tsv", world / "out/questions.tsv", world / "out/report.html"):
        assert f"out/{path.name} exists" in run(command, code=1)
        path.unlink()
    assert "complete" in run(command, code=1)
    run("clean out/embeddings faces out")
    assert (world / "out/changes.tsv").read_bytes() == changes


def test_embeddings_of_predict_are_used_and_those_of_other_images_are_refused(world, run):
    ins = entry("faces", world / "unused", set_checkpoint_dir=world / "run/0", **SIZES)
    ins.set_bad_images("skip")
    ins.predict(output=world / "embedded")
    run("clean embedded faces used")
    check_changes(world / "used")
    assert not (world / "used/embeddings").exists()
    message = run("clean embedded others refused", code=1)
    assert "embedded have no image of others" in message


def test_networks_of_halves_judge_the_images_that_they_have_not_learned(world, run):
    shown = run(f"clean run/0 {world}/train learned")
    assert "it has learned some of their wrong labels" in shown
    run("split faces halves --halves")
    for name in ("half1", "half2"):
        ins = entry("unused", world / name, **SIZES)
        ins.set_dataset_dir(f"halves/{name}.tsv", image_folder="faces")
        ins.set_bad_images("skip")
        ins.train()
    assert "half2.tsv" in run("clean half2/0 faces wrong --second half1/0", code=1)
    assert "half1.tsv" in run("clean half1/0 faces alone", code=1)
    shown = run("clean half1/0 faces both --second half2/0")
    assert "Each network judges the half of the images that the other one was trained on." in shown
    changes = changes_in(world / "both")
    wrong = [one for one in changes if one["reason"].startswith("wrong label")]
    assert sum(owner(one["image"]) != int(one["class"]) % 30 for one in wrong) >= 10


def test_shared_classes_and_images_are_found_and_removed_from_the_first_dataset(world, run):
    shutil.copytree("faces", "merged")
    text = (world / "merged/label.txt").read_text()
    (world / "merged/label.txt").write_text(re.sub(r"\t3(\d)$", r"\t\1", text, flags=re.MULTILINE))
    shown = run("overlap run/0 merged others shared")
    assert "shared classes 6, " in shown
    changes = changes_in(world / "shared")
    classes = {one["class"]: one["reason"] for one in changes if not one["image"]}
    assert classes == {str(label): f"class {80 + label} of others" for label in range(20, 26)}
    images = {one["image"]: one["reason"] for one in changes if one["image"]}
    for label in (14, 15, 16):
        assert images[f"images/{label}_3.png"] == f"images/copy_{label}.png of others"
    origin = apply_changes("merged", "shared/changes.tsv", "apart")
    assert origin["counts"]["after"]["classes"] == 24


def test_six_shared_classes_are_questions_if_six_others_are_there_twice(world, run):
    run("overlap run/0 faces others unsure")
    assert not [one for one in changes_in(world / "unsure") if not one["image"]]
    asked = [one["class"] for one in changes_in(world / "unsure", "questions.tsv") if not one["image"]]
    assert set(asked[:6]) == set(map(str, range(20, 26)))


def test_data_without_files_and_a_link_are_refused_before_anything_is_embedded(world, run, tmp_path):
    (world / "linked").mkdir()
    (world / "linked/embeddings").symlink_to(tmp_path)
    assert "link" in run("clean run/0 faces linked", code=1)
    assert not list(tmp_path.iterdir())
    run("convert others others.rec")
    for command in ("clean run/0 others.rec early", "overlap run/0 faces others.rec early"):
        assert "the images of others.rec are inside its files" in run(command, code=1)
        assert not (world / "early").exists()
