"""Prediction: plain images, layers, classes, and folders that several ranks write and resume."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import plsc
from plsc.checkpoint import load_weights, read_manifest
from plsc.cli import main
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.parallel.world import World
from plsc.train import prediction
from plsc.train.heads import load_head
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_uneven_ranks_compute_in_memory_and_in_folders_what_plain_pytorch_does(trained, expected, ranks):
    run(trained, ranks, "memory")
    for rank in range(ranks):
        check(np.load(trained / f"memory{ranks}-{rank}.npz"), expected)
    for suffix in ("", ".parquet"):
        folder = trained / f"written{ranks}{suffix}"
        run(trained, ranks, folder.name)
        found = plsc.open_embeddings(folder, checkpoint=trained / "run" / "0")
        assert len(found) == COUNT
        assert len(found.index["shards"]) >= COUNT / 4
        check({name: found[name][:] for name in found}, expected)
    table = pq.read_table(trained / f"written{ranks}.parquet")  # as any other reader does
    np.testing.assert_allclose(table["embeddings"].to_pylist(), expected["embeddings"], **CLOSE)


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


def test_flatten_result_joins_layers_side_by_side(trained, ins):
    images = sorted((trained / "faces/images").iterdir())[:5]
    apart = ins.predict(images, layers=LAYERS).layers
    joined = ins.predict(images, layers=LAYERS, flatten_result=True).layers["layers"]
    np.testing.assert_array_equal(joined, np.hstack([apart[name].reshape(5, -1) for name in LAYERS]))
    with pytest.raises(OptionError, match=r"no layer 'neck\.fd'.*neck\.fc"):
        ins.predict(images, layers=["neck.fd"])
    with pytest.raises(OptionError, match="expected one or more of value, id, prob"):
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
    with pytest.raises(CheckpointError, match="has different weights"):
        plsc.open_embeddings(tmp_path / "out", checkpoint=other)
    with pytest.raises(CheckpointError, match="different images"):
        ins.predict(images, output=tmp_path / "out")
    ins.set_checkpoint_dir(other)
    with pytest.raises(CheckpointError, match="different model"):
        ins.predict(output=tmp_path / "out")
