"""Prediction: plain images, layers, classes, and folders that several ranks write and resume."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import plsc
from plsc.checkpoint import load_weights, read_manifest
from plsc.cli import main
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.models.base_model import BaseModel
from plsc.parallel.world import World
from plsc.predict import predict as prediction
from plsc.train.build import load_head
from tests.distributed.launch import run_ranks
from tests.images import write_dataset
from tests.system import predict_worker
from tests.system.predict_worker import LAYERS
from tests.system.small_entry import entry

pytestmark = pytest.mark.slow
COUNT = 22
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    write_dataset(folder / "faces", classes=11, per_class=2)
    entry(folder / "faces", folder / "run").train()
    return folder


@pytest.fixture(scope="module")
def expected(trained):
    """What plain PyTorch computes."""
    network = plsc.load_network(trained / "run" / "0")
    files = [line.split("\t")[0] for line in (trained / "faces/label.txt").read_text().splitlines()]
    pixels = np.stack([np.asarray(Image.open(trained / "faces" / file)) for file in files])
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - 127.5) / 128
    outputs = {}
    for name in LAYERS:
        network.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: outputs.update({name: output})
        )
    with torch.no_grad():
        outputs["embeddings"] = network(images)
    path = trained / "run" / "0"
    weight = load_weights(path, "class_weights")["weight"]
    scale = load_head(path, read_manifest(path), World.single()).margin.scale
    logits = scale * F.normalize(outputs["embeddings"]) @ F.normalize(weight).T
    probs, ids = logits.softmax(dim=1).max(dim=1)
    found = {**outputs, "ids": ids, "probs": probs}
    return {name: one.numpy() for name, one in found.items()}


def run(folder, ranks, *arguments, **how):
    return run_ranks(predict_worker.__file__, ranks, str(folder), *map(str, arguments), **how)


def check(found, expected):
    assert np.array_equal(found["ids"], expected["ids"])
    for name in ("embeddings", "probs", *LAYERS):
        np.testing.assert_allclose(found[name], expected[name], **CLOSE)
    assert list(found["names"]) == [f"dataset[{index}]" for index in range(COUNT)]
    assert list(found["labels"]) == [label for label in range(11) for _ in range(2)]


def test_uneven_ranks_compute_in_memory_and_in_folders_what_plain_pytorch_does(trained, expected):
    run(trained, 3, "written")
    for rank in range(3):
        check(np.load(trained / f"memory-{rank}.npz"), expected)
    found = plsc.open_embeddings(trained / "written", checkpoint=trained / "run" / "0")
    assert len(found) == COUNT
    assert len(found.index["shards"]) >= COUNT / 4
    check({name: found[name][:] for name in found}, expected)


def interrupt(folder):
    """Leave the index as an interrupted prediction does."""
    place = folder / "_index.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"complete": False}))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_prediction_resumes_with_the_bytes_of_an_uninterrupted_one(trained):
    run(trained, 2, "whole")
    killed = trained / "killed"
    assert run(trained, 2, "killed", 13, check=False).returncode != 0
    with pytest.raises(DataError, match="killed is incomplete"):
        plsc.open_embeddings(killed)
    kept = {path: path.stat().st_mtime_ns for path in killed.glob("0*.npy")}
    assert 0 < len(kept) < 6
    damaged = min(kept)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (killed / ".saving-00004-00000000.npy-0123abcd").write_bytes(b"of the killed process")
    run(trained, 2, "killed")
    assert contents(killed) == contents(trained / "whole")
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items() if path != damaged)


@pytest.fixture
def ins(trained):
    used = entry(trained / "nowhere", trained / "unused", set_checkpoint_dir=trained / "run" / "0")
    used.set_num_workers(0)
    return used


def test_a_folder_a_list_file_and_a_list_give_the_same_embeddings(trained, expected, ins, tmp_path):
    nested = tmp_path / "nested"
    (nested / "b" / "c").mkdir(parents=True)
    files = sorted((trained / "faces/images").iterdir())
    places = [nested / "a.png", nested / "b" / "c" / "d.png", nested / "b" / "e.png"]
    for file, place in zip(files, places, strict=False):
        place.write_bytes(file.read_bytes())
    (nested / "notes.txt").write_text("no image")
    (nested / "list.txt").write_text(f"a.png\nb/c/d.png\r\n\n{places[2]}\n")
    by_folder = ins.predict(nested)
    assert {str(place) for place in places} == set(by_folder.names)
    assert by_folder.labels.tolist() == [-1, -1, -1]
    order = [by_folder.names.index(str(place)) for place in places]
    encoded = [place.read_bytes() for place in places]
    for images in (nested / "list.txt", [str(place) for place in places], encoded):
        np.testing.assert_array_equal(ins.predict(images).embeddings, by_folder.embeddings[order])
    np.testing.assert_allclose(by_folder.embeddings[order[0]], expected["embeddings"][0], **CLOSE)
    with pytest.raises(DataError, match="contains no images"):
        ins.predict([])
    output = tmp_path / "out"
    used = ["--checkpoint.load_dir", str(trained / "run" / "0"), "--images", str(nested)]
    assert main(["predict", *used, "--output", str(output), "--field", "id,prob"]) == 0
    assert list(plsc.open_embeddings(output)) == ["labels", "ids", "probs", "names"]


def test_a_folder_of_another_dataset_or_of_other_labels_is_not_continued(trained, tmp_path, capsys):
    images = sorted((trained / "faces/images").iterdir())[:4]
    words = ["predict", str(trained / "run" / "0"), "--output", str(tmp_path / "out")]

    def predict(labels):
        lines = [f"{image}\t{label}\n" for image, label in zip(images, labels, strict=True)]
        (tmp_path / "list.tsv").write_text("path\tlabel\n" + "".join(lines))
        return main([*words, "--data.dataset_dir", str(tmp_path / "list.tsv")])

    assert predict([0, 0, 1, 1]) == 0
    assert predict([0, 0, 1, 1]) == 1  # the images may be others under the same names
    assert "complete" in capsys.readouterr().err
    interrupt(tmp_path / "out")
    # Not by the lines, which have other images in another order.
    assert predict([0, 0, 1, 1]) == 0
    assert plsc.open_embeddings(tmp_path / "out")["names"][:].tolist() == list(map(str, images))
    interrupt(tmp_path / "out")
    assert predict([0, 1, 1, 1]) == 1
    assert "labels" in capsys.readouterr().err
    (tmp_path / "list.tsv").rename(tmp_path / "moved.tsv")
    assert main([*words, "--data.dataset_dir", str(tmp_path / "moved.tsv")]) == 1
    assert "dataset" in capsys.readouterr().err


def test_flatten_result_joins_layers_side_by_side(trained, ins):
    images = sorted((trained / "faces/images").iterdir())[:5]
    apart = ins.predict(images, layers=LAYERS).layers
    joined = ins.predict(images, layers=LAYERS, flatten_result=True).layers["layers"]
    np.testing.assert_array_equal(joined, np.hstack([apart[name].reshape(5, -1) for name in LAYERS]))
    with pytest.raises(OptionError, match=r"neck\.fc"):
        ins.predict(images, layers=["neck.fd"])
    with pytest.raises(OptionError, match="prob"):
        ins.predict(images, field="ids")


def test_a_generator_is_streamed_and_another_model_or_other_images_are_refused(
    trained, ins, tmp_path, monkeypatch
):
    monkeypatch.setattr(prediction, "MOST_ROWS", 4)
    images = [np.asarray(Image.open(file)) for file in sorted((trained / "faces/images").iterdir())]
    whole = ins.predict(images)
    ins.predict_reader = lambda: ((image, 7) for image in images)
    found = ins.predict(output=tmp_path / "out")
    np.testing.assert_allclose(found["embeddings"][:], whole.embeddings, **CLOSE)
    assert found["names"][-1] == f"sample {COUNT - 1}"
    assert found["labels"][[0, -1]].tolist() == [7, 7]
    rows = np.concatenate(list(found["embeddings"].shards()))
    np.testing.assert_array_equal(found["embeddings"][3:18:5], rows[3:18:5])
    np.testing.assert_array_equal(found["embeddings"][rows[:, 0] > 0], rows[rows[:, 0] > 0])
    with pytest.raises(IndexError, match="outside the 22 rows"):
        found["embeddings"][COUNT]

    other = entry(trained / "faces", tmp_path / "other", set_seed=4).train().checkpoint
    with pytest.raises(CheckpointError, match="different weights"):
        plsc.open_embeddings(tmp_path / "out", checkpoint=other)
    interrupt(tmp_path / "out")
    with pytest.raises(CheckpointError, match="different images"):
        ins.predict(images, output=tmp_path / "out")
    ins.set_checkpoint_dir(other)
    with pytest.raises(CheckpointError, match="different model"):
        ins.predict(output=tmp_path / "out")


class Own(BaseModel):
    def __init__(self, emb_size=8):
        super().__init__()
        self.fc = torch.nn.Linear(3 * 16 * 16, emb_size)

    def build_network(self, input, label, is_train=True):
        return self.fc(input.flatten(1))


@pytest.fixture(scope="module")
def own(trained):
    """A checkpoint of a run with its own network, schedule and optimizer."""
    code = {"set_lr_schedule": lambda step: 0.5 ** (step / 10)}
    code["set_optimizer"] = lambda groups: torch.optim.SGD(groups, lr=0.1)
    ins = entry(trained / "faces", trained / "own", **code)
    ins.set_model(Own())
    return ins.train().checkpoint


def test_a_run_with_own_code_classifies_with_its_network_alone(trained, own, tmp_path, capsys):
    ins = entry(trained / "faces", tmp_path / "unused", set_checkpoint_dir=own)
    ins.set_model(Own())
    value = ins.predict()
    weight = F.normalize(load_weights(own, "class_weights")["weight"])
    nearest = (F.normalize(torch.from_numpy(value.embeddings)) @ weight.T).argmax(dim=1).numpy()
    assert np.array_equal(ins.predict(field=["id"]).ids, nearest)
    both = ins.predict(field=["id", "prob"])
    assert np.array_equal(both.ids, nearest)
    assert ((both.probs > 0) & (both.probs <= 1)).all()
    ins.set_val_dir(trained / "faces")
    assert ins.test()["val"].top1 == np.mean(nearest == value.labels)
    output = tmp_path / "out"
    flags = ["--checkpoint.load_dir", str(own), "--data.dataset_dir", str(trained / "faces"), "--field", "id"]
    name = f"{__name__}:Own"
    assert main(["predict", *flags, "--model.name", name, "--output", str(output)]) == 0
    assert np.array_equal(plsc.open_embeddings(output)["ids"][:], nearest)
    with pytest.raises(DataError, match="embeddings"):
        plsc.open_embeddings(output)["embeddings"]
    capsys.readouterr()
    assert main(["predict", *flags, "--model.name", name, "--output", str(tmp_path / "p.npz")]) == 0
    assert "wrote the predictions of" in capsys.readouterr().out  # not: the embeddings


def test_index_and_search_take_the_name_of_the_network_of_a_checkpoint(
    trained, own, tmp_path, capsys, messages
):
    pytest.importorskip("faiss", reason="plsc-torch[search] is not installed")
    images, gallery, name = trained / "faces/images", tmp_path / "gallery", f"{__name__}:Own"
    made = ["index", str(own), str(gallery), "--images", str(images)]
    assert main(made) == 1
    assert f"'{name}'" in messages[-1]
    assert main([*made, "--model.name", name]) == 0
    capsys.readouterr()
    image = str(images / "3_1.png")
    assert main(["search", str(own), str(gallery), image, "-k", "1", "--model.name", name]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("1.0000  3_1.png")


def test_bad_images_are_named_or_left_out(trained, tmp_path, messages, monkeypatch):
    spoiled = shutil.copytree(trained / "faces", tmp_path / "faces")
    image = spoiled / "images" / "2_0.png"
    image.write_bytes(image.read_bytes()[:60])
    (spoiled / "images" / "5_1.png").unlink()
    monkeypatch.setattr(prediction, "MOST_ROWS", 4)
    ins = entry(spoiled, tmp_path / "unused", set_checkpoint_dir=trained / "run" / "0")
    ins.set_test_batch_size(2)
    with pytest.raises(DataError, match=r"^images/2_0\.png \(label\.txt:5\): .*damaged"):
        ins.predict()
    with pytest.raises(DataError, match=r"^2_0\.png: .*damaged"):
        ins.predict(spoiled / "images")
    ins.set_bad_images("skip")
    with pytest.raises(DataError, match="no image"):
        ins.predict([spoiled / "images" / "2_0.png"] * 2)
    found = ins.predict(field=["value", "id"])
    ins.set_dataset_dir(trained / "faces")
    whole = ins.predict(field=["value", "id"])
    good = [index for index in range(COUNT) if index not in (4, 11)]
    np.testing.assert_allclose(found.embeddings, whole.embeddings[good], **CLOSE)
    assert found.ids.tolist() == whole.ids[good].tolist()
    assert found.labels.tolist() == whole.labels[good].tolist()
    names = [[name.split("/")[-1] for name in one.names] for one in (found, whole)]
    assert names[0] == [names[1][index] for index in good]
    assert sum(one.startswith("skipped: images/2_0.png") for one in messages) == 1
    assert f"left out 2 of {COUNT} images" in messages

    ins.set_dataset_dir(spoiled)
    written = ins.predict(field=["value", "id"], output=tmp_path / "out")
    np.testing.assert_array_equal(written["embeddings"][:], found.embeddings)
    assert written["names"][:].tolist() == found.names
    listed = (tmp_path / "out" / "_bad_samples.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in listed] == ["undecodable", "missing"]
    min((tmp_path / "out").glob("00001-*")).unlink()
    assert ins.predict(field=["value", "id"], output=tmp_path / "out")["names"][:].tolist() == found.names


def test_ranks_with_bad_images_only_take_part_in_the_search_for_classes(trained, expected, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.copytree(trained / "faces", tmp_path / "faces")
    files = sorted((tmp_path / "faces/images").iterdir(), key=lambda file: int(file.stem.partition("_")[0]))
    bad = [1, *range(4, 12), 21]  # shards 1 and 2 as a whole
    for index in bad:
        files[index].write_bytes(b"no image")
    good = [index for index in range(COUNT) if index not in bad]
    run(tmp_path, 2, "written")
    written = plsc.open_embeddings(tmp_path / "written")
    for found in (np.load(tmp_path / "memory-1.npz"), {name: written[name][:] for name in written}):
        assert list(found["names"]) == [f"dataset[{index}]" for index in good]
        assert np.array_equal(found["ids"], expected["ids"][good])
        for name in ("embeddings", "probs", *LAYERS):
            np.testing.assert_allclose(found[name], expected[name][good], **CLOSE)
