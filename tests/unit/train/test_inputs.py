"""Networks whose input is no image: samples, errors, prediction; and sparse gradients in one process."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import plsc
from plsc.config import Options
from plsc.errors import DataError, OptionError, TrainingError
from plsc.models import BaseModel, check_model
from plsc.optim import assign_parameters
from plsc.parallel.world import World
from plsc.predict.exporter import run_conversion
from plsc.predict.network import load_network
from plsc.predict.predict import run_prediction
from plsc.train.callbacks import UserParts
from plsc.train.data import open_training_data
from tests.overflowing import scale_in_any_mode
from tests.resuming import different, options_of, train

WORLD = World.single()
IDS = torch.arange(24).view(8, 3) % 10
LABELS = torch.arange(8) % 4


class Words(BaseModel):
    def __init__(self, is_sparse=True):
        super().__init__()
        self.example_input = torch.zeros(2, 3, dtype=torch.int64)
        self.embedding = nn.Embedding(10, 8, sparse=is_sparse)
        self.fc = nn.Linear(8, 8)

    def build_network(self, input, label, is_train=True):
        return self.fc(self.embedding(input).sum(1))


class Described(Words):
    """Its input is a dict of integers and floats."""

    def __init__(self):
        super().__init__()
        self.example_input = {"ids": torch.zeros(2, 3, dtype=torch.int64), "scale": torch.zeros(2)}

    def build_network(self, input, label, is_train=True):
        return super().build_network(input["ids"], label) * input["scale"][:, None]


def sample(index):
    return {"ids": IDS[index].numpy(), "scale": 1.0 + index}, int(LABELS[index])


class Pairs(torch.utils.data.Dataset):
    def __init__(self, change=lambda sample: sample):
        self.change = change

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.change(sample(index)) if index == 5 else sample(index)


def options(folder, **changes):
    changes = {"head__class_num": 4, "train__batch_size": 4, "train__epochs": 1, **changes}
    return options_of(folder, folder / "run", **changes)


def loader(folder, reader, network, **changes):
    config = options(folder, data__order="sequential", **changes).resolve()
    example = network().example_input
    return open_training_data(config, WORLD, reader, None, 4, example=example).loader


READERS = {
    "dataset": Pairs(),
    "generator": lambda: map(sample, range(8)),
    "lists": lambda: iter([[sample(index) for index in range(8)]]),
    "DataLoader": DataLoader(Pairs(), batch_size=3).__iter__,
}


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("dataset", 1), ("generator", 0), ("lists", 1), ("DataLoader", 0)]
)
def test_dicts_arrive_unchanged_and_with_the_types_of_the_example(kind, num_workers, tmp_path):
    reading = loader(tmp_path, READERS[kind], Described, data__num_workers=num_workers)
    first, second = reading.epoch(0)
    for batch, start in ((first, 0), (second, 4)):
        found = batch.input("cpu")
        assert found.keys() == {"ids", "scale"}
        assert found["ids"].equal(IDS[start : start + 4])
        assert found["scale"].equal(torch.arange(4.0) + 1 + start)  # float32, as in the example
        assert batch.labels.equal(LABELS[start : start + 4])


@pytest.mark.parametrize(
    ("noun", "change"),
    [
        ("dict", lambda one: (one[0]["ids"], 1)),
        ("scale", lambda one: ({"ids": one[0]["ids"]}, 1)),
        (r"ids is int64 \[2\]", lambda one: ({**one[0], "ids": IDS[0, :2]}, 1)),
        ("ids is str", lambda one: ({**one[0], "ids": "a word"}, 1)),
    ],
)
def test_a_sample_unlike_the_example_is_named(noun, change, tmp_path):
    dataset = Pairs(change)
    with pytest.raises(DataError, match=rf"dataset\[5\].*{noun}"):
        list(loader(tmp_path, dataset, Described).epoch(0))
    with pytest.raises(DataError, match=f"sample 5 of epoch 0 of the train reader.*{noun}"):
        list(loader(tmp_path, lambda: (dataset[i] for i in range(8)), Described).epoch(0))


class Plain(Words):
    """Word ids, but it does not say so."""

    def __init__(self, example=None):
        super().__init__()
        self.example_input = example


def test_samples_for_a_network_without_an_example_point_to_it(tmp_path):
    for reader in (TensorDataset(IDS, LABELS), READERS["generator"]):
        with pytest.raises(DataError, match="example_input"):
            list(loader(tmp_path, reader, Plain).epoch(0))


@pytest.mark.parametrize("example", [None, {}, torch.zeros(3, 4), {"ids": torch.zeros(2), "more": [1, 2]}])
def test_a_wrong_example_is_refused(example):
    with pytest.raises(OptionError, match="example_input"):
        check_model(Plain(example), (3, 16, 16), 8)


@pytest.mark.parametrize(
    ("reader", "changes", "noun"),
    [
        (Pairs(), {"data__flip": True}, "flip"),
        (Pairs(), {"data__cache": "memory:1M"}, "cache"),
        (None, {}, "train_reader"),
    ],
)
def test_options_of_images_are_refused(reader, changes, noun, tmp_path):
    with pytest.raises(OptionError, match=noun):
        loader(tmp_path, reader, Described, **changes)


def test_a_trained_network_predicts_and_is_converted(tmp_path):
    train(options(tmp_path), WORLD, Described, UserParts(train_reader=Pairs()))
    checkpoint = str(tmp_path / "run/0")
    network = load_network(checkpoint, Described())
    scales = torch.arange(8.0) + 1
    with torch.no_grad():
        expected = network({"ids": IDS, "scale": scales}).numpy()
    chosen = Options()
    chosen.set("checkpoint.load_dir", checkpoint)
    for reader in (Pairs(), READERS["generator"]):
        user = UserParts(model=Described(), predict_reader=reader)
        found = run_prediction(chosen, WORLD, user)
        assert np.allclose(found.embeddings, expected, atol=1e-6)
        assert found.labels.tolist() == LABELS.tolist()
    run_prediction(chosen, WORLD, user, output=tmp_path / "written")
    about = json.loads((tmp_path / "written/_index.json").read_text())
    assert about["input"]["ids"] == {"shape": ["batch", 3], "dtype": "int64"}
    folder = run_conversion(chosen, WORLD, UserParts(model=Described()), tmp_path / "model")
    about = json.loads((folder / "model.json").read_text())
    assert about["input"]["ids"] == {"shape": ["batch", 3], "dtype": "int64"}
    with torch.no_grad():
        assert np.array_equal(plsc.load_network(folder, Described())({"ids": IDS, "scale": scales}), expected)


def test_a_loss_that_is_nan_saves_the_input(tmp_path):
    dataset = Pairs(lambda one: ({**one[0], "scale": math.nan}, one[1]))
    with pytest.raises(TrainingError, match="the first layer with a nan or inf: the output of the network"):
        train(options(tmp_path), WORLD, Described, UserParts(train_reader=dataset))
    saved = load_file(tmp_path / "run/bad_batch.safetensors")
    assert saved["ids"].shape == (4, 3)
    assert int(saved["scale"].isnan().sum()) == 1


def test_sparse_gradients_are_unscaled_clipped_and_measured_as_dense_ones(tmp_path, monkeypatch):
    user = UserParts(train_reader=TensorDataset(IDS, LABELS))
    more = {"optim__clip_norm": 0.01, "optim__momentum": 0.0, "optim__weight_decay": 0.0}
    scale_in_any_mode(monkeypatch)
    for name, scaling in (("plain", None), ("scaled", {"init_loss_scaling": 8.0})):
        folder = tmp_path / name
        train(options(folder, precision__scaling_arguments=scaling, **more), WORLD, Words, user)
    assert different(tmp_path / "plain/run/0", tmp_path / "scaled/run/0") == []
    norms = []
    for is_sparse in (True, False):
        folder = tmp_path / str(is_sparse)
        chosen = options(folder, train__callbacks="gradient_norm", **more)
        train(chosen, WORLD, lambda is_sparse=is_sparse: Words(is_sparse), user)
        lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
        norms.append([line["gradient_norm"] for line in lines if "gradient_norm" in line])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert len(norms[0]) == 2


def test_what_sparse_gradients_do_not_support_is_refused():
    groups = [("embedding", {"weight_decay": 0.1})]
    with pytest.raises(OptionError, match=r"do not support weight_decay 0\.1"):
        assign_parameters(Words(), groups)
