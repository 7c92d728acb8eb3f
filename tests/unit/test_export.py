"""The folder of convert_for_prediction: what it holds, how it is loaded, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import plsc
from plsc.errors import CheckpointError
from plsc.models.base_model import BaseModel
from tests.images import write_dataset
from tests.system.small_entry import entry


class Flat(BaseModel):
    def __init__(self, emb_size=8):
        super().__init__()
        self.fc = nn.Linear(3 * 16 * 16, emb_size)

    def build_network(self, input, label, is_train=True):
        return self.fc(input.flatten(1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    dataset = write_dataset(folder / "faces", classes=3, per_class=8)
    entry(dataset, folder / "run").train()
    return dataset, folder / "run"


def test_the_folder_describes_the_network_and_loads_as_the_checkpoint(trained):
    dataset, run = trained
    folder = entry(dataset, run, set_checkpoint_dir=run / "0").convert_for_prediction()
    assert folder == run / "model"
    about = json.loads((folder / "model.json").read_text())
    assert about["input"] == {
        "shape": ["batch", 3, 16, 16], "dtype": "float32", "channels": "RGB",
        "preprocessing": "(x - 127.5) / 128",
    }  # fmt: skip
    assert about["output"] == {"shape": ["batch", 8], "normalised": False}
    images = torch.randn(5, 3, 16, 16)
    expected = plsc.load_network(run / "0")
    assert torch.equal(plsc.load_network(folder)(images), expected(images))
    assert load_file(folder / "model.safetensors").keys() == expected.state_dict().keys()
    with pytest.raises(CheckpointError, match="already exists; remove it"):
        entry(dataset, run, set_checkpoint_dir=run / "0").convert_for_prediction()


def test_a_custom_network_is_named_by_whoever_loads_it(trained, tmp_path):
    dataset, _ = trained
    ins = entry(dataset, tmp_path / "run")
    ins.set_model(Flat())
    checkpoint = ins.train().checkpoint
    ins = entry(dataset, tmp_path / "run", set_checkpoint_dir=checkpoint)
    ins.set_model(Flat())
    folder = ins.convert_for_prediction(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"load_network\(path, model="):
        plsc.load_network(folder)
    network = plsc.load_network(folder, model=Flat())
    assert torch.equal(network.fc.weight, load_file(folder / "model.safetensors")["fc.weight"])


def test_a_damaged_folder_is_refused(trained, tmp_path):
    dataset, run = trained
    ins = entry(dataset, run, set_checkpoint_dir=run / "0")
    folder = ins.convert_for_prediction(tmp_path / "model")
    about, weights = folder / "model.json", folder / "model.safetensors"
    good, raw = about.read_text(), bytearray(weights.read_bytes())
    raw[-5] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(CheckpointError, match="checksum differs"):
        plsc.load_network(folder)
    for bad, message in (
        ("[" * 10**5, "cannot be read"),
        ("{}", "its format is None"),
        (good.replace('"version": 1', '"version": 2'), "version 2; expected"),
        (json.dumps({**json.loads(good), "options": []}), "expected an object"),
        (good.replace("SmallResNet", "os:system"), "load_network"),
    ):
        about.write_text(bad)
        with pytest.raises(CheckpointError, match=message):
            plsc.load_network(folder)
