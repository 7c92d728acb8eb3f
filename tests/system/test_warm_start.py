"""Training starts from given weights, and goes on from imported ones."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from plsc import Entry
from plsc.checkpoint import load_weights
from plsc.errors import CheckpointError, OptionError, PlscError
from plsc.predict.importing import import_checkpoint
from tests.distributed import job
from tests.distributed.launch import run_ranks
from tests.images import write_dataset
from tests.system.small_entry import entry as small_entry
from tests.unit.checkpoint.external_files import random_network, save_arcface_torch

pytestmark = pytest.mark.slow

CLASSES, EMB, BATCH = 6, 16, 8


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", CLASSES, per_class=4)


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A checkpoint of one rank."""
    result = entry(dataset, tmp_path_factory.mktemp("run") / "a", set_lr=0.5 * BATCH / 1024).train()
    return result.checkpoint


def entry(dataset, save_dir, **settings):
    """One epoch whose steps change next to nothing, unless the learning rate is set."""
    ours = {"set_emb_size": EMB, "set_train_batch_size": BATCH, "set_lr": 1e-11, "set_num_workers": 0}
    return small_entry(dataset, save_dir, **{**ours, **settings})


def head_rows(path):
    return load_weights(path, "class_weights")["weight"]


def learnt(path):
    weights = load_weights(path)
    return {k: v for k, v in weights.items() if "running" not in k and v.is_floating_point()}


def same_start(checkpoint, source):
    for name, value in learnt(checkpoint).items():
        torch.testing.assert_close(value, learnt(source)[name], rtol=0, atol=1e-6)


def test_a_network_of_torchvision_keeps_its_neck(dataset, tmp_path):
    network = "torchvision/mobilenet_v3_small"
    save_file(random_network(network, EMB, (3, 32, 32)).network.state_dict(), tmp_path / "w.safetensors")
    settings = {"set_model_name": network, "set_image_shape": (3, 32, 32)}
    run = entry(
        dataset, tmp_path / "a", **settings, set_neck="norm-linear",
        set_pretrained=tmp_path / "w.safetensors",
    ).train()  # fmt: skip
    assert {name.split(".")[0] for name in run.warm_start.backbone.missing} == {"neck"}
    assert predicted(dataset, run.checkpoint).embeddings.shape == (24, EMB)
    kept = {name.split(".")[1] for name in load_weights(run.checkpoint) if "neck" in name}
    assert kept == {"norm", "fc"}


def predicted(dataset, checkpoint):
    ins = Entry()
    ins.set_dataset_dir(dataset)
    ins.set_checkpoint_dir(checkpoint)
    ins.set_num_workers(0)
    return ins.predict()


def test_a_warm_start_takes_network_and_head_but_neither_momentum_nor_position(
    dataset, trained, tmp_path, capsys
):
    result = entry(dataset, tmp_path / "b", set_pretrained=trained).train()
    same_start(result.checkpoint, trained)
    torch.testing.assert_close(head_rows(result.checkpoint), head_rows(trained), rtol=0, atol=1e-6)
    assert result.steps == 3
    assert result.warm_start.backbone.share == 1
    assert result.warm_start.head == ["head.weight"]
    printed = capsys.readouterr().out
    assert str(trained) in printed
    assert "100.0%" in printed


def test_with_last_the_first_start_takes_the_weights_and_the_next_one_resumes(dataset, trained, tmp_path):
    settings = {"set_pretrained": trained, "set_checkpoint_dir": "last"}
    first = entry(dataset, tmp_path / "b", **settings).train()
    same_start(first.checkpoint, trained)
    again = entry(dataset, tmp_path / "b", **settings, set_train_epochs=2).train()
    assert (first.steps, again.steps) == (3, 6)
    assert again.warm_start is None


def test_what_does_not_fit_is_left_and_told(dataset, trained, tmp_path):
    changes = {"set_class_num": 9, "set_image_shape": (3, 32, 32)}
    result = entry(dataset, tmp_path / "b", set_pretrained=trained, **changes).train()
    started = result.warm_start
    assert started.head_left == {"head.weight": "has shape [6, 16], expected [9, 16]"}
    assert started.backbone.shapes == {"neck.fc.weight": ((16, 1024), (16, 256))}
    assert 0.5 < started.backbone.share < 1
    assert any("neck.fc.weight [16, 1024]" in line for line in started.lines())


def test_a_checkpoint_at_a_url_and_a_file_of_torch_save_give_the_same_start(
    dataset, trained, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state, store = load_weights(trained), fsspec.filesystem("memory")
    for path in trained.iterdir():
        store.pipe_file(f"/run/0/{path.name}", path.read_bytes())
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "a.pth")
    for number, source in enumerate([tmp_path / "a.pth", "memory://run/0"]):
        result = entry(dataset, tmp_path / f"{number}", set_pretrained=str(source)).train()
        same_start(result.checkpoint, trained)
        assert result.warm_start.head == ["head.weight"] * (number == 1)


def test_what_is_no_start_is_one_line(dataset, trained, tmp_path):
    def refusal(source, **settings):
        save_dir = tmp_path / "run"
        with pytest.raises((CheckpointError, OptionError)) as caught:
            entry(dataset, save_dir, set_pretrained=str(source), **settings).train()
        assert "\n" not in str(caught.value)
        assert not (save_dir / "0").exists()
        return str(caught.value)

    assert "exclude" in refusal(trained, set_checkpoint_dir=str(trained))
    assert "manifest.json" in refusal(tmp_path)
    torch.save({"state_dict": {"a": torch.ones(3)}}, tmp_path / "a.pth")
    assert "network: a" in refusal(tmp_path / "a.pth")
    torch.save({"stem.0.weight": torch.full((16, 3, 3, 3), float("nan"))}, tmp_path / "c.pth")
    assert "stem.0.weight" in refusal(tmp_path / "c.pth")


def test_an_imported_checkpoint_predicts_as_its_network_and_trains_on(dataset, tmp_path, monkeypatch):
    for module in ("plsc.models.resnet", "plsc.checkpoint.layouts"):
        monkeypatch.setattr(f"{module}.BASIC_WIDTHS", (8, 16, 32, 64))
    network = random_network("IResNet18", EMB, (3, 16, 16))
    rows = torch.randn(CLASSES, EMB)
    save_arcface_torch(tmp_path / "theirs", rows, 2, network)
    ck = tmp_path / "ck"
    import_checkpoint(tmp_path / "theirs", ck)

    prediction = predicted(dataset, ck)
    images = images_of(dataset, prediction.names)
    with torch.no_grad():
        expected = network.eval()(images)
    np.testing.assert_allclose(prediction.embeddings, expected.numpy(), rtol=1e-4, atol=1e-5)

    warm = entry(dataset, tmp_path / "warm", set_pretrained=ck, set_model_name="IResNet18").train()
    assert warm.warm_start.head == ["head.weight"]
    torch.testing.assert_close(head_rows(warm.checkpoint), rows, rtol=0, atol=1e-5)

    with pytest.raises(PlscError, match=r"model\.pretrained"):  # it has no state to resume
        entry(dataset, tmp_path / "on", set_checkpoint_dir=ck, set_model_name="IResNet18").train()


def images_of(dataset, names):
    from PIL import Image

    pixels = [np.asarray(Image.open(dataset / name)).transpose(2, 0, 1) for name in names]
    return torch.from_numpy((np.stack(pixels).astype(np.float32) - 127.5) / 128)


def test_two_ranks_take_their_own_rows_of_a_checkpoint_of_one(dataset, trained, tmp_path):
    settings = [f"set_pretrained={str(trained)!r}", "set_lr=1e-11", "set_train_epochs=1"]
    done = run_ranks(job.__file__, 2, str(dataset), str(tmp_path / "b"), *settings)
    assert done.stdout.count(f"{trained}:") == 1
    same_start(tmp_path / "b/0", trained)
    torch.testing.assert_close(head_rows(tmp_path / "b/0"), head_rows(trained), rtol=0, atol=1e-6)
