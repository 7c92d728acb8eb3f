"""The facade from end to end, in one process: train, test, predict, and people's own parts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import plsc
from plsc import Entry
from plsc.errors import CheckpointError
from plsc.models.base_model import BaseModel
from plsc.train import log
from plsc.utils import jpeg_reader
from tests.images import write_dataset, write_pair_file
from tests.system import small_entry
from tests.undrawn import drawing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = write_dataset(tmp_path_factory.mktemp("data") / "set", classes=6, per_class=8)
    write_pair_file(folder / "lfw.bin", folder)
    return folder


class Plain(BaseModel):
    """A network of a user's; it notes what it was called with."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3 * 16 * 16, 8)
        self.calls = []

    def build_network(self, input, label, is_train=True):
        self.calls.append((tuple(input.shape), None if label is None else label.dtype, is_train))
        return self.fc(input.flatten(1))


def entry(dataset, save_dir, network=Plain, **settings):
    plain = {"set_train_epochs": 2, "set_lr": 0.5 * 12 / 1024, "set_num_workers": 0, "set_with_test": True}
    ins = small_entry.entry(dataset, save_dir, **plain | {"set_log_period": 200} | settings)
    if network:
        ins.set_model(network())
    return ins


def metrics_of(save_dir):
    return [json.loads(line) for line in (save_dir / "metrics.jsonl").read_text().splitlines()]


def test_training_writes_what_the_guide_says_and_returns_it(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(log, "plot_losses", drawing)
    save_dir, network = tmp_path / "run", Plain()
    ins = entry(dataset, save_dir, set_calc_acc=True, set_log_period=1, set_test_period=2)
    ins.set_model(network)
    result = ins.train()
    assert (result.steps, result.epochs) == (8, 2)
    assert result.checkpoint == save_dir / "1"
    assert result.best_model_path.is_dir()
    assert json.loads((save_dir / "best.json").read_text())["metric"] == "lfw accuracy"
    assert set(result.evaluation) == {"lfw"}
    logged = [entry for entry in metrics_of(save_dir) if "loss" in entry]
    assert [entry["step"] for entry in logged] == list(range(1, 9))
    wanted = {"step", "epoch", "loss", "lr", "accuracy", "images_per_second", "data_seconds",
              "step_seconds"}  # fmt: skip
    assert wanted <= logged[0].keys()
    assert logged[-1] == result.metrics
    evaluated = [entry["step"] for entry in metrics_of(save_dir) if "eval" in entry]
    assert evaluated == [2, 4, 6, 8]  # each 2 steps, and once at the end of each epoch
    assert Image.open(save_dir / "loss.png").size[0] > 300
    assert ((12, 3, 16, 16), torch.int64, True) in network.calls
    predicting = [label for _, label, is_train in network.calls if not is_train]
    assert predicting
    assert not any(predicting)


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    return entry(dataset, tmp_path_factory.mktemp("trained") / "run", set_flip=False).train()


def test_test_and_predict_use_the_weights_and_options_of_the_checkpoint(dataset, trained):
    later = Entry()
    later.set_model(Plain())
    later.set_checkpoint_dir(trained.checkpoint)
    later.set_dataset_dir(dataset)
    assert later.test() == trained.evaluation
    prediction = later.predict()
    assert prediction.embeddings.shape == (48, 8)
    assert prediction.labels.tolist() == [label for label in range(6) for _ in range(8)]
    assert prediction.names[0] == str(dataset / "images/0_0.png")
    image = torch.from_numpy(np.array(Image.open(dataset / "images/0_0.png"))).permute(2, 0, 1)
    stored = {}
    for path in trained.checkpoint.glob("*.safetensors"):
        stored |= load_file(path)
    x = ((image.float() - 127.5) / 128).flatten()
    expected = stored["backbone.fc.weight"] @ x + stored["backbone.fc.bias"]
    np.testing.assert_allclose(prediction.embeddings[0], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_load_network_embeds_as_predict_does_and_draws_nothing(dataset, trained):
    ins = entry(dataset, "unused", set_checkpoint_dir=trained.checkpoint)
    predicted = torch.from_numpy(ins.predict().embeddings)
    files = [line.split("\t")[0] for line in (dataset / "label.txt").read_text().splitlines()]
    images = torch.from_numpy(np.stack([Image.open(dataset / file) for file in files])).permute(0, 3, 1, 2)
    state = torch.get_rng_state()
    for model in (Plain(), Plain, f"{__name__}:Plain"):
        torch.set_rng_state(state)
        network = plsc.load_network(trained.checkpoint, model)
        assert torch.equal(torch.get_rng_state(), state)
        assert not network.training
        with torch.inference_mode():
            embeddings = network((images - 127.5) / 128)
        torch.testing.assert_close(embeddings, predicted, rtol=1e-4, atol=1e-4)
    for place, noun in ((trained.checkpoint, "Plain"), (trained.checkpoint.parent, "folder")):
        with pytest.raises(CheckpointError, match=noun):
            plsc.load_network(place)


def read_arrays(dataset):
    def reader():
        for line in (dataset / "label.txt").read_text().splitlines():
            name, label = line.split("\t")
            array = np.asarray(Image.open(dataset / name), dtype=np.float32).transpose(2, 0, 1)
            yield (array - 127.5) / 128, int(label)

    return reader


def test_test_reader_and_predict_reader_replace_the_files(dataset, trained, tmp_path):
    later = entry(tmp_path / "nowhere", tmp_path / "unused", set_flip=False)
    later.set_checkpoint_dir(trained.checkpoint)

    def test_reader(folder, names):
        assert names == "lfw"
        return jpeg_reader.test(str(dataset), "lfw", image_size=(16, 16))

    later.test_reader = test_reader
    assert later.test()["lfw"].accuracy == pytest.approx(trained.evaluation["lfw"].accuracy)
    later.predict_reader = read_arrays(dataset)
    streamed = later.predict()
    later.predict_reader = lambda: (image for image, _ in read_arrays(dataset)())
    unlabelled = later.predict()
    assert streamed.labels.tolist()[:9] == [0] * 8 + [1]
    assert set(unlabelled.labels.tolist()) == {-1}
    np.testing.assert_array_equal(streamed.embeddings, unlabelled.embeddings)


def test_a_save_folder_that_cannot_be_made_or_is_full_of_something_else_is_refused(dataset, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="write"):
        entry(dataset, tmp_path / "file" / "run").train()
    (tmp_path / "run" / "1").mkdir(parents=True)
    (tmp_path / "run" / "1" / "holiday.jpg").write_text("")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        entry(dataset, tmp_path / "run").train()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
